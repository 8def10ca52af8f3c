"""Prompts: seeded, unique, of the asked lengths; replayed requests; calibrated through /tokenize."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from include.capacity.config import Lengths, Workload
from include.capacity.errors import ConfigError, DataError
from include.capacity.load.workload import (
    Prompts,
    Tokenizing,
    calibrate,
    length_note,
    read_requests,
    sample_lengths,
    speaks_vllm,
)

EXACT = Tokenizing(tokens_per_word=1.0, overhead=10.0, known=True)


def workload(**changes: Any) -> Workload:
    fields = {
        "name": "chat",
        "prompt_tokens": {"median": 512, "sigma": 0.6, "at_least": 16, "at_most": 4096},
        "output_tokens": {"median": 200, "sigma": 0.6, "at_least": 16, "at_most": 1024},
    }
    return Workload.model_validate({**fields, **changes})


def bodies(
    count: int, seed: int = 1, tokenizing: Tokenizing = EXACT, vllm: bool = True, **changes: Any
) -> list[dict[str, Any]]:
    prompts = Prompts(workload(**changes), served_name="m", seed=seed, tokenizing=tokenizing, vllm=vllm)
    return [json.loads(prompts.next().body) for _ in range(count)]


def text_of(body: dict[str, Any]) -> str:
    return body["messages"][0]["content"]


def test_lengths_are_log_normal_and_clipped() -> None:
    drawn = sample_lengths(
        np.random.default_rng(1), Lengths(median=200, sigma=0.6, at_least=16, at_most=1024), 20_000
    )
    assert np.median(drawn) == pytest.approx(200, rel=0.02)
    inside = drawn[(drawn > 16) & (drawn < 1024)]
    assert np.std(np.log(inside)) == pytest.approx(0.6, abs=0.02)
    assert drawn.min() >= 16
    assert drawn.max() == 1024


def test_sigma_zero_is_a_fixed_length() -> None:
    assert set(sample_lengths(np.random.default_rng(1), Lengths(median=64, sigma=0.0), 50).tolist()) == {64}


def test_a_streamed_chat_request_asks_for_usage_and_its_sampled_length() -> None:
    (body,) = bodies(1)
    assert body["model"] == "m"
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert body["ignore_eos"] is True
    assert 16 <= body["max_tokens"] <= 1024
    assert [message["role"] for message in body["messages"]] == ["user"]


def test_a_server_that_is_not_vllm_gets_no_keys_of_vllms() -> None:
    (body,) = bodies(1, vllm=False)
    assert "ignore_eos" not in body
    assert body["stream_options"] == {"include_usage": True}


def test_a_completion_that_is_not_streamed() -> None:
    (body,) = bodies(1, endpoint="completions", stream=False, extra_body={"temperature": 0.0})
    assert body["stream"] is False
    assert "stream_options" not in body
    assert isinstance(body["prompt"], str)
    assert body["temperature"] == 0.0


@pytest.mark.parametrize("key", ["messages", "prompt", "model", "stream", "stream_options"])
def test_extra_body_must_not_set_what_is_ours(key: str) -> None:
    with pytest.raises(ConfigError, match=f"extra_body must not set.*{key}"):
        bodies(1, extra_body={key: 1})


def test_prompts_differ_from_their_first_word_on_in_every_step() -> None:
    first_words = [text_of(body).split()[0] for seed in (1, 2, 3) for body in bodies(700, seed=seed)]
    assert len(set(first_words)) == 2100


def test_the_same_seed_gives_the_same_requests_built_ahead_or_not() -> None:
    one = Prompts(workload(), served_name="m", seed=5, tokenizing=EXACT)
    two = Prompts(workload(), served_name="m", seed=5, tokenizing=EXACT)
    two.build_ahead(20)
    assert [one.next() for _ in range(30)] == [two.next() for _ in range(30)]
    assert len({one.next().request_id for _ in range(50)}) == 50


def test_what_is_taken_is_made_up_for_and_no_more() -> None:
    one = Prompts(workload(), served_name="m", seed=5, tokenizing=EXACT)
    two = Prompts(workload(), served_name="m", seed=5, tokenizing=EXACT)
    two.build_ahead(3)
    taken = []
    for _ in range(4):
        taken += [two.next(), two.next()]
        two.restock()
        two.restock()
        two.restock()
    assert taken == [one.next() for _ in range(8)]
    assert len(two._ahead) == 3


def test_words_are_as_many_as_the_asked_tokens_take() -> None:
    tokenizing = Tokenizing(tokens_per_word=2.0, overhead=10.0, known=True)
    prompts = Prompts(
        workload(prompt_tokens={"median": 510, "sigma": 0.0}),
        served_name="m",
        seed=1,
        tokenizing=tokenizing,
    )
    prepared = prompts.next()
    assert prepared.asked_prompt_tokens == 510
    words = text_of(json.loads(prepared.body)).split()
    assert len(words) - 1 == 250, "the tag is part of the overhead"


def test_a_shared_prefix_is_the_same_in_all_steps_and_comes_on_top() -> None:
    changes: dict[str, Any] = {
        "shared_prefix_tokens": 100,
        "prompt_tokens": {"median": 60, "sigma": 0.0},
    }
    texts = [text_of(body) for seed in (1, 2) for body in bodies(5, seed=seed, **changes)]
    heads = {" ".join(text.split()[:100]) for text in texts}
    assert len(heads) == 1
    assert len({text.split()[100] for text in texts}) == 10, "after the prefix each is unique"
    prompts = Prompts(workload(**changes), served_name="m", seed=1, tokenizing=EXACT)
    assert prompts.next().asked_prompt_tokens == 160


def test_requests_are_shortened_to_the_models_context_and_that_is_said() -> None:
    tokenizing = Tokenizing(1.0, 10.0, known=True, context=256)
    prompts = Prompts(workload(), served_name="m", seed=1, tokenizing=tokenizing)
    for _ in range(200):
        prepared = prompts.next()
        assert prepared.asked_prompt_tokens is not None
        assert prepared.asked_max_tokens is not None
        assert prepared.asked_prompt_tokens + prepared.asked_max_tokens <= 256 - 8
        assert prepared.asked_prompt_tokens >= 11
    (note,) = prompts.notes(200)
    assert "of 200 requests were shortened to fit the model's context of 256 tokens" in note


def test_assumed_lengths_are_said_to_be_assumed() -> None:
    prompts = Prompts(workload(), served_name="m", seed=1)
    prompts.next()
    assert any("no /tokenize" in note for note in prompts.notes(1))


@pytest.mark.parametrize(
    ("used", "said"), [(1127, "10.1% longer"), (961, "6.2% shorter"), (1060, None), (1024, None)]
)
def test_lengths_off_by_more_than_five_percent_are_noted(used: int, said: str | None) -> None:
    """A nominal prompt of 1,024 tokens of which the server's usage says otherwise."""
    note = length_note("chat", [1024] * 9 + [None], [used] * 8 + [None, 7])
    assert (note is None) if said is None else (note is not None and said in note and "n=8" in note)


def test_unknown_lengths_are_no_note() -> None:
    assert length_note("chat", [None, 5], [7, None]) is None


# -- replay


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


MESSAGE = {"role": "user", "content": "What is a limit?"}


def test_replayed_requests_keep_their_own_keys(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "r.jsonl",
        {"messages": [MESSAGE], "max_tokens": 77, "model": "theirs", "stream": False, "top_p": 0.5},
    )
    (body,) = bodies(1, replay=str(file))
    assert body["messages"] == [MESSAGE]
    assert (body["max_tokens"], body["top_p"]) == (77, 0.5)
    assert "ignore_eos" not in body, "a real max_tokens is a bound, not the length"
    assert (body["model"], body["stream"]) == ("m", True), "what we measure is ours to say"


def test_what_a_replayed_line_leaves_out_is_filled_in(tmp_path: Path) -> None:
    file = lines(tmp_path / "r.jsonl", "", {"custom_id": "1", "body": {"messages": [MESSAGE]}})
    (body,) = bodies(1, replay=str(file))
    assert 16 <= body["max_tokens"] <= 1024
    assert body["ignore_eos"] is True


def test_replay_is_shuffled_by_the_seed_takes_every_line_and_says_when_it_repeats(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "r.jsonl", *({"messages": [{"role": "user", "content": str(k)}]} for k in range(9))
    )
    prompts = Prompts(workload(replay=str(file)), served_name="m", seed=1)
    texts = [text_of(json.loads(prompts.next().body)) for _ in range(18)]
    assert sorted(texts[:9]) == sorted(texts[9:]) == [str(k) for k in range(9)]
    assert texts[:9] == texts[9:]
    other = [text_of(body) for body in bodies(9, seed=2, replay=str(file))]
    assert other != texts[:9]
    assert prompts.notes(9) == []
    assert "18 requests sent from a file of 9" in prompts.notes(18)[0]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"messages": [MESSAGE]}, "{oops"], "r.jsonl: line 2: not JSON"),
        (["[1]"], "line 1: expected a JSON object, found list"),
        ([{"prompt": "hello"}], "line 1: messages: expected a non-empty list"),
        ([{"messages": ["hello"]}], "line 1: messages: expected"),
        ([{"messages": [MESSAGE], "max_tokens": "9"}], "line 1: max_tokens: expected a whole number"),
        ([{"body": 3}], "line 1: body: expected a JSON object, found int"),
        (["", "  "], "expected one JSON request a line, found no line"),
    ],
)
def test_a_bad_replay_file_is_named_with_its_line(tmp_path: Path, rows: list[object], said: str) -> None:
    with pytest.raises(DataError) as error:
        read_requests(lines(tmp_path / "r.jsonl", *rows), "chat")
    assert said in str(error.value)


def test_a_replay_file_that_is_not_text_or_not_there(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_requests(file, "chat")
    file.write_bytes(b'{"messages": "\xff"}\n')
    with pytest.raises(DataError, match="line 1: not JSON"):
        read_requests(file, "chat")


def test_completions_take_a_prompt_of_text_or_tokens(tmp_path: Path) -> None:
    file = lines(tmp_path / "r.jsonl", {"prompt": [1, 2, 3]}, {"prompt": "two"})
    assert len(read_requests(file, "completions")) == 2
    with pytest.raises(DataError, match="prompt: expected a non-empty text"):
        read_requests(lines(file, {"prompt": ""}), "completions")


# -- calibration


def asked(handler: Any, call: Any) -> Any:
    async def work() -> Any:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as client:
            return await call(client)

    return asyncio.run(work())


def test_tokens_are_fitted_to_words_template_included() -> None:
    """A tokenizer of 1.5 tokens a word, 3 for the tag, behind a chat template of 9."""

    def handler(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/tokenize"
        words = json.loads(request.content)["messages"][0]["content"].split()
        return httpx.Response(
            200, json={"count": round(9 + 3 + 1.5 * (len(words) - 1)), "max_model_len": 4096}
        )

    found = asked(handler, lambda client: calibrate(client, "http://s/v1/", "m", "chat"))
    assert found.known
    assert found.tokens_per_word == pytest.approx(1.5)
    assert found.overhead == pytest.approx(12.0)
    assert found.context == 4096


def test_a_small_context_is_calibrated_with_what_fits() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        words = len(json.loads(request.content)["prompt"].split())
        if words > 100:
            return httpx.Response(400, json={"error": {"message": "too long"}})
        return httpx.Response(200, json={"count": 2 * words, "max_model_len": 128})

    found = asked(handler, lambda client: calibrate(client, "http://s", "m", "completions"))
    assert (found.known, found.tokens_per_word, found.context) == (True, pytest.approx(2.0), 128)


@pytest.mark.parametrize(
    "reply",
    [httpx.Response(404), httpx.Response(200, text="<html>"), httpx.Response(200, json={"tokens": []})],
)
def test_without_tokenize_a_ratio_is_assumed_and_the_context_asked_elsewhere(reply: httpx.Response) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "max_model_len": 512}]})
        return reply

    found = asked(handler, lambda client: calibrate(client, "http://s", "m", "chat"))
    assert (found.known, found.context) == (False, 512)


@pytest.mark.parametrize(
    ("reply", "is_vllm"),
    [
        (httpx.Response(200, json={"version": "0.32.0"}), True),
        (httpx.Response(404, json={}), False),
        (httpx.Response(200, text="hello"), False),
    ],
)
def test_vllm_is_known_by_its_version(reply: httpx.Response, is_vllm: bool) -> None:
    assert asked(lambda _: reply, lambda client: speaks_vllm(client, "http://s/v1")) is is_vllm
