"""vLLM's ``/metrics``: the series we use, by today's names.

Only lines of these series reach the parser. Samples are summed over ``engine`` (and model) labels, except use
of the KV cache, of which the fullest engine counts.
"""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USE = "vllm:kv_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions_total"
PREFIX_QUERIES = "vllm:prefix_cache_queries_total"
PREFIX_HITS = "vllm:prefix_cache_hits_total"
REJECTIONS = "vllm:admission_rejections_total"
FINISHED = "vllm:request_success_total"
TTFT_SUM = "vllm:time_to_first_token_seconds_sum"
TTFT_COUNT = "vllm:time_to_first_token_seconds_count"
E2E_SUM = "vllm:e2e_request_latency_seconds_sum"
E2E_COUNT = "vllm:e2e_request_latency_seconds_count"
BY_STATUS = "http_requests_total"
BEHIND = "sim:behind_seconds"

OLD_NAMES = {
    "vllm:gpu_cache_usage_perc": KV_USE,
    "vllm:gpu_prefix_cache_queries_total": PREFIX_QUERIES,
    "vllm:gpu_prefix_cache_hits_total": PREFIX_HITS,
}
"""Names of older vLLM versions -> today's."""

KEPT = frozenset(
    {RUNNING, WAITING, KV_USE, PREEMPTIONS, PREFIX_QUERIES, PREFIX_HITS, FINISHED, TTFT_SUM, TTFT_COUNT}
    | {E2E_SUM, E2E_COUNT, REJECTIONS, BY_STATUS}
    | {"vllm:prompt_tokens_total", "vllm:generation_tokens_total"}
)
SPLIT = {FINISHED: "finished_reason", REJECTIONS: "reason", BY_STATUS: "status"}
"""Series that are also kept apart by a label, as ``name{value}``."""
FULLEST = frozenset({KV_USE})
"""Series of which the largest label set counts, instead of the sum."""

_WANTED = re.compile(
    r"^(?:"
    + "|".join(
        re.escape(name) for name in sorted(KEPT | set(OLD_NAMES) | {n.removesuffix("_total") for n in KEPT})
    )
    + r"|sim:[a-z_]+)(?=[\s{])"
)


def parse(text: str) -> dict[str, float]:
    """The series we use, by today's names; absent where the server does not export them.

    What is split by a label also comes apart, ``request_success_total`` by reason (as
    ``vllm:request_success_total{length}``), ``admission_rejections_total`` likewise,
    ``http_requests_total`` by status. Text that is no Prometheus exposition gives ``{}``.
    """
    lines = [line for line in text.splitlines() if _WANTED.match(line)]
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                name = OLD_NAMES.get(sample.name, sample.name)
                if name in FULLEST:
                    found[name] = max(found.get(name, 0.0), sample.value)
                    continue
                found[name] = found.get(name, 0.0) + sample.value
                label = sample.labels.get(SPLIT.get(name, ""))
                if label:
                    found[f"{name}{{{label}}}"] = found.get(f"{name}{{{label}}}", 0.0) + sample.value
    except ValueError:
        return {}
    return found


def busy(series: dict[str, float]) -> float | None:
    """Requests the server runs or keeps waiting; None if it does not tell."""
    if RUNNING not in series or WAITING not in series:
        return None
    return series[RUNNING] + series[WAITING]
