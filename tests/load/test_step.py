"""Whole steps over real HTTP, against a server of known truth."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from include.capacity.config import Lengths, ServiceClass, StepBounds, Workload
from include.capacity.errors import ConfigError, LoadStopped, MeasurementError, RequestRefused
from include.capacity.load import server_metrics
from include.capacity.load import step as step_module
from include.capacity.load.loop import Decide
from include.capacity.load.progress import Snapshot
from include.capacity.load.request import Answer, Prepared, Sender, Target
from include.capacity.load.step import StepRun, poll_every_s, run_step
from include.capacity.results.schema import CLIENT_COLUMNS, REQUEST_COLUMNS, SERVER_COLUMNS
from include.capacity.results.spec import Load, StepSpec
from include.capacity.words import Outcome, Phase, State
from tests.load.asking import ask
from tests.nullserver import NullServer, Plan

SCALE = 20.0
"""The server's clock runs 20 times as fast as ours: a second of the ramp takes 50 ms."""

FAST = Plan(ttft_s=0.02, itl_s=0.005, tokens=5)
BOUNDS = StepBounds(warmup_cap_s=1000.0)
"""A cap that also a busy machine does not reach before it is steady."""


def service_class(stream: bool = True, deadline_s: float = 60.0, **workload: Any) -> ServiceClass:
    return ServiceClass(
        rule="batch",
        workload=Workload(
            name="chat" if stream else "classification",
            stream=stream,
            prompt_tokens=Lengths(median=32, sigma=0.3),
            output_tokens=Lengths(median=8, sigma=0.3),
            **workload,
        ),
        deadline_s=deadline_s,
        completion_floor=0.95,
        ladder=[1],
    )


CLASSES = {"interactive": service_class(), "batch": service_class(stream=False)}


def spec(n: int = 4, requests: int = 40, name: str = "interactive", **changes: Any) -> StepSpec:
    load = Load(service_class=name, concurrency=n, requests=requests, max_requests=requests)
    usual: dict[str, Any] = {
        "model": "null",
        "phase": Phase.PROVE,
        "loads": (load,),
        "min_window_s": 1.0,
        "cap_s": 300.0,
        "seed": 3,
    }
    return StepSpec(**{**usual, **changes})


def measured(server: NullServer, what: StepSpec | None = None, **how: Any) -> StepRun:
    options: dict[str, Any] = {"classes": CLASSES, "bounds": BOUNDS, "clock_scale": SCALE}
    return run_step(what or spec(), target=Target(server.url, "null"), **{**options, **how})


def test_a_step_has_all_its_rows_and_facts() -> None:
    with NullServer(FAST) as server:
        run = measured(server, run_id="r1", attempt=2)
        sent = len(server.records)
    rows = run.requests.to_pandas()
    assert tuple(run.requests.column_names) == REQUEST_COLUMNS
    assert len(rows) == sent
    counted = rows[rows["counted"]]
    assert len(counted) == 40
    assert set(counted["outcome"]) == {"completed"}
    assert set(counted["output_tokens"]) == {5}
    assert set(counted["slot"]) == {0, 1, 2, 3}
    assert counted["started_s"].is_monotonic_increasing
    for column in ("send_lag_s", "ttft_s", "first_answer_s", "last_token_s", "e2e_s", "refill_s"):
        assert (counted[column] >= 0).all(), column
    assert (counted["ttft_s"] >= 0.02 * SCALE - 0.01).all(), "in the server's seconds"
    assert (counted["e2e_s"] >= counted["ttft_s"]).all()

    facts = run.facts
    assert (facts.run_id, facts.attempt, facts.error, facts.server_crashed) == ("r1", 2, None, False)
    (load,) = facts.loads
    assert load.stop_reason == "enough_requests"
    assert load.warmup_steady
    assert load.window_start_s == load.warmup_s
    assert load.window_start_s is not None
    assert load.window_s is not None
    assert counted["started_s"].min() >= load.window_start_s
    assert counted["started_s"].max() <= load.window_start_s + load.window_s
    assert load.inflight_peak == 4
    assert set(facts.client) == set(CLIENT_COLUMNS)
    assert set(facts.server) == set(SERVER_COLUMNS)
    assert facts.client["clock_scale"] == SCALE
    cpu_share, lag_p99_s = facts.client["client_cpu_share"], facts.client["client_lag_p99_s"]
    assert cpu_share is not None
    assert cpu_share > 0
    assert lag_p99_s is not None
    assert lag_p99_s >= 0
    for column in ("send_lag_p99_s", "refill_p50_s"):
        assert facts.client[column] >= 0, column
    assert facts.client["pause_share"] == 0.0
    assert facts.server["server_preemptions"] is None, "not exported is unknown"
    assert "vllm:num_requests_running" in set(run.metrics.to_pandas()["series"])


def test_the_server_sees_as_many_open_at_once_as_the_step_says() -> None:
    """It answers after a second and counts open requests; concurrency 256, 512 requests.

    The ramp takes a quarter of a second: the rest is for a busy machine.
    """
    with NullServer(Plan(ttft_s=1.0, tokens=1)) as server:
        run = measured(server, spec(256, 512))
        assert server.peak == 256
    assert run.facts.loads[0].inflight_peak == 256
    assert run.requests.to_pandas()["counted"].sum() == 512


def test_fewer_requests_than_slots_is_invalid() -> None:
    """Concurrency 64, 10 requests in all."""
    with NullServer(FAST) as server:
        run = measured(server, spec(64, 10, min_window_s=0.001))
    assert run.facts.invalid is not None
    assert "concurrency not reached" in run.facts.invalid
    assert "10 requests counted at concurrency 64" in run.facts.invalid


class Stalling:
    """A progress that blocks the event loop, as a starved client would."""

    closed = False

    def update(self, snapshot: Snapshot) -> None:
        time.sleep(0.2)

    def close(self) -> None:
        self.closed = True


class Watching:
    """A progress that remembers, and tells when something has come."""

    def __init__(self, until: Callable[[Snapshot], bool] = lambda _: False) -> None:
        self.snapshots: list[Snapshot] = []
        self.seen = threading.Event()
        self._until = until

    def update(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)
        if self._until(snapshot):
            self.seen.set()

    def close(self) -> None:
        self.seen.set()

    @contextmanager
    def then(self, act: Callable[[], object]) -> Iterator[None]:
        """Do something beside the step once that has come."""

        def when_seen() -> None:
            self.seen.wait(60)
            act()

        actor = threading.Thread(target=when_seen)
        actor.start()
        yield
        actor.join()


def test_progress_follows_the_step_with_its_failures_and_the_time_to_go() -> None:
    watching = Watching()
    with NullServer(Plan(ttft_s=0.2, tokens=1, refuse_above=4)) as server:
        measured(server, spec(8, 100), progress=watching)
    first, *_, last = watching.snapshots
    assert (first.label, first.stage, first.eta_s) == ("prove interactive c=8", "setting up", None)
    stages = list(dict.fromkeys(snapshot.stage for snapshot in watching.snapshots))
    assert stages.index("setting up") < stages.index("warm-up") < stages.index("measuring")
    counted = [snapshot.counted for snapshot in watching.snapshots]
    assert counted == sorted(counted)
    assert counted[-1] > 0
    assert {(s.wanted, s.concurrency) for s in watching.snapshots} == {(100, 8)}
    assert last.eta_s is not None
    assert list(last.failures) == ["rejected"]
    assert last.failures["rejected"] > 0


def test_a_stalled_client_is_invalid_and_says_what_to_change() -> None:
    stalling = Stalling()
    with NullServer(FAST) as server:
        run = measured(server, spec(4, 150), progress=stalling)
    assert run.facts.invalid is not None
    assert run.facts.invalid.startswith("client-bound:")
    assert "lower the concurrency" in run.facts.invalid
    assert stalling.closed


def test_refusals_are_paused_after_and_explain_what_is_missing() -> None:
    with NullServer(Plan(ttft_s=0.2, tokens=1, refuse_above=4)) as server:
        run = measured(server, spec(8, 100))
    facts = run.facts
    rows = run.requests.to_pandas()
    rows = rows[rows["counted"]]
    assert set(rows["outcome"]) == {"completed", "rejected"}
    assert set(rows[rows["outcome"] == "rejected"]["http_status"]) == {503}
    share = facts.client["pause_share"]
    mean = facts.loads[0].inflight_mean
    assert share is not None
    assert mean is not None
    assert 0.1 < share < 0.5
    assert mean < 0.95 * 8
    assert facts.invalid is None or "concurrency not reached" not in facts.invalid


def test_retry_after_is_in_the_servers_seconds() -> None:
    """Its 6 s are 0.3 s of ours."""
    plan = Plan(ttft_s=0.5, tokens=1, refuse_above=2, retry_after="6")
    with NullServer(plan) as server:
        run = measured(server, spec(3, 12), bounds=StepBounds(warmup_cap_s=10.0))
    rows = run.requests.to_pandas()
    pauses = rows[rows["paused_s"] > 0]["paused_s"]
    assert len(pauses) > 0
    assert pauses.min() >= 6.0 - 0.1
    assert pauses.min() < 60.0, "6 s of ours would be 120 s of its"


def test_a_warm_up_that_does_not_end_is_cut_and_said() -> None:
    with NullServer(Plan(ttft_s=0.2, tokens=1)) as server:
        run = measured(server, spec(4, 20), bounds=StepBounds(warmup_cap_s=2.0))
    (load,) = run.facts.loads
    assert not load.warmup_steady
    assert load.warmup_s is not None
    assert load.warmup_s >= 2.0
    assert "warm-up: not steady at its cap of 2 s; measured all the same" in run.facts.notes
    assert run.requests.to_pandas()["counted"].sum() == 20


def test_the_cap_ends_the_window_and_is_the_cut() -> None:
    with NullServer(FAST) as server:
        run = measured(server, spec(4, 100_000, min_window_s=1.0, cap_s=15.0))
    (load,) = run.facts.loads
    rows = run.requests.to_pandas()
    assert load.stop_reason == "wall_clock_cap"
    assert load.window_s == pytest.approx(15.0)
    assert load.window_start_s is not None
    opened = load.window_start_s
    inside = rows[(rows["started_s"] >= opened) & (rows["started_s"] < opened + 15.0)]
    assert len(inside) == pytest.approx(rows["counted"].sum(), abs=2), "wished and written are two stamps"
    assert (rows[rows["counted"]]["outcome"] == "completed").all(), "the last ones were waited for"


def failing(*names: str) -> Decide:
    """Classes that have failed at every early look."""
    return lambda name, rows, planned: State.FAIL if name in names and not planned else State.INCONCLUSIVE


def test_proven_failure_stops_a_step_early() -> None:
    with NullServer(FAST) as server:
        run = measured(server, spec(4, 100_000, cap_s=5000.0, early_stop=True), decide=failing("interactive"))
    assert run.facts.loads[0].stop_reason == "early_fail"
    counted = run.requests.to_pandas().query("counted")
    assert 20 <= len(counted) < 10_000
    assert (counted["outcome"] == "completed").all(), "each before the cut had ended"


def test_a_pair_has_failed_when_one_of_it_has() -> None:
    loads = (
        Load(service_class="interactive", concurrency=4, requests=100_000, max_requests=100_000),
        Load(service_class="batch", concurrency=2, requests=100_000, max_requests=100_000),
    )
    what = spec(loads=loads, phase=Phase.SHARED, cap_s=5000.0, early_stop=True)
    with NullServer(FAST) as server:
        run = measured(server, what, decide=failing("batch"))
    assert [load.stop_reason for load in run.facts.loads] == ["early_fail", "early_fail"]
    assert "stopped early because batch had failed" in run.facts.notes
    rows = run.requests.to_pandas()
    assert set(rows[rows["counted"]]["service_class"]) == {"interactive", "batch"}


@pytest.mark.parametrize(("status", "words"), [(400, "HTTP 400"), (401, "HTTP 401"), (404, "HTTP 404")])
def test_requests_that_the_server_calls_wrong_end_the_step(status: int, words: str) -> None:
    plan = Plan(status=status, body='{"error":{"message":"max_tokens is too large"}}')
    with NullServer(plan) as server, pytest.raises(RequestRefused) as error:
        measured(server)
    said = str(error.value)
    assert words in said
    assert "max_tokens is too large" in said
    assert "prove interactive c=4" in said


def test_a_dying_server_is_a_result_with_its_rows() -> None:
    watching = Watching(lambda snapshot: snapshot.counted > 20)
    with NullServer(FAST) as server:

        def kill() -> None:
            assert server._loop is not None
            asyncio.run_coroutine_threadsafe(server.stop(), server._loop).result(10)

        with watching.then(kill):
            run = measured(server, spec(4, 100_000, cap_s=5000.0), progress=watching)
    facts = run.facts
    assert facts.server_crashed
    assert facts.error is not None
    assert "stopped answering" in facts.error
    assert facts.loads[0].stop_reason == "server_gone"
    assert facts.invalid is None
    counted = run.requests.to_pandas().query("counted")
    assert len(counted) > 20
    assert set(counted["outcome"]) <= {"completed", "connection_lost"}


def test_a_server_that_hangs_with_its_connections_open_is_gone_like_a_dead_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_module, "PROBE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(server_metrics, "TIMEOUT_S", 0.5)
    watching = Watching(lambda snapshot: snapshot.counted > 20)
    go_on = threading.Event()
    with NullServer(FAST) as server:

        def hang() -> None:
            assert server._loop is not None
            server._loop.call_soon_threadsafe(go_on.wait)

        with watching.then(hang):
            run = measured(
                server,
                spec(4, 100_000, cap_s=5000.0),
                progress=watching,
                classes={"interactive": service_class(deadline_s=20.0)},
            )
        go_on.set()
    facts = run.facts
    assert facts.server_crashed
    assert facts.error is not None
    assert "the server hangs: nothing heard for " in facts.error
    assert facts.loads[0].stop_reason == "server_gone"
    assert run.requests.to_pandas().query("counted")["outcome"].eq("completed").sum() > 20


def test_time_outs_of_a_server_that_is_alive_are_its_verdict() -> None:
    with NullServer(Plan(tokens=5, fault="stall")) as server:
        run = measured(
            server,
            spec(4, 24),
            classes={"interactive": service_class(deadline_s=8.0)},
            bounds=StepBounds(warmup_cap_s=10.0),
        )
    assert not run.facts.server_crashed
    assert run.facts.loads[0].stop_reason == "enough_requests"
    assert set(run.requests.to_pandas().query("counted")["outcome"]) == {"first_token_timeout"}


def test_a_server_that_never_was_there_is_found_within_bounds() -> None:
    with NullServer(FAST) as server:
        pass
    run = measured(server)
    assert run.facts.server_crashed
    assert not run.requests.to_pandas()["counted"].any()
    assert any("no metrics" in note for note in run.facts.notes)


def test_two_classes_share_the_server_each_with_its_own_rows() -> None:
    loads = (
        Load(service_class="interactive", concurrency=4, requests=40, max_requests=40),
        Load(service_class="batch", concurrency=2, requests=30, max_requests=30),
    )
    with NullServer(FAST) as server:
        run = measured(server, spec(loads=loads, phase=Phase.SHARED))
        assert server.peak == 6
    rows = run.requests.to_pandas()
    counted = rows[rows["counted"]].groupby("service_class").size().to_dict()
    assert counted == {"interactive": 40, "batch": 30}
    assert rows["request_id"].is_unique
    batch = rows[(rows["service_class"] == "batch") & rows["counted"]]
    assert batch["ttft_s"].isna().all()
    assert set(batch["concurrency"]) == {2}
    one, two = run.facts.loads
    assert (one.service_class, two.service_class) == ("interactive", "batch")
    assert one.window_start_s == two.window_start_s
    assert (one.inflight_peak, two.inflight_peak) == (4, 2)


def test_prime_runs_the_load_drains_it_and_counts_nothing() -> None:
    with NullServer(FAST) as server:
        run = measured(server, spec(16, 32, phase=Phase.PRIME))
        assert server.open == 0
        assert {record.end for record in server.records} == {"answered"}
    rows = run.requests.to_pandas()
    assert len(rows) >= 32
    assert not rows["counted"].any()
    (load,) = run.facts.loads
    assert (load.window_s, load.stop_reason) == (None, "enough_requests")
    assert load.inflight_peak == 16
    assert load.inflight_mean is not None
    assert 4 < load.inflight_mean <= 16
    assert run.facts.client["client_cpu_share"] is not None  # what later steps' load processes are chosen by


def test_baseline_counts_one_after_the_other() -> None:
    with NullServer(FAST) as server:
        run = measured(server, spec(1, 30, phase=Phase.BASELINE))
        assert server.peak == 1
    assert run.requests.to_pandas()["counted"].sum() == 30


@pytest.mark.parametrize(("used", "said"), [(1127, "10.1% longer"), (961, "6.2% shorter")])
def test_the_prompt_length_that_the_usage_tells_is_kept_and_a_difference_noted(used: int, said: str) -> None:
    """A nominal prompt of 1,024 tokens."""
    workload = Workload(
        name="chat",
        prompt_tokens=Lengths(median=1024, sigma=0.0),
        output_tokens=Lengths(median=8, sigma=0.3),
    )
    classes = {"interactive": CLASSES["interactive"].model_copy(update={"workload": workload})}
    plan = Plan(ttft_s=0.02, tokens=5, prompt_tokens=used)
    with NullServer(plan) as server:
        run = measured(server, classes=classes)
    rows = run.requests.to_pandas().query("outcome == 'completed'")
    assert set(rows["asked_prompt_tokens"]) == {1024}
    assert set(rows["prompt_tokens"]) == {used}
    assert any(said in note for note in run.facts.notes)


def test_completions_and_replayed_requests_reach_the_server(tmp_path: Path) -> None:
    file = tmp_path / "real.jsonl"
    file.write_text('{"prompt": "Say one.", "max_tokens": 4}\n{"prompt": "Say two.", "max_tokens": 6}\n')
    classes = {"interactive": service_class(endpoint="completions", replay=str(file))}
    with NullServer(FAST, keep_requests=True) as server:
        run = measured(server, classes=classes)
    assert {record.path for record in server.records} == {"/v1/completions"}
    sent = {(record.body["prompt"], record.body["max_tokens"]) for record in server.records}
    assert sent == {("Say one.", 4), ("Say two.", 6)}
    counted = run.requests.to_pandas().query("counted")
    assert set(counted["outcome"]) == {"completed"}
    assert counted["ttft_s"].notna().all()


def test_lengths_that_differ_from_the_usage_are_noted() -> None:
    """A server that has no /tokenize and counts other tokens than were asked for."""
    with NullServer(FAST) as server:
        run = measured(server)
    asked = run.requests.to_pandas()["asked_prompt_tokens"].median()
    used = run.requests.to_pandas()["prompt_tokens"].median()
    assert abs(used / asked - 1) > 0.05
    assert any("than asked" in note for note in run.facts.notes)
    assert any("no /tokenize" in note for note in run.facts.notes)


def test_answers_without_usage_and_answers_that_came_whole_are_noted() -> None:
    with NullServer(Plan(tokens=5, usage="none")) as server:
        estimated = measured(server).facts.notes
    with NullServer(Plan(tokens=5, as_json=True)) as server:
        whole = measured(server).facts.notes
    assert any("came without usage" in note for note in estimated)
    assert any("came whole though a stream was asked for" in note for note in whole)


@contextmanager
def foreign_requests(server: NullServer, count: int) -> Iterator[None]:
    """Somebody else's requests, open all the time."""
    plan = {"fault": "stall", "fault_after": -1}

    async def load() -> None:
        await asyncio.gather(*(ask(server.url, deadline_s=100.0, null_plan=plan) for _ in range(count)))

    threading.Thread(target=lambda: asyncio.run(load()), daemon=True).start()
    assert server.wait_for(lambda: server.open == count)
    yield


def test_a_server_that_is_not_idle_and_foreign_traffic_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "IDLE_WAIT_S", 0.2)
    with NullServer(FAST) as server, foreign_requests(server, 5):
        run = measured(server, spec(4, 400))
    before, during = (note for note in run.facts.notes if note.startswith("foreign traffic:"))
    assert "the server had 5 requests running or waiting before the start" in before
    assert "requests running or waiting that were not ours" in during
    peak = run.facts.server["foreign_running_peak"]
    assert peak is not None
    assert 1 < peak <= 9


def test_somebody_elses_server_is_refused_while_it_serves_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "IDLE_WAIT_S", 0.2)
    with NullServer(FAST) as server, foreign_requests(server, 5):
        with pytest.raises(
            LoadStopped, match=r"not loaded: http://\S+ had 5 requests of others running or waiting"
        ):
            measured(server, theirs=True)
        assert len(server.records) == 5
    with NullServer(FAST) as server:
        assert measured(server, theirs=True).facts.error is None


@pytest.mark.parametrize("workers", [1, 2])
def test_a_kill_switch_ends_the_load_at_once_and_nothing_is_kept(workers: int) -> None:
    with NullServer(Plan(ttft_s=60.0)) as server:

        def switched() -> str | None:
            return "the file /tmp/stop exists" if server.open == 4 else None

        told = "prove interactive c=4: aborted, nothing of it is kept: kill switch: the file /tmp/stop exists"
        with pytest.raises(LoadStopped, match=re.escape(told)):
            measured(server, stop_asked=switched, workers=workers)
        assert server.wait_for(lambda: server.open == 0)  # all four were given up, none waited for
        assert len(server.records) == 4


def test_a_kill_switch_that_is_on_lets_no_request_out() -> None:
    with NullServer(FAST) as server:
        with pytest.raises(LoadStopped, match="prove interactive c=4: not loaded: kill switch: maintenance"):
            measured(server, stop_asked=lambda: "maintenance")
        assert server.records == []


def test_a_kill_switch_that_cannot_be_read_is_an_error() -> None:
    def unreadable() -> str | None:
        raise PermissionError("no permission")

    with NullServer(FAST) as server, pytest.raises(PermissionError):
        measured(server, stop_asked=unreadable)


def test_too_few_descriptors_are_found_before_any_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    with NullServer(FAST) as server:
        with pytest.raises(MeasurementError, match="ulimit -n"):
            measured(server, spec(1000, 1000))
        assert server.records == []


class Exhausted(Sender):
    """Every tenth connection fails for want of our own descriptors."""

    sends = 0

    async def send(self, prepared: Prepared, slot: int, deadline_wall_s: float) -> Answer:
        Exhausted.sends += 1
        if Exhausted.sends % 10:
            return await super().send(prepared, slot, deadline_wall_s)
        return Answer(Outcome.CONNECT_FAILED, error="too many open files", own_fault=True)


def test_descriptors_that_run_out_make_the_step_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "Sender", Exhausted)
    with NullServer(FAST) as server:
        facts = measured(server).facts
    assert not facts.server_crashed
    assert facts.invalid is not None
    assert "a limit of our own (too many open files)" in facts.invalid
    assert "ulimit -n" in facts.invalid


@pytest.mark.parametrize(("window_s", "every_s"), [(600.0, 1.0), (30.0, 1.0), (3.0, 0.5), (0.1, 0.2)])
def test_the_servers_metrics_are_read_each_second(window_s: float, every_s: float) -> None:
    assert poll_every_s(window_s) == pytest.approx(every_s)


def test_an_unknown_class_is_wrong_usage() -> None:
    with NullServer(FAST) as server, pytest.raises(ConfigError, match="name classes \\['chatty'\\]"):
        measured(server, spec(name="chatty"))


class Terminated(Exception):
    pass


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)]
)
def test_an_interrupt_closes_everything_and_goes_on(number: signal.Signals, error: type) -> None:
    """As the task runner's own SIGTERM handler must have its turn."""

    def handler(*_: object) -> None:
        raise Terminated

    former = signal.signal(signal.SIGTERM, handler)
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    stalling = Stalling()
    try:
        with NullServer(Plan(ttft_s=0.1, tokens=1)) as server:

            def interrupt() -> None:
                server.wait_for(lambda: len(server.records) > 20)
                os.kill(os.getpid(), number)

            threading.Thread(target=interrupt, daemon=True).start()
            with pytest.raises(error):
                measured(server, spec(4, 100_000, cap_s=5000.0), progress=stalling)
            assert signal.getsignal(signal.SIGTERM) is handler
            assert stalling.closed
            assert server.wait_for(lambda: server.open == 0)
    finally:
        signal.signal(signal.SIGTERM, former)
        signal.signal(signal.SIGINT, ignored)


class Unwritable(Stalling):
    def update(self, snapshot: Snapshot) -> None:
        raise OSError("no space left on device")


def test_progress_that_cannot_be_shown_is_logged_and_spoils_no_step(caplog: pytest.LogCaptureFixture) -> None:
    with NullServer(FAST) as server:
        run = measured(server, progress=Unwritable())
    assert run.requests.to_pandas()["counted"].sum() == 40
    assert "no space left on device" in caplog.text


def test_the_api_key_is_sent_and_never_kept() -> None:
    with NullServer(FAST, keep_requests=True) as server:
        run = run_step(
            spec(),
            target=Target(server.url, "null", api_key="sk-secret"),
            classes=CLASSES,
            bounds=BOUNDS,
            clock_scale=SCALE,
        )
    assert {record.headers["authorization"] for record in server.records} == {"Bearer sk-secret"}
    assert "sk-secret" not in str(run.facts.to_json())
    assert "sk-secret" not in run.requests.to_pandas().to_csv()
