"""Small profiles without noise, whose times can be worked out by hand."""

from __future__ import annotations

from typing import Any

from include.capacity.simulator.profile import Profile


def tiny(*, per_sequence_s: float = 0.0, per_prefill_token_s: float = 0.0, **changes: Any) -> Profile:
    """Two slots, one second an iteration; ``changes`` go to the engine, or to the profile itself."""
    engine: dict[str, Any] = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 1000,
        "kv_cache_tokens": 10_000,
        "max_model_len": 1000,
        "iteration": {
            "base_s": changes.pop("base_s", 1.0),
            "per_sequence_s": per_sequence_s,
            "per_prefill_token_s": per_prefill_token_s,
            "per_context_token_s": changes.pop("per_context_token_s", 0.0),
        },
    }
    outer = {
        key: changes.pop(key)
        for key in ("time_scale", "stream_interval", "retry_after_s", "eos_median_tokens", "eos_sigma")
        if key in changes
    }
    return Profile.model_validate(
        {"name": "tiny", "model": "sim/tiny", **outer, "engine": {**engine, **changes}}
    )
