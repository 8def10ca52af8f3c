"""LiteLLM proxy: ``max_parallel_requests`` of a deployment.

Counted in each worker process of each proxy, so the limit is divided by ``gateway.replicas`` x
``gateway.processes``. Release 1.106.12 answers what is over it with 429 at once and counts a stream until its
last chunk; releases before the 2026 ones let requests wait without bound instead, and counted a stream only
until its first chunk.
"""

from __future__ import annotations

import math
from typing import Any

from include.capacity.policy.base import ClassLimit, NotPossible, Policy, division, heading, to_yaml

FILE = "litellm.yaml"


def render(policy: Policy) -> str:
    """A proxy configuration: one model (shared: one a class) and the router's settings."""
    gateway = policy.gateway
    for name in (policy.served_name, *gateway.fallbacks):
        if name.startswith("os.environ/") or "*" in name:
            raise NotPossible(
                f"the model name {name!r} means something else to LiteLLM (a variable or a pattern)"
            )
    # The router has one pause for all its models; the longer one keeps to both classes' policies.
    backoff_s = math.ceil(max(item.retries.backoff_s for item in policy.classes))
    data = {
        "model_list": [_deployment(policy, item) for item in policy.classes],
        "router_settings": {
            "num_retries": 0,
            "retry_after": backoff_s,
            "fallbacks": [{_name(policy, item): list(gateway.fallbacks)} for item in policy.classes]
            if gateway.fallbacks
            else [],
        },
    }
    return heading(
        policy,
        "LiteLLM counts in each worker process by itself and, in release 1.106.12, answers what is over the "
        "limit with 429 at once (older releases let it wait instead: check yours). "
        f"{division(policy)} Each has {gateway.processes} worker process(es) (gateway.processes): start it "
        f"with --num_workers {gateway.processes}.",
        f"Fallbacks: {', '.join(gateway.fallbacks) or 'none'} (gateway.fallbacks).",
        "Where the server wants a key, add api_key: os.environ/YOUR_VARIABLE to litellm_params.",
    ) + to_yaml(data)


def _name(policy: Policy, item: ClassLimit) -> str:
    """What clients ask for: the served name; for a shared server ``<served name>/<class>``."""
    return f"{policy.served_name}/{item.name}" if policy.shared else policy.served_name


def _deployment(policy: Policy, item: ClassLimit) -> dict[str, Any]:
    counters = policy.gateway.replicas * policy.gateway.processes
    return {
        "model_name": _name(policy, item),
        "litellm_params": {
            "model": f"hosted_vllm/{policy.served_name}",
            "api_base": f"{policy.gateway.upstream.rstrip('/')}/v1",
            "max_parallel_requests": policy.divided(item, counters, "LiteLLM processes"),
            "timeout": item.deadline_s,
            "stream_timeout": item.deadline_s,
            "num_retries": item.retries.attempts,
            "max_retries": 0,
        },
    }
