"""A step on the simulated vLLM, over HTTP: what only a tokenizer and a queue limit show."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from include.capacity.config import Lengths, ServiceClass, StepBounds, Workload
from include.capacity.load.request import Target
from include.capacity.load.step import StepRun, run_step
from include.capacity.results.spec import Load, StepSpec
from include.capacity.simulator.profile import Profile
from include.capacity.simulator.server import start
from include.capacity.words import Phase
from tests.simulator.profiles import tiny

SCALE = 20.0


@contextmanager
def simulated(profile: Profile) -> Iterator[str]:
    """The URL of a simulated server in a thread of its own."""
    ready = threading.Event()
    told: dict[str, object] = {}

    async def serve() -> None:
        server = await start(profile)
        over = asyncio.Event()
        told.update(port=server.port, loop=asyncio.get_running_loop(), over=over)
        ready.set()
        await over.wait()
        await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(30)
    yield f"http://127.0.0.1:{told['port']}"
    loop, over = told["loop"], told["over"]
    assert isinstance(loop, asyncio.AbstractEventLoop)
    assert isinstance(over, asyncio.Event)
    loop.call_soon_threadsafe(over.set)
    thread.join(30)


def service_class(name: str, stream: bool, shared_prefix_tokens: int = 0) -> ServiceClass:
    return ServiceClass(
        rule="batch",
        workload=Workload(
            name=name,
            stream=stream,
            prompt_tokens=Lengths(median=200, sigma=0.3),
            output_tokens=Lengths(median=8, sigma=0.3),
            shared_prefix_tokens=shared_prefix_tokens,
        ),
        deadline_s=600.0,
        completion_floor=0.95,
        ladder=[1],
    )


CLASSES = {
    "interactive": service_class("chat", True),
    "batch": service_class("classification", False),
    "prefixed": service_class("prefixed", True, shared_prefix_tokens=400),
}


def measured(profile: Profile, **loads: int) -> StepRun:
    """A step of 30 requests a class on the model of ``profile``."""
    spec = StepSpec(
        model="sim",
        phase=Phase.SHARED if len(loads) > 1 else Phase.PROVE,
        loads=tuple(
            Load(service_class=name, concurrency=n, requests=30, max_requests=30) for name, n in loads.items()
        ),
        min_window_s=30.0,  # some seven readings of the metrics
        cap_s=2000.0,
        seed=5,
    )
    with simulated(profile) as url:
        return run_step(
            spec,
            target=Target(url, profile.model),
            classes=CLASSES,
            bounds=StepBounds(warmup_cap_s=200.0),
            clock_scale=SCALE,
        )


def test_prompts_calibrated_through_tokenize_are_as_long_as_asked_by_the_usage() -> None:
    profile = tiny(base_s=0.1, time_scale=SCALE, max_num_seqs=8, max_num_batched_tokens=4000)
    run = measured(profile, interactive=3, batch=2)
    rows = run.requests.to_pandas().query("outcome == 'completed'")
    assert set(rows["service_class"]) == {"interactive", "batch"}
    assert (rows["prompt_tokens"] - rows["asked_prompt_tokens"]).abs().max() <= 1
    assert (rows["output_tokens"] == rows["asked_max_tokens"]).all()
    assert not [note for note in run.facts.notes if "tokenize" in note or "than asked" in note]


def test_refusals_by_a_queue_limit_are_in_the_servers_columns_and_paused_after_by_its_clock() -> None:
    """Four of six are served at a time; the refused are told to come back after 4 s, 0.2 s of ours."""
    profile = tiny(
        base_s=0.5,
        time_scale=SCALE,
        max_num_seqs=4,
        max_num_queued_reqs=4,
        retry_after_s=4,
        kv_cache_tokens=20_000,
    )
    run = measured(profile, interactive=6)
    rows = run.requests.to_pandas()
    refused = rows[rows["outcome"] == "rejected"]
    assert set(refused["http_status"]) == {503}
    counted = run.facts.server["server_rejections"]
    assert counted is not None
    assert 0 < counted <= len(refused)
    pauses = rows[rows["paused_s"] > 0]["paused_s"]
    assert 4.0 - 0.1 <= pauses.min() < 40.0, "4 s of ours would be 80 s of its"
    assert run.facts.server["server_running_peak"] <= 4
    assert run.facts.server["server_preemptions"] == 0


@pytest.mark.parametrize(("name", "least", "most"), [("interactive", 0.0, 0.1), ("prefixed", 0.5, 0.8)])
def test_the_prefix_cache_helps_where_a_shared_prefix_was_chosen_and_nowhere_else(
    name: str, least: float, most: float
) -> None:
    """About 400 of 600 tokens are the same in all prompts, or none of 200."""
    run = measured(tiny(base_s=0.1, time_scale=SCALE, max_num_seqs=8), **{name: 3})
    share = run.facts.server["server_prefix_hit_share"]
    assert share is not None
    assert least <= share <= most
