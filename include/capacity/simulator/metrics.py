"""The simulated server's ``/metrics``: vLLM's V1 names, labels and buckets, in Prometheus text.

Rendered by hand: a scrape takes about 0.1 ms instead of several, and on a clock 20 times as fast as
life a scrape's milliseconds are tenths of a second of everybody's first token.

What vLLM does not have is called ``sim:``. ``sim:behind_seconds`` is how late the server handed over
iterations that had ended, in server seconds: what 95 % of those of the last whole wall second stayed
below. A single hiccup of the machine is not "behind"; the largest since the start is
``sim:behind_seconds_max``. The timer's own grain is about a wall millisecond.
"""

from __future__ import annotations

from bisect import bisect_left

TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_TOKENS = tuple(float(n) for n in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384))


def token_buckets(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to the longest request."""
    found: list[float] = []
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale > max_model_len:
                return tuple(found)
            found.append(float(digit * scale))
        scale *= 10


class Histogram:
    """Counts of values per bucket, cumulative only when shown."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, ``times`` over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Histograms:
    """One for each of vLLM's that follow from what a request lives through."""

    def __init__(self, max_model_len: int) -> None:
        tokens = token_buckets(max_model_len)
        self.ttft = Histogram(TTFT_S)
        self.inter_token = Histogram(PER_TOKEN_S)
        self.per_output_token = Histogram(PER_TOKEN_S)
        self.e2e = Histogram(REQUEST_S)
        self.queue = Histogram(REQUEST_S)
        self.inference = Histogram(REQUEST_S)
        self.prefill = Histogram(REQUEST_S)
        self.decode = Histogram(REQUEST_S)
        self.prompt = Histogram(tokens)
        self.generation = Histogram(tokens)
        self.max_tokens = Histogram(tokens)
        self.iteration = Histogram(ITERATION_TOKENS)

    def named(self) -> list[tuple[str, str, Histogram]]:
        """(vLLM's name, help, histogram) of each."""
        return [
            ("time_to_first_token_seconds", "Time to first token in seconds.", self.ttft),
            ("inter_token_latency_seconds", "Inter-token latency in seconds.", self.inter_token),
            (
                "request_time_per_output_token_seconds",
                "Time per output token of a request in seconds.",
                self.per_output_token,
            ),
            ("e2e_request_latency_seconds", "End-to-end request latency in seconds.", self.e2e),
            ("request_queue_time_seconds", "Time a request waited in seconds.", self.queue),
            ("request_inference_time_seconds", "Time a request was running in seconds.", self.inference),
            ("request_prefill_time_seconds", "Time of a request's prefill in seconds.", self.prefill),
            ("request_decode_time_seconds", "Time of a request's decoding in seconds.", self.decode),
            ("request_prompt_tokens", "Prefill tokens of a request.", self.prompt),
            ("request_generation_tokens", "Generation tokens of a request.", self.generation),
            ("request_params_max_tokens", "The request's max_tokens.", self.max_tokens),
            ("iteration_tokens_total", "Tokens computed in an engine step.", self.iteration),
        ]


class Exposition:
    """Prometheus text, one metric family after another."""

    def __init__(self, model: str) -> None:
        self._labels = f'engine="0",model_name="{_escaped(model)}"'
        self._lines: list[str] = []

    def head(self, name: str, kind: str, text: str) -> None:
        """Start a family."""
        self._lines += (f"# HELP {name} {text}", f"# TYPE {name} {kind}")

    def sample(self, name: str, value: float, extra: str = "") -> None:
        """One sample; ``extra`` holds more labels, ready to print."""
        labels = f"{self._labels},{extra}" if extra else self._labels
        self._lines.append(f"{name}{{{labels}}} {float(value)!r}")

    def single(self, name: str, kind: str, text: str, value: float) -> None:
        """A family of one sample."""
        self.head(name, kind, text)
        self.sample(name, value)

    def histogram(self, name: str, text: str, histogram: Histogram) -> None:
        """A histogram family."""
        self.head(name, "histogram", text)
        labels, lines = self._labels, self._lines
        count = 0
        for bound, here in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
            count += here
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {float(count)!r}')
        self.sample(f"{name}_count", count)
        self.sample(f"{name}_sum", histogram.total)

    def text(self) -> bytes:
        """All of it."""
        return ("\n".join(self._lines) + "\n").encode()


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
