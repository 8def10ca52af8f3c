"""Envoy Gateway: a BackendTrafficPolicy for the HTTPRoute of each class.

It becomes the circuit breaker of :mod:`include.capacity.policy.envoy`, so the same holds: counted per Envoy
process, and per backend of a route's rule; what is over the limit gets a 503 at once.
"""

from __future__ import annotations

from typing import Any

from include.capacity.policy.base import (
    FREE_PATHS,
    ClassLimit,
    NotPossible,
    Policy,
    division,
    heading,
    to_yaml,
)
from include.capacity.policy.envoy import RETRIABLE, RETRY_ON, backoff_s, limits_of

FILE = "envoy-gateway.yaml"


def render(policy: Policy) -> str:
    """One Kubernetes document a class."""
    documents = [to_yaml(_document(policy, item)) for item in policy.classes]
    routes = ", ".join(f"{item.name}: {policy.identifier(item)}" for item in policy.classes)
    return heading(
        policy,
        "Envoy counts per process and per backend of a route's rule; what is over the limit is answered with "
        f"503 at once. {division(policy)} Every Envoy pod counts: set it to an autoscaler's maximum.",
        "Each class needs an HTTPRoute of its own, with one rule and this server as its only backend, of "
        f"this name (or change targetRefs): {routes}. Let probes ({', '.join(FREE_PATHS)}) take another "
        "HTTPRoute, or a full server refuses them.",
    ) + "---\n".join(documents)


def _document(policy: Policy, item: ClassLimit) -> dict[str, Any]:
    name = policy.identifier(item)
    bound = limits_of(policy, item)
    spec: dict[str, Any] = {
        "targetRefs": [{"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "name": name}],
        "circuitBreaker": {
            "maxConnections": bound["connections"],
            "maxPendingRequests": bound["pending"],
            "maxParallelRequests": bound["requests"],
            "maxParallelRetries": bound["retries"],
        },
        "timeout": {"http": {"requestTimeout": _duration(item.deadline_s)}},
    }
    if item.retries.attempts:
        first_s, longest_s = backoff_s(item)
        spec["retry"] = {
            "numRetries": item.retries.attempts,
            "retryOn": {
                "triggers": list(RETRY_ON),
                "httpStatusCodes": RETRIABLE,
            },
            "perRetry": {
                "backOff": {
                    "baseInterval": _duration(first_s),
                    "maxInterval": _duration(longest_s),
                }
            },
        }
    return {
        "apiVersion": "gateway.envoyproxy.io/v1alpha1",
        "kind": "BackendTrafficPolicy",
        "metadata": {
            "name": name,
            "annotations": {"capacity/model": policy.model, "capacity/class": item.name},
        },
        "spec": spec,
    }


def _duration(value_s: float) -> str:
    """A Gateway API duration (GEP-2257: up to four parts of at most five digits, no fractions)."""
    whole_ms = round(value_s * 1000)
    parts = [(whole_ms // 3_600_000, "h"), (whole_ms // 60_000 % 60, "m"), (whole_ms // 1000 % 60, "s")]
    text = "".join(f"{count}{unit}" for count, unit in [*parts, (whole_ms % 1000, "ms")] if count)
    if not text:
        raise NotPossible(f"{value_s} s is too short for a duration")
    return text
