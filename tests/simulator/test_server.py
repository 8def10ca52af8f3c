"""The HTTP face: bytes shaped as vLLM's, errors, refusals, disconnects, metrics, processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from include.capacity.simulator.engine import Engine, Sequence
from include.capacity.simulator.profile import Profile
from include.capacity.simulator.server import SimulatedServer, start
from tests.simulator.profiles import tiny

CHAT = "/v1/chat/completions"
FAST = {"base_s": 0.01, "time_scale": 100}
WAIT_S = 60.0

Scenario = Callable[[SimulatedServer, httpx.AsyncClient], Awaitable[None]]


def served(profile: Profile, scenario: Scenario) -> None:
    """Run ``scenario`` against a server that lives in this process."""

    async def run() -> None:
        server = await start(profile)
        try:
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{server.port}", timeout=WAIT_S
            ) as client:
                await asyncio.wait_for(scenario(server, client), WAIT_S)
        finally:
            await server.stop()

    asyncio.run(run())


def chat(words: str = "hi there", **more: Any) -> dict[str, Any]:
    return {"model": "sim/tiny", "messages": [{"role": "user", "content": words}], **more}


def events(text: str) -> list[Any]:
    """The parsed events of a stream; ``[DONE]`` stays text."""
    blocks = text.split("\n\n")
    assert blocks[-1] == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    found = [block.removeprefix("data: ") for block in blocks[:-1]]
    return [event if event == "[DONE]" else json.loads(event) for event in found]


def metric(text: str, name: str, **labels: str) -> float:
    """The one sample of that name and those labels."""
    values = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(values) == 1, (name, labels, values)
    return values[0]


def test_a_chat_stream_is_role_content_finish_usage_done() -> None:
    async def scenario(_: SimulatedServer, client: httpx.AsyncClient) -> None:
        body = chat(max_tokens=3, stream=True, ignore_eos=True, stream_options={"include_usage": True})
        answer = await client.post(CHAT, json=body)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        role, first, second, last, usage, done = events(answer.text)
        assert role["choices"] == [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ]
        assert first["choices"] == [
            {
                "index": 0,
                "delta": {"content": " the"},
                "logprobs": None,
                "finish_reason": None,
                "token_ids": None,
            }
        ]
        assert second["choices"][0]["delta"] == {"content": " server"}
        assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == (
            {"content": " holds"},
            "length",
        )
        assert usage["choices"] == []
        # Four tokens for the message, two for its words.
        assert usage["usage"] == {"prompt_tokens": 6, "completion_tokens": 3, "total_tokens": 9}
        assert done == "[DONE]"
        chunks = [role, first, second, last, usage]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert {chunk["model"] for chunk in chunks} == {"sim/tiny"}
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert [("usage" in chunk) for chunk in chunks] == [False, False, False, False, True]

    served(tiny(**FAST), scenario)


def test_usage_comes_only_if_asked_for_and_on_every_chunk_if_continuous() -> None:
    async def scenario(_: SimulatedServer, client: httpx.AsyncClient) -> None:
        body = chat(max_tokens=2, stream=True, ignore_eos=True)
        without = events((await client.post(CHAT, json=body)).text)
        assert len(without) == 4
        assert not any("usage" in chunk for chunk in without[:-1])
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        with_all = events((await client.post(CHAT, json=body)).text)
        assert [chunk["usage"]["completion_tokens"] for chunk in with_all[:-1]] == [0, 1, 2, 2]
        assert [chunk["usage"]["total_tokens"] for chunk in with_all[:-1]] == [6, 7, 8, 8]

    served(tiny(**FAST), scenario)


def test_a_chunk_may_hold_several_tokens_but_the_first_goes_alone() -> None:
    async def scenario(_: SimulatedServer, client: httpx.AsyncClient) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"model": "sim/tiny", "prompt": "a b c", "max_tokens": 11, "ignore_eos": True}
        answer = await client.post(
            "/v1/completions", json={**body, "stream": True, "stream_options": options}
        )
        found = events(answer.text)[:-1]
        assert [chunk["usage"]["completion_tokens"] for chunk in found] == [1, 5, 9, 11, 11]
        assert [len(choice["text"].split()) for chunk in found for choice in chunk["choices"]] == [1, 4, 4, 2]
        assert [choice["finish_reason"] for chunk in found for choice in chunk["choices"]] == [
            None,
            None,
            None,
            "length",
        ]
        assert {chunk["object"] for chunk in found} == {"text_completion"}

    served(tiny(**FAST, stream_interval=4), scenario)


def test_answers_that_are_not_streamed() -> None:
    async def scenario(_: SimulatedServer, client: httpx.AsyncClient) -> None:
        answer = (await client.post(CHAT, json=chat(max_completion_tokens=2, ignore_eos=True))).json()
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["message"]["content"] == " the server"
        assert answer["choices"][0]["message"]["role"] == "assistant"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 2, "total_tokens": 8}
        body = {"prompt": [5, 6, 7], "max_tokens": 1, "ignore_eos": True}
        other = (await client.post("/v1/completions", json=body)).json()
        assert (other["object"], other["choices"][0]["text"]) == ("text_completion", " the")
        assert other["usage"]["prompt_tokens"] == 3

    served(tiny(**FAST), scenario)


def test_an_answer_ends_by_itself_unless_told_not_to() -> None:
    async def scenario(_: SimulatedServer, client: httpx.AsyncClient) -> None:
        # Without spread every answer's natural length is 5 tokens, the last of which has no text.
        answer = (await client.post(CHAT, json=chat(max_tokens=20))).json()
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert len(answer["choices"][0]["message"]["content"].split()) == 4
        longer = (await client.post(CHAT, json=chat(max_tokens=20, min_tokens=8))).json()
        assert longer["usage"]["completion_tokens"] == 8
        cut = (await client.post(CHAT, json=chat(max_tokens=3))).json()
        assert cut["choices"][0]["finish_reason"] == "length"
        stream = events((await client.post(CHAT, json=chat(max_tokens=20, stream=True))).text)
        assert stream[-2]["choices"][0]["delta"] == {"content": ""}
        assert stream[-2]["choices"][0]["finish_reason"] == "stop"

    served(tiny(**FAST, eos_median_tokens=5, eos_sigma=0), scenario)


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "told"),
    [
        (CHAT, {**chat(), "model": "other"}, 404, "NotFoundError", "The model `other` does not exist."),
        (CHAT, chat("word " * 1000), 400, "BadRequestError", "maximum context length is 1000 tokens"),
        (CHAT, chat("word " * 900, max_tokens=200), 400, "BadRequestError", "200 output tokens"),
        (CHAT, chat(max_tokens=0), 400, "BadRequestError", "max_tokens must be at least 1"),
        (CHAT, chat(max_tokens="9"), 400, "BadRequestError", "max_tokens must be an integer"),
        (CHAT, chat(max_tokens=4, min_tokens=5), 400, "BadRequestError", "min_tokens"),
        (CHAT, chat(n=2), 400, "BadRequestError", "n other than 1"),
        (CHAT, chat(stream_options={}), 400, "BadRequestError", "only be defined when `stream=True`"),
        (CHAT, {"messages": []}, 400, "BadRequestError", "at least one message"),
        (CHAT, {"messages": [{"content": "x"}]}, 400, "BadRequestError", "a role"),
        (CHAT, [1], 400, "BadRequestError", "Expected a JSON object, found list"),
        ("/v1/completions", {"prompt": ["a", "b"]}, 400, "BadRequestError", "prompt must be a string"),
    ],
)
def test_wrong_requests_are_told_what_is_wrong(
    path: str, body: Any, status: int, kind: str, told: str
) -> None:
    async def scenario(server: SimulatedServer, client: httpx.AsyncClient) -> None:
        answer = await client.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (status, status, kind)
        assert told in error["message"]
        assert server.engine.unfinished == 0

    served(tiny(**FAST), scenario)


def test_broken_json_unknown_paths_and_methods() -> None:
    async def scenario(_: SimulatedServer, client: httpx.AsyncClient) -> None:
        broken = await client.post(CHAT, content=b'{"model":')
        assert (broken.status_code, broken.json()["error"]["type"]) == (400, "BadRequestError")
        assert (await client.get("/v1/nothing")).status_code == 404
        assert (await client.get(CHAT)).status_code == 405
        assert (await client.post("/health")).status_code == 405

    served(tiny(**FAST), scenario)


def test_who_it_is_is_said_plainly() -> None:
    profile = tiny(**FAST)

    async def scenario(_: SimulatedServer, client: httpx.AsyncClient) -> None:
        assert (await client.get("/health")).status_code == 200
        version = (await client.get("/version")).json()
        assert version == {
            "version": "0.32.0",
            "simulated": True,
            "profile": "tiny",
            "engine_hash": profile.engine_hash,
            "time_scale": 100.0,
        }
        models = (await client.get("/v1/models")).json()
        assert [(card["id"], card["max_model_len"]) for card in models["data"]] == [("sim/tiny", 1000)]

    served(profile, scenario)


def test_tokenize_counts_what_usage_counts() -> None:
    async def scenario(_: SimulatedServer, client: httpx.AsyncClient) -> None:
        body = chat("five words are in here", max_tokens=1)
        counted = (await client.post("/tokenize", json=body)).json()
        used = (await client.post(CHAT, json=body)).json()["usage"]
        assert (counted["count"], used["prompt_tokens"]) == (9, 9)
        assert len(counted["tokens"]) == 9
        plain = (
            await client.post("/tokenize", json={"model": "sim/tiny", "prompt": " one two\nthree "})
        ).json()
        assert plain["count"] == 3
        ids = (await client.post("/tokenize", json={"prompt": [7, 8]})).json()
        assert ids["count"] == 2

    served(tiny(**FAST), scenario)


def test_a_full_queue_answers_503_as_vllm_does() -> None:
    async def scenario(server: SimulatedServer, client: httpx.AsyncClient) -> None:
        long = chat(max_tokens=900, stream=True, ignore_eos=True)
        async with client.stream("POST", CHAT, json=long) as first:
            assert first.status_code == 200
            refused = await client.post(CHAT, json=long)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == 503
        assert refused.json()["error"]["type"] == "Service Unavailable"
        assert refused.headers["retry-after"] == "3"
        assert server.engine.stats.rejected == 1
        text = (await client.get("/metrics")).text
        assert metric(text, "vllm:admission_rejections_total", reason="max_num_queued_reqs") == 1

    # Iterations of a wall second: the first answer is under way for as long as the test needs.
    served(tiny(max_num_queued_reqs=1, retry_after_s=3), scenario)


def test_a_client_that_leaves_frees_its_slot() -> None:
    async def scenario(server: SimulatedServer, client: httpx.AsyncClient) -> None:
        long = chat(max_tokens=990, stream=True, ignore_eos=True)
        async with client.stream("POST", CHAT, json=long) as first:
            lines = first.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            waiting = asyncio.create_task(client.post(CHAT, json=chat(max_tokens=2, ignore_eos=True)))
            while server.engine.unfinished < 2:  # until the second is in the queue
                await asyncio.sleep(0)
            assert server.engine.waiting[0].admitted_s is None
        answer = await waiting
        assert answer.json()["usage"]["completion_tokens"] == 2
        text = (await client.get("/metrics")).text
        assert metric(text, "sim:requests_aborted_total") == 1
        assert metric(text, "vllm:request_success_total", finished_reason="length") == 1
        assert metric(text, "vllm:num_requests_running") == 0
        assert server.engine.kv_tokens == 0

    # The first's 990 tokens would take longer than the test may, were it not for the disconnect.
    served(tiny(max_num_seqs=1, base_s=1.0, time_scale=10), scenario)


def test_metrics_are_vllms_and_add_up() -> None:
    async def scenario(_: SimulatedServer, client: httpx.AsyncClient) -> None:
        bodies = [chat("a b c d", max_tokens=size, ignore_eos=True) for size in (1, 5, 9)]
        for answer in await asyncio.gather(*(client.post(CHAT, json=body) for body in bodies)):
            assert answer.status_code == 200
        text = (await client.get("/metrics")).text
        labels = {"model_name": "sim/tiny", "engine": "0"}
        for name, value in {
            "vllm:num_requests_running": 0,
            "vllm:num_requests_waiting": 0,
            "vllm:kv_cache_usage_perc": 0,
            "vllm:num_preemptions_total": 0,
            "vllm:prompt_tokens_total": 3 * 8,
            "vllm:generation_tokens_total": 15,
            "vllm:prefix_cache_queries_total": 3 * 8,
            "vllm:prefix_cache_hits_total": 0,
            "vllm:time_to_first_token_seconds_count": 3,
            "vllm:inter_token_latency_seconds_count": 12,
            "vllm:request_time_per_output_token_seconds_count": 2,
            "vllm:e2e_request_latency_seconds_count": 3,
            "vllm:request_queue_time_seconds_count": 3,
            "vllm:request_prompt_tokens_sum": 24,
            "vllm:request_generation_tokens_sum": 15,
            "vllm:iteration_tokens_total_sum": 24 + 12,
        }.items():
            assert metric(text, name, **labels) == value, name
        assert metric(text, "vllm:request_success_total", finished_reason="length") == 3
        assert metric(text, "vllm:request_success_total", finished_reason="stop") == 0
        assert metric(text, "vllm:request_generation_tokens_bucket", le="5.0") == 2
        assert metric(text, "vllm:time_to_first_token_seconds_bucket", le="+Inf") == 3
        assert metric(text, "sim:behind_seconds_max") >= metric(text, "sim:behind_seconds") >= 0

    served(tiny(**FAST), scenario)


def test_a_repeated_prompt_shows_in_the_prefix_cache_counters() -> None:
    async def scenario(_: SimulatedServer, client: httpx.AsyncClient) -> None:
        body = chat("word " * 60, max_tokens=1)
        for _ in range(2):
            assert (await client.post(CHAT, json=body)).status_code == 200
        text = (await client.get("/metrics")).text
        assert metric(text, "vllm:prefix_cache_queries_total") == 128
        assert (
            metric(text, "vllm:prefix_cache_hits_total") == 48
        )  # 64, but one token is always computed, and blocks are whole

    served(tiny(**FAST), scenario)


def test_http_and_virtual_time_tell_the_same_first_token_times() -> None:
    """The engine's answer follows from when requests arrived, however busy this machine is; a client
    can only see it later."""
    profile = tiny(base_s=0.05, per_sequence_s=0.01, per_prefill_token_s=0.001, noise_sigma=0.2, time_scale=5)
    loop_s: list[float] = []

    async def scenario(server: SimulatedServer, client: httpx.AsyncClient) -> None:
        real: list[Sequence] = []
        submit = server.engine.submit

        def noted(sequence: Sequence) -> bool:
            real.append(sequence)
            return submit(sequence)

        server.engine.submit = noted  # type: ignore[method-assign]  # to see when requests arrive

        async def send(size: int) -> None:
            body = chat("word " * (10 * size), max_tokens=size, stream=True, ignore_eos=True)
            loop = asyncio.get_running_loop()
            begun = loop.time()
            async with client.stream("POST", CHAT, json=body) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                loop_s.append((loop.time() - begun) * 5)
                async for _ in lines:  # leaving early would abort the request
                    pass

        await asyncio.gather(*(send(size) for size in (5, 6, 7, 8, 9)))
        virtual = Engine(profile.engine)
        copies = [Sequence(one.prompt_tokens, one.output_tokens, one.arrived_s, one.blocks) for one in real]
        arriving = list(copies)
        while arriving or virtual.unfinished:
            if not virtual.unfinished:
                virtual.now_s = max(virtual.now_s, arriving[0].arrived_s)
            while arriving and arriving[0].arrived_s <= virtual.now_s:
                virtual.submit(arriving.pop(0))
            virtual.begin(virtual.now_s)
            virtual.finish()
        assert [one.first_token_s for one in real] == [one.first_token_s for one in copies]
        engine_s = sorted(one.first_token_s - one.arrived_s for one in copies if one.first_token_s)
        assert len(engine_s) == 5
        # Not earlier than the engine says; and on any machine that works at all, not ten seconds later.
        assert all(0 <= seen - true < 50 for seen, true in zip(sorted(loop_s), engine_s, strict=True))

    served(profile, scenario)


# As a process


def simulate(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "include.capacity.simulator", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def written(profile: Profile, folder: Path) -> str:
    file = folder / "tiny.yaml"
    file.write_text(profile.model_dump_json())  # JSON is YAML
    return str(file)


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("listening on http://127.0.0.1:"), line
    return line.split()[2]


def test_sigterm_ends_it_cleanly_with_streams_open(tmp_path: Path) -> None:
    process = simulate("--profile", written(tiny(), tmp_path), "--served-model-name", "mine")
    try:
        url = url_of(process)
        body = {**chat(max_tokens=900, stream=True, ignore_eos=True), "model": "mine"}
        with httpx.stream("POST", url + CHAT, json=body, timeout=WAIT_S) as answer:
            assert answer.status_code == 200
            process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.TransportError):
                answer.read()
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_simulated_crash_takes_the_process_with_it(tmp_path: Path) -> None:
    process = simulate("--profile", written(tiny(crash_at_running=1), tmp_path))
    try:
        with pytest.raises(httpx.TransportError):
            httpx.post(url_of(process) + CHAT, json=chat(), timeout=WAIT_S)
        assert process.wait(WAIT_S) == 1
        assert process.stderr is not None
        assert "simulated crash: 1 sequences running" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def test_a_taken_port_is_a_clear_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = simulate("--profile", written(tiny(), tmp_path), "--port", str(port))
        _, error = process.communicate(timeout=WAIT_S)
    assert process.returncode == 3
    assert f"simulator tiny: cannot listen on 127.0.0.1:{port}" in error
