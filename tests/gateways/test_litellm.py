"""LiteLLM's real proxy (in an environment of its own) with our file, before a simulated server."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from include.capacity.config import Gateway
from include.capacity.policy import policy_files
from scripts.local_stack import free_port
from tests.gateways import started
from tests.policy.made import about, entry, limits
from tests.running import running

PROXY = Path(__file__).parents[2] / ".venv-litellm" / "bin" / "litellm"
LIMIT, SENT = 4, 12
NAME = 'sim/"steady": {8b}'


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URL and key."""
    folder = tmp_path_factory.mktemp("litellm")
    key = f"sk-{secrets.token_hex(24)}"
    with started.simulator(folder, "steady", 1.0, NAME) as server:
        files = policy_files(
            about(served_name=NAME), limits(entry("interactive", LIMIT)), Gateway(upstream=server)
        )
        config = folder / "litellm.yaml"
        config.write_bytes(files["policy/alone/interactive/litellm.yaml"])
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [str(PROXY), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        with running(
            [*command, "--num_workers", "1"],
            f"{url}/health/liveliness",
            folder / "proxy.log",
            LITELLM_MASTER_KEY=key,
            LITELLM_LOCAL_MODEL_COST_MAP="True",
        ):
            yield url, key


@pytest.mark.parametrize("stream", [True, False])
def test_the_proxy_admits_the_limit_and_turns_the_rest_away(proxy: tuple[str, str], stream: bool) -> None:
    """Answers take six seconds, so all requests are there before the first has ended."""
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": stream,
    }

    url, key = proxy

    async def statuses() -> list[int]:
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120, trust_env=False) as client:
            asked = [client.post("/v1/chat/completions", json=body) for _ in range(SENT)]
            return sorted(answer.status_code for answer in await asyncio.gather(*asked))

    assert asyncio.run(statuses()) == [200] * LIMIT + [429] * (SENT - LIMIT)
