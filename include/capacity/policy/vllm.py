"""vLLM itself: ``--max-num-queued-reqs``, answered with 503 at once.

Despite its name it bounds all unfinished requests, running and waiting together (``vllm/config/scheduler.py``
and ``AsyncLLM.check_admission`` of 0.32; the flag came with 0.29), so its value is the limit itself. Taking
``max_num_seqs`` off would refuse requests that were proven to be served well. ``--max-num-seqs`` stays as it
was measured: another one is another stack. The server does not know classes: a shared pair has the sum of
both, which keeps the server from more than was proven, not one class from the other's part.
"""

from __future__ import annotations

import re

from include.capacity.policy.base import NotPossible, Policy, heading, to_yaml

FILE = "vllm.yaml"
SINCE = (0, 29)


def render(policy: Policy) -> str:
    """A file for ``vllm serve --config``."""
    known = re.match(r"(\d+)\.(\d+)", policy.vllm_version or "")
    if known and tuple(map(int, known.groups())) < SINCE:
        raise NotPossible(
            f"vLLM {policy.vllm_version} has no --max-num-queued-reqs; it came with "
            f"{'.'.join(map(str, SINCE))}"
        )
    version = policy.vllm_version or "of unknown version"
    counts = [
        "vLLM counts running and waiting requests together (one with n > 1 as n), over its API server "
        "processes and data-parallel ranks, and answers what is over the limit with 503 at once. It needs no "
        "division: it is the one place that sees all gateways. Keep --max-num-seqs as it was measured.",
        f"Measured with vLLM {version}. The flag came with 0.29; before 0.32, use it with "
        "--api-server-count 1: each API server process may count for itself.",
        "It has no deadline and no retries: those are the gateway's.",
    ]
    if policy.shared:
        counts.append("It does not know classes: use it beside a gateway that keeps them apart.")
    limit = sum(item.limit for item in policy.classes)
    return heading(policy, *counts) + to_yaml({"max-num-queued-reqs": limit})
