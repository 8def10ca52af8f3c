"""What a simulated server is like: one YAML file a profile, in ``include/config/profiles``.

A profile has two halves. ``engine`` is the mechanism, and all that the true limits depend on; its
hash (:attr:`Profile.engine_hash`) ties a kept truth to it. The rest is dress: the name served, how
fast the clock runs, how tokens are grouped into chunks.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pydantic import Field, model_validator

from include.capacity.config import Strict, parse_yaml, validate
from include.capacity.errors import ConfigError

PROFILES = Path(__file__).parents[2] / "config" / "profiles"


class IterationTime(Strict):
    """Seconds one engine iteration takes: a sum over the work in it, before noise."""

    base_s: float = Field(gt=0)
    """Reading the weights once, launching kernels: paid however small the batch."""
    per_sequence_s: float = Field(0.0, ge=0)
    """For each sequence that decodes one token."""
    per_prefill_token_s: float = Field(0.0, ge=0)
    """For each prompt token computed."""
    per_context_token_s: float = Field(0.0, ge=0)
    """For each token of KV cache that decoding sequences attend to."""


class Stalls(Strict):
    """Pauses of the whole engine (garbage collection, a noisy neighbour)."""

    mean_every_s: float = Field(gt=0)
    """Mean of the exponential time between two."""
    duration_s: float = Field(gt=0)
    """Added to the iteration that begins when one is due."""


class EngineProfile(Strict):
    """The mechanism: everything latencies, refusals and limits follow from."""

    seed: int = 0
    """Of the noise and the stalls."""
    max_num_seqs: int = Field(ge=1, le=100_000)
    """Slots: sequences in one iteration (vLLM's ``--max-num-seqs``)."""
    max_num_batched_tokens: int = Field(2048, ge=1)
    """Token budget of one iteration; longer prompts are computed in chunks."""
    max_num_queued_reqs: int | None = Field(None, ge=1)
    """Requests that may be unfinished at once, waiting and running together; one more gets 503.
    null: no bound, vLLM's default."""
    kv_cache_tokens: int = Field(ge=1)
    """Tokens of KV cache; when they run out the youngest sequence is preempted and recomputed."""
    max_model_len: int = Field(16_384, ge=2)
    """Longest prompt plus answer."""
    prefix_caching: bool = True
    """Skip the computation of a prompt's head that an earlier prompt shared, in blocks of 16."""
    iteration: IterationTime
    noise_sigma: float = Field(0.0, ge=0, le=2)
    """Sigma of the log-normal factor (mean 1) on each iteration's time."""
    stalls: Stalls | None = None
    crash_at_running: int | None = Field(None, ge=1)
    """The process dies when this many sequences run."""

    @model_validator(mode="after")
    def _one_request_fits(self) -> EngineProfile:
        if self.kv_cache_tokens < self.max_model_len:
            raise ValueError(
                f"kv_cache_tokens {self.kv_cache_tokens} is below max_model_len {self.max_model_len}: "
                "the longest request would never fit"
            )
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs "
                f"{self.max_num_seqs}: not every slot could decode"
            )
        return self


class Profile(Strict):
    """A simulated server."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    model: str = Field(min_length=1, max_length=256)
    """The served model name, where the command line gives none."""
    vllm_version: str = "0.32.0"
    """The vLLM whose API, metrics and scheduling rules are imitated."""
    time_scale: float = Field(1.0, gt=0, le=1000)
    """Server seconds per wall second."""
    startup_s: float = Field(0.0, ge=0)
    """Server seconds before the port opens, as loading weights takes."""
    stream_interval: int = Field(1, ge=1)
    """Tokens per streamed chunk, as vLLM's ``--stream-interval``; the first token always goes alone."""
    retry_after_s: int | None = Field(None, ge=1)
    """Sent as ``Retry-After`` with a 503, in server seconds. vLLM itself sends none."""
    eos_median_tokens: float = Field(150.0, gt=0)
    """Median length of an answer that may end by itself (no ``ignore_eos``); log-normal."""
    eos_sigma: float = Field(0.6, ge=0, le=3)
    engine: EngineProfile

    @property
    def engine_hash(self) -> str:
        """Names the mechanism: equal hashes have equal truths."""
        text = json.dumps(self.engine.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_profile(name_or_path: str | Path) -> Profile:
    """The profile of that name in ``include/config/profiles``, or the one in that file.

    A file's profile is named by its stem unless it names itself. Raises ConfigError.
    """
    text_name = str(name_or_path)
    is_path = "/" in text_name or text_name.endswith((".yaml", ".yml"))
    file = Path(text_name) if is_path else PROFILES / f"{text_name}.yaml"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = sorted(path.stem for path in PROFILES.glob("*.yaml"))
        raise ConfigError(
            f"{file}: cannot read simulator profile {text_name!r}: {error}; expected a file or one of {known}"
        ) from error
    data = parse_yaml(text, str(file))
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: expected a mapping at the top, found {type(data).__name__}")
    return validate(Profile, {"name": file.stem, **data}, str(file))
