"""What is told of a stack, and what never is."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

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
        "startup_line": "CPU KV cache size: 2,097,152 tokens, "
        "Maximum concurrency for 4,096 tokens per request: 512.00x",
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
        "startup_line": None,
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
    found = stack.launched_stack(
        kind="process",
        url="http://127.0.0.1:9",
        api_key=None,
        source="",
        revision=None,
        args=[],
        env={"HF_TOKEN": "abc", "MY_PASSWORD": "abc", "VLLM_CPU_KVCACHE_SPACE": "1", "U": "http://a:abc@h/"},
        log_head="",
        packages=None,
        accelerators=None,
    )
    assert found["env"] == {
        "HF_TOKEN": "***",
        "MY_PASSWORD": "***",
        "U": "http://***@h/",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    assert found["source"] is None


def test_vllms_own_words_about_its_kv_cache_are_kept() -> None:
    one = "INFO 01-01 00:00:00 [kv_cache_utils.py:2327] "
    said = "GPU + host KV cache size: 43,520 tokens, Maximum concurrency for 8,192 tokens per request: 5.31x"
    found = stack.kv_cache(f"{one}{said}\n{one}{said}\n", "http://127.0.0.1:9", None)
    assert found["startup_line"] == said
    first, second = said.removeprefix("GPU + host ").split(", M")
    two = f"{one}GPU {first}\n{one}M{second}\n"
    assert stack.kv_cache(two, "http://127.0.0.1:9", None)["startup_line"] == (
        "GPU KV cache size: 43,520 tokens; Maximum concurrency for 8,192 tokens per request: 5.31x"
    )


# -- accelerators


def amd_card(folder: Path, number: int, **files: str) -> None:
    device = folder / f"card{number}" / "device"
    device.mkdir(parents=True)
    given = {"vendor": "0x1002", "device": "0x74a5", "mem_info_vram_total": "274877906944", **files}
    for name, text in given.items():
        (device / name).write_text(f"{text}\n")


def test_amds_cards_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    for number in (0, 10, 2):
        amd_card(tmp_path, number, product_name="AMD Instinct MI325X", unique_id=f"id-{number}")
    amd_card(tmp_path, 3, vendor="0x10de")
    (tmp_path / "card0-DP-1").mkdir()
    version = tmp_path / "version"
    version.write_text("6.16.6\n")
    found = stack.amd(tmp_path, version)
    assert found is not None
    assert [card["uuid"] for card in found] == ["id-0", "id-2", "id-10"]
    assert found[0] == {
        "uuid": "id-0",
        "name": "AMD Instinct MI325X",
        "memory_bytes": 274877906944,
        "driver": "6.16.6",
    }


def test_an_amd_card_without_a_name_goes_by_its_number(tmp_path: Path) -> None:
    amd_card(tmp_path, 0)
    found = stack.amd(tmp_path, tmp_path / "no version")
    assert found is not None
    assert found[0]["name"] == "AMD 0x74a5"
    assert found[0]["driver"] == f"kernel {platform.release()}"
    assert stack.amd(tmp_path / "nothing") is None


def cards(*names: str) -> list[dict[str, object]]:
    return [
        {"uuid": f"GPU-{at}", "name": name, "memory_bytes": 80, "driver": "570.1"}
        for at, name in enumerate(names)
    ]


def test_accelerators_are_counted_by_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "nvidia", lambda: cards("H100", "H100", "L4"))
    assert stack.accelerators() == [
        {"name": "H100", "memory_bytes": 80, "driver": "570.1", "count": 2},
        {"name": "L4", "memory_bytes": 80, "driver": "570.1", "count": 1},
    ]
    only = stack.accelerators(["0", "GPU-2"])
    assert only is not None
    assert [(item["name"], item["count"]) for item in only] == [("H100", 1), ("L4", 1)]


def test_accelerators_nobody_can_tell_of_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "nvidia", lambda: None)
    monkeypatch.setattr(stack, "amd", lambda: None)
    assert stack.accelerators() is None


@pytest.mark.parametrize(
    ("env", "seen"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "0, 3"}, ["0", "3"]),
        ({"HIP_VISIBLE_DEVICES": "1"}, ["1"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_an_environment_narrows_the_accelerators_down(env: dict[str, str], seen: list[str] | None) -> None:
    assert stack.visible(env) == seen
