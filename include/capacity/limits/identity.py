"""What a limit belongs to.

``stack_id`` names everything a change may be attributed to (versions, arguments, driver, image);
``comparison_id`` names what may be compared from night to night: the same model, workload, class,
accelerator kind and count, on whatever stack.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from include.capacity.config import Accelerator, Workload


def stack_id(stack: Mapping[str, Any]) -> str:
    """12 hex digits over the stack's canonical JSON (sorted keys, so order does not matter)."""
    return _digest(stack)


def comparison_id(
    model: str,
    workload: Workload | Mapping[str, Any],
    service_class: str,
    accelerator: Accelerator | Mapping[str, Any],
) -> str:
    """12 hex digits over model, workload, class, accelerator kind and count."""
    work = workload.model_dump(mode="json") if isinstance(workload, Workload) else dict(workload)
    card = accelerator.model_dump(mode="json") if isinstance(accelerator, Accelerator) else accelerator
    return _digest(
        {
            "model": model,
            "workload": work,
            "service_class": service_class,
            "accelerator": [card["kind"], card["count"]],
        }
    )


def _digest(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
