"""What is told of a stack, and what never is."""

from __future__ import annotations

import sys

import pytest

from include.capacity.servers import stack


def test_the_kv_cache_is_read_from_vllms_log() -> None:
    log = (
        "INFO [kv_cache_utils.py:2327] CPU KV cache size: 2,097,152 tokens, "
        "Maximum concurrency for 4,096 tokens per request: 512.00x\n"
    )
    assert stack.kv_cache(log, "http://127.0.0.1:9", None) == {
        "kv_cache_tokens": 2097152.0,
        "kv_cache_max_concurrency": 512.0,
        "max_model_len": 4096.0,
    }


def test_the_kv_cache_is_read_from_two_lines_as_on_gpus() -> None:
    log = (
        "INFO 01-01 [kv_cache_utils.py] GPU KV cache size: 43,520 tokens\n"
        "INFO 01-01 [kv_cache_utils.py] Maximum concurrency for 8,192 tokens per request: 5.31x\n"
    )
    found = stack.kv_cache(log, "http://127.0.0.1:9", None)
    assert (found["kv_cache_tokens"], found["kv_cache_max_concurrency"]) == (43520.0, 5.31)


def test_what_a_server_does_not_tell_is_unknown() -> None:
    found = stack.endpoint_stack("http://127.0.0.1:9", None)
    assert found["vllm_version"] is None
    assert found["accelerators"] is None
    assert found["simulated"] is False
    assert found["observed"] == {
        "kv_cache_tokens": None,
        "kv_cache_max_concurrency": None,
        "max_model_len": None,
    }


def test_versions_are_those_of_the_servers_environment() -> None:
    found = stack.package_versions(sys.executable)
    assert found is not None
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "vllm" not in found
    assert stack.package_versions("/no/such/python") is None
    assert stack.package_versions(None) is None


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["--api-key", "abc", "--port", "1"], ["--api-key", "***", "--port", "1"]),
        (["--hf-token=abc", "x"], ["--hf-token=***", "x"]),
        (["--api-key", "a", "b", "--seed", "1"], ["--api-key", "***", "***", "--seed", "1"]),
        (["--max-num-batched-tokens", "8192"], ["--max-num-batched-tokens", "8192"]),
        (["--tokenizer", "org/tok"], ["--tokenizer", "org/tok"]),
        (["serve", "s3://me:pw@host/x"], ["serve", "s3://***@host/x"]),
        (["-x", "hf_abcdefghijkl"], ["-x", "***"]),
    ],
)
def test_secrets_in_arguments_are_masked(args: list[str], shown: list[str]) -> None:
    assert stack.redact_args(args) == shown


def test_secrets_in_the_environment_are_masked() -> None:
    found = stack.process_stack(
        kind="process",
        url="http://127.0.0.1:9",
        api_key=None,
        source="",
        revision=None,
        args=[],
        env={"HF_TOKEN": "abc", "MY_PASSWORD": "abc", "VLLM_CPU_KVCACHE_SPACE": "1", "U": "http://a:abc@h/"},
        log_head="",
        python=None,
    )
    assert found["env"] == {
        "HF_TOKEN": "***",
        "MY_PASSWORD": "***",
        "U": "http://***@h/",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    assert found["source"] is None
