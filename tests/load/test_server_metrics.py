"""vLLM's metrics: names, sums over engines, differences over a window, what is unknown."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from include.capacity.load.clock import Clock
from include.capacity.load.server_metrics import MetricsPoller, Poll, foreign_peak, rise, summarize
from include.capacity.vllm_metrics import (
    E2E_COUNT,
    FINISHED,
    KV_USE,
    PREEMPTIONS,
    PREFIX_HITS,
    PREFIX_QUERIES,
    REJECTIONS,
    RUNNING,
    TTFT_COUNT,
    TTFT_SUM,
    WAITING,
    busy,
    parse,
)

TWO_ENGINES = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 1.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 10.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 20.0
vllm:request_success_total{engine="1",finished_reason="length",model_name="m"} 30.0
# TYPE vllm:request_success_created gauge
vllm:request_success_created{engine="0",finished_reason="stop",model_name="m"} 1.7e+09
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 5.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 60.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 60.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 12.0
# TYPE http_requests_total counter
http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"} 60.0
http_requests_total{handler="/v1/chat/completions",method="POST",status="5xx"} 4.0
# TYPE vllm:admission_rejections counter
vllm:admission_rejections_total{engine="0",model_name="m",reason="max_num_queued_reqs"} 6.0
vllm:admission_rejections_total{engine="0",model_name="m",reason="max_num_queued_tokens"} 2.0
# TYPE vllm:admission_rejections_created gauge
vllm:admission_rejections_created{engine="0",model_name="m",reason="max_num_queued_reqs"} 1.7e+09
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 14926.0
# TYPE sim:behind_seconds gauge
sim:behind_seconds{engine="0",model_name="m"} 0.02
"""


def test_engines_are_summed_and_the_fullest_cache_counts() -> None:
    found = parse(TWO_ENGINES)
    assert found[RUNNING] == 7.0
    assert found[WAITING] == 1.0
    assert found[KV_USE] == 0.5
    assert found[FINISHED] == 60.0
    assert found[f"{FINISHED}{{length}}"] == 50.0
    assert found["http_requests_total{5xx}"] == 4.0
    assert found[REJECTIONS] == 8.0
    assert found[f"{REJECTIONS}{{max_num_queued_reqs}}"] == 6.0
    assert (found[TTFT_SUM], found[TTFT_COUNT]) == (12.0, 60.0)
    assert found["sim:behind_seconds"] == 0.02
    assert busy(found) == 8.0


def test_what_is_not_exported_is_absent_not_zero() -> None:
    found = parse(TWO_ENGINES)
    for name in (PREEMPTIONS, PREFIX_HITS, PREFIX_QUERIES, E2E_COUNT):
        assert name not in found
    assert not any(name.startswith("python_") for name in found)
    assert busy({RUNNING: 3.0}) is None


def test_names_of_older_versions_are_todays() -> None:
    old = (
        "# TYPE vllm:gpu_cache_usage_perc gauge\n"
        'vllm:gpu_cache_usage_perc{model_name="m"} 0.75\n'
        "# TYPE vllm:gpu_prefix_cache_hits_total counter\n"
        'vllm:gpu_prefix_cache_hits_total{model_name="m"} 7.0\n'
    )
    assert parse(old) == {KV_USE: 0.75, PREFIX_HITS: 7.0}


@pytest.mark.parametrize("text", ["", "<html>", "vllm:num_requests_running{ oops", "{}"])
def test_what_is_no_exposition_is_nothing(text: str) -> None:
    assert parse(text) == {}


def polls(*readings: tuple[float, dict[str, float]], own: int = 0) -> list[Poll]:
    return [Poll(at, series, own) for at, series in readings]


def test_counters_are_differenced_between_the_ends_of_the_window() -> None:
    read = polls(*((float(at), {FINISHED: 100.0 + 10 * at}) for at in range(11)))
    assert rise(read, FINISHED, 2.5, 7.5) == pytest.approx(50.0)
    assert rise(read, FINISHED, 2.0, 8.0) == pytest.approx(60.0)


def test_a_counter_that_fell_or_was_read_once_is_unknown() -> None:
    reset = polls((0.0, {FINISHED: 90.0}), (1.0, {FINISHED: 95.0}), (2.0, {FINISHED: 3.0}))
    assert rise(reset, FINISHED, 0.0, 2.0) is None
    assert rise(reset, FINISHED, 0.0, 1.0) == 5.0, "the reset came after the window"
    assert rise(polls((1.0, {FINISHED: 9.0})), FINISHED, 0.0, 2.0) is None
    assert rise(reset, PREEMPTIONS, 0.0, 2.0) is None


def test_a_window_is_summarized_and_unknown_stays_unknown() -> None:
    read = polls(
        *(
            (
                float(at),
                {
                    RUNNING: 2.0 + at,
                    WAITING: 0.0,
                    TTFT_SUM: 0.5 * at,
                    TTFT_COUNT: 5.0 * at,
                    PREFIX_HITS: 30.0 * at,
                    PREFIX_QUERIES: 120.0 * at,
                    PREEMPTIONS: 3.0 + at,
                    REJECTIONS: 7.0 * at,
                    KV_USE: 0.2 * at,
                },
            )
            for at in range(6)
        )
    )
    found = summarize(read, 1.0, 3.0)
    assert found["server_running_mean"] == 4.0
    assert found["server_running_peak"] == 5.0
    assert found["server_waiting_peak"] == 0.0
    assert found["server_ttft_mean_s"] == pytest.approx(0.1)
    assert found["server_prefix_hit_share"] == pytest.approx(0.25)
    assert found["server_preemptions"] == pytest.approx(2.0)
    assert found["server_rejections"] == pytest.approx(14.0)
    assert found["server_kv_use_peak"] == pytest.approx(0.6)
    for unknown in ("server_requests_finished", "server_e2e_mean_s"):
        assert found[unknown] is None
    for series, column in ((PREEMPTIONS, "preemptions"), (REJECTIONS, "rejections"), (KV_USE, "kv_use_peak")):
        without = [Poll(p.at, {k: v for k, v in p.series.items() if k != series}, 0) for p in read]
        assert summarize(without, 1.0, 3.0)[f"server_{column}"] is None
    assert all(value is None for value in summarize([], 0.0, 1.0).values())


def test_nothing_finished_gives_no_mean() -> None:
    read = polls(*((float(at), {TTFT_SUM: 4.0, TTFT_COUNT: 9.0}) for at in range(3)))
    assert summarize(read, 0.0, 2.0)["server_ttft_mean_s"] is None


def test_foreign_traffic_is_an_excess_that_lasts() -> None:
    def at(*busy_counts: float) -> list[Poll]:
        return [Poll(float(k), {RUNNING: n, WAITING: 0.0}, 8) for k, n in enumerate(busy_counts)]

    assert foreign_peak(at(8, 8, 14, 8, 8)) == 0.0, "one reading is our own aborted requests"
    assert foreign_peak(at(8, 12, 14, 11, 8)) == 3.0
    assert foreign_peak(at(8, 5, 3)) == 0.0
    assert foreign_peak(at(14, 14)) is None
    assert foreign_peak(polls(*((float(k), {RUNNING: 9.0}) for k in range(5)))) is None


@pytest.fixture
def exporter() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/metrics"
            self.send_response(200 if found else 404)
            self.end_headers()
            if found:
                self.wfile.write(TWO_ENGINES.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_the_poller_reads_until_it_is_stopped(exporter: str) -> None:
    read = threading.Event()

    def own() -> int:
        if len(poller.polls) >= 3:
            read.set()
        return 5

    poller = MetricsPoller(f"{exporter}/metrics", Clock(), every_wall_s=0.01, own=own)
    poller.start()
    assert read.wait(20)
    poller.stop()
    after = len(poller.polls)
    assert after >= 3
    table = poller.table("step-1").to_pandas()
    assert set(table["step"]) == {"step-1"}
    assert table[table["series"] == RUNNING]["value"].tolist() == [7.0] * after
    assert table["at_s"].is_monotonic_increasing
    assert poller.polls[0].own == 5
    assert poller.misses == 0


def test_no_metrics_are_misses_not_zeros(exporter: str) -> None:
    for url in (f"{exporter}/nothing", "http://127.0.0.1:9/metrics"):
        poller = MetricsPoller(url, Clock(), every_wall_s=1.0, own=lambda: 0)
        assert poller.poll() is None
        assert (poller.polls, poller.misses) == ([], 1)
        assert poller.table("s").num_rows == 0
        poller.stop()
