"""nginx: ``limit_conn``, answered with 429 at once.

Despite its name ``limit_conn`` counts requests that are being worked on, in shared memory, so all worker
processes of one nginx count together; several nginx do not. Nothing waits. The key is a constant, so that
all clients count together. What nginx cannot do is said in the file: it has no deadline for a whole answer,
and no pause before a retry, so it retries nothing and tells the client with ``Retry-After`` when to come
again.
"""

from __future__ import annotations

import math
import re
from urllib.parse import urlsplit

from include.capacity.policy.base import FREE_PATHS, ClassLimit, Policy, division, heading

FILE = "nginx.conf"


def render(policy: Policy) -> str:
    """A file for nginx's ``http`` context (``conf.d/``)."""
    gateway = policy.gateway
    upstream = f"upstream_{_word(policy.identifier(policy.classes[0]))}"
    zones, locations = [], []
    for item in policy.classes:
        each = policy.divided(item, gateway.replicas, "nginx")
        zone = f"zone_{_word(policy.identifier(item))}"
        zones.append(f"limit_conn_zone $server_name zone={zone}:32k;\n")
        locations.append(_location(policy, item, zone, each, upstream))
    return (
        heading(
            policy,
            "nginx counts requests being worked on, over all worker processes of one nginx; what is over the "
            f"limit is answered with 429 at once. {division(policy)}",
            "proxy_read_timeout is the longest silence: nginx has no deadline for a whole streamed answer. "
            "It cannot pause before a retry, so it does not retry; Retry-After tells the client when.",
            f"{', '.join(FREE_PATHS)} are not counted. Include it in the http block (conf.d/).",
        )
        + "".join(zones)
        + f"upstream {upstream} {{\n"
        f"    server {urlsplit(gateway.upstream).netloc} max_fails=0;\n"
        f"    keepalive {sum(item.limit for item in policy.classes)};\n"
        "}\n"
        "server {\n"
        f"    listen {gateway.listen};\n"
        f"    server_name {policy.identifier(policy.classes[0])};\n"
        "    client_max_body_size 64m;\n"
        "    client_body_buffer_size 1m;\n"
        f"    location ~ ^({'|'.join(FREE_PATHS)})$ {{\n{_proxied(upstream)}    }}\n"
        + "".join(locations)
        + "}\n"
    )


def _location(policy: Policy, item: ClassLimit, zone: str, limit: int, upstream: str) -> str:
    after_s = math.ceil(item.retries.backoff_s) or 1
    body = '{"error": {"message": "too many requests in flight", "type": "overloaded", "code": 429}}'
    # With a path of its own, a class's prefix is cut off: "/batch/v1/..." becomes "/v1/...".
    target = f"{upstream}/" if policy.shared else upstream
    return (
        f"    location {policy.path(item)} {{\n"
        f"        limit_conn {zone} {limit};\n"
        "        limit_conn_status 429;\n"
        "        limit_conn_log_level info;\n"
        f"        error_page 429 = @{zone};\n"
        f"{_proxied(target)}"
        "        proxy_buffering off;\n"
        f"        proxy_read_timeout {_duration(item.deadline_s)};\n"
        f"        proxy_send_timeout {_duration(item.deadline_s)};\n"
        "        proxy_next_upstream off;\n"
        "    }\n"
        f"    location @{zone} {{\n"
        "        default_type application/json;\n"
        f"        add_header Retry-After {after_s} always;\n"
        f"        return 429 '{body}';\n"
        "    }\n"
    )


def _proxied(target: str) -> str:
    """Passed on, over connections that are kept."""
    return (
        f"        proxy_pass http://{target};\n"
        "        proxy_http_version 1.1;\n"
        '        proxy_set_header Connection "";\n'
    )


def _duration(value_s: float) -> str:
    return f"{value_s:.0f}s" if value_s == int(value_s) else f"{math.ceil(value_s * 1000)}ms"


def _word(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "_", name)
