"""Plain Envoy: a circuit breaker on the cluster of each class, answered with 503 at once.

``max_requests`` bounds the requests in flight to the cluster, over all worker threads of one Envoy process (a
count without a lock: for a moment as many more as there are threads may pass). What is over it gets a 503
with ``x-envoy-overloaded``. ``max_pending_requests`` only holds requests whose connection is still being
made: with HTTP/1.1 none is sent without having been pending unless a connection is idle, so 0 would refuse
nearly everything; there are more connections than requests allowed, so none waits for one to become free.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from include.capacity.policy.base import FREE_PATHS, ClassLimit, Policy, division, heading, to_yaml

FILE = "envoy.yaml"

TYPES = "type.googleapis.com/envoy.extensions"
RETRY_ON = ("connect-failure", "refused-stream", "reset", "retriable-status-codes")
RETRIABLE = [429, 503]


def render(policy: Policy) -> str:
    """A whole bootstrap file: one listener, a route and a cluster for each class."""
    data = {
        "static_resources": {
            "listeners": [_listener(policy)],
            "clusters": [_cluster(policy, item) for item in policy.classes],
        }
    }
    return heading(
        policy,
        "Envoy counts requests in flight over all threads of one process; what is over the limit is answered "
        f"with 503 at once. {division(policy)}",
        "The route's timeout is the deadline of the whole answer, retries included. "
        f"{', '.join(FREE_PATHS)} are not counted.",
    ) + to_yaml(data)


def limits_of(policy: Policy, item: ClassLimit) -> dict[str, int]:
    """Connections, pending requests, requests in flight and parallel retries of one Envoy."""
    each = policy.divided(item, policy.gateway.replicas, "Envoys")
    return {"connections": 2 * each + 1, "pending": each, "requests": each, "retries": each}


def backoff_s(item: ClassLimit) -> tuple[float, float]:
    """The first pause before a retry and the longest; Envoy takes none below a millisecond."""
    first_s = max(0.001, item.retries.backoff_s)
    return first_s, 10 * first_s


def _listener(policy: Policy) -> dict[str, Any]:
    manager = {
        "@type": f"{TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "capacity",
        "route_config": {
            "name": "capacity",
            "virtual_hosts": [
                {
                    "name": "capacity",
                    "domains": ["*"],
                    "routes": [
                        *(_free(policy, path) for path in FREE_PATHS),
                        *(_route(policy, item) for item in policy.classes),
                    ],
                }
            ],
        },
        "http_filters": [
            {"name": "router", "typed_config": {"@type": f"{TYPES}.filters.http.router.v3.Router"}}
        ],
    }
    host, port = policy.gateway.listen.split(":")
    return {
        "name": "capacity",
        "address": _address(host, int(port)),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }


def _free(policy: Policy, path: str) -> dict[str, Any]:
    """A path that is not counted with the rest: requests of high priority have a breaker of their own."""
    return {
        "match": {"path": path},
        "route": {"cluster": policy.identifier(policy.classes[0]), "priority": "HIGH"},
    }


def _route(policy: Policy, item: ClassLimit) -> dict[str, Any]:
    deadline = f"{max(0.001, item.deadline_s):.3f}s"  # 0 would be none
    route: dict[str, Any] = {
        "cluster": policy.identifier(item),
        "timeout": deadline,
        "idle_timeout": deadline,
    }
    if policy.shared:
        route["prefix_rewrite"] = "/"
    if item.retries.attempts:
        first_s, longest_s = backoff_s(item)
        route["retry_policy"] = {
            "retry_on": ",".join(RETRY_ON),
            "retriable_status_codes": RETRIABLE,
            "num_retries": item.retries.attempts,
            "retry_back_off": {
                "base_interval": f"{first_s:.3f}s",
                "max_interval": f"{longest_s:.3f}s",
            },
        }
    return {"match": {"prefix": policy.path(item)}, "route": route}


def _cluster(policy: Policy, item: ClassLimit) -> dict[str, Any]:
    name = policy.identifier(item)
    server = urlsplit(policy.gateway.upstream)
    bound = limits_of(policy, item)
    return {
        "name": name,
        "type": "STRICT_DNS",
        "connect_timeout": f"{min(5.0, max(0.001, item.deadline_s)):.3f}s",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [
                {
                    "lb_endpoints": [
                        {"endpoint": {"address": _address(str(server.hostname), server.port or 80)}}
                    ]
                }
            ],
        },
        "circuit_breakers": {
            "thresholds": [
                {
                    "priority": "DEFAULT",
                    "max_connections": bound["connections"],
                    "max_pending_requests": bound["pending"],
                    "max_requests": bound["requests"],
                    "max_retries": bound["retries"],
                }
            ]
        },
    }


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
