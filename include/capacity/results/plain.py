"""Numbers as every JSON parser takes them. No pandas here: the API server writes and reads JSON too."""

from __future__ import annotations

import math
from typing import Any


def finite(data: Any) -> Any:
    """``data`` with every NaN or infinite number replaced by None, and numpy scalars by Python's."""
    if isinstance(data, dict):
        return {str(key): finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    if hasattr(data, "item") and not isinstance(data, str | bytes):
        data = data.item()
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data
