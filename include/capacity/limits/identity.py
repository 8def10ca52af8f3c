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

from include.capacity.config import Accelerator, ServiceClass


def stack_id(stack: Mapping[str, Any]) -> str:
    """12 hex digits over the stack's canonical JSON (sorted keys, so order does not matter).

    Without ``observed``, which holds what differs a little at every start (the size of the KV cache): one
    stack started twice is one stack.
    """
    return _digest({key: value for key, value in stack.items() if key != "observed"})


def comparison_id(model: str, name: str, service_class: ServiceClass, accelerator: Accelerator) -> str:
    """12 hex digits over model, class name, its workload, accelerator kind and count.

    Deadline, floor and objectives are inputs of a limit, printed with it, and not part of the name.
    """
    return _digest(
        {
            "model": model,
            "service_class": name,
            "workload": service_class.workload.model_dump(mode="json"),
            "accelerator": [accelerator.kind, accelerator.count],
        }
    )


def _digest(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
