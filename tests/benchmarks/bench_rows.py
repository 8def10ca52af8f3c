"""From request rows to limits: time and memory at 1 million rows, and how both grow up to 10 million.

``python -m tests.benchmarks.bench_rows`` writes a made-up sweep of 40 steps for each size and in a fresh
process runs what the command line runs after a sweep, without the Great Expectations suites: evidence and
``steps.csv`` from the rows, then ``limits``. It prints processor and wall seconds, peak memory of the whole
process, and the growth per row against the smallest size. Processor seconds are judged: those of the wall are
of whatever else the machine does. Exit status 1 if 1 million rows take 10 s or 1 GiB, or if a row of
the largest sweep costs more than 1.5 times a row of the smallest.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from include.capacity.config import load_fleet
from include.capacity.results.schema import REQUEST_SCHEMA, Facts, LoadFacts
from include.capacity.results.spec import Load, StepSpec
from include.capacity.results.store import FolderStore
from include.capacity.results.sweepdir import SweepDir
from include.capacity.words import Outcome, Phase

STEPS = 40
SIZES = (1_000_000, 2_500_000, 10_000_000)
MILLION_MOST_S = 10.0
MILLION_MOST_BYTES = 2**30
GROWTH_MOST = 1.5


def write_sweep(folder: Path, rows: int) -> SweepDir:
    """A sweep directory with ``rows`` request rows in 40 steps of the shipped fleet's two classes."""
    sweep = SweepDir(FolderStore(folder))
    fleet = load_fleet()
    classes = {name: fleet.classes[name] for name in ("interactive", "batch")}
    sweep.write_json(
        "sweep.json",
        {
            "schema": 1,
            "run_id": "benchmark",
            "attempt": 1,
            "model": "made-up",
            "served_name": "made-up",
            "series": "",
            "source": "measured",
            "simulated": True,
            "clock_scale": 1.0,
            "accelerator": {"name": "none", "kind": "none", "count": 1},
            "stack": {},
            "stack_id": "none",
            "comparison_ids": dict.fromkeys(classes, "none"),
            "classes": {name: one.model_dump(mode="json") for name, one in classes.items()},
            "bounds": fleet.steps.model_dump(mode="json"),
            "mode": "find",
            "repeats": 1,
            "shared": False,
            "created_at": "2026-01-01T00:00:00+00:00",
            "versions": {},
            "seed": 0,
        },
    )
    rng = np.random.default_rng(1)
    each = rows // STEPS
    for at in range(STEPS):
        name = ("interactive", "batch")[at % 2]
        phase = Phase.PROVE if at >= 3 * STEPS // 4 else Phase.SCOUT
        n = 8 * (1 + at // 2)
        load = Load(service_class=name, concurrency=n, requests=each, max_requests=each)
        spec = StepSpec(model="made-up", phase=phase, loads=(load,))
        facts = Facts(
            spec=spec.to_json(),
            run_id="benchmark",
            started_at=f"2026-01-01T{at // 6:02}:{at % 6 * 10:02}:00+00:00",
            loads=[
                LoadFacts(
                    service_class=name,
                    concurrency=n,
                    warmup_s=10.0,
                    warmup_steady=True,
                    window_start_s=10.0,
                    window_s=each / 10,
                    inflight_mean=float(n),
                    inflight_peak=n,
                    stop_reason="enough_requests",
                )
            ],
        )
        sweep.write_step(spec.key, facts, _rows(name, classes[name].workload.name, spec, each, rng))
    return sweep


def _rows(name: str, workload: str, spec: StepSpec, n: int, rng: np.random.Generator) -> pa.Table:
    started = 10 + np.arange(n) / 10
    ttft = rng.lognormal(-2, 0.5, n)
    decode = rng.lognormal(1, 0.5, n)
    tokens = rng.integers(16, 400, n)
    failed = rng.random(n) < 0.001
    streamed = name == "interactive"
    blank = np.full(n, np.nan)
    values = {
        "model": np.full(n, "made-up"),
        "service_class": np.full(n, name),
        "workload": np.full(n, workload),
        "phase": np.full(n, spec.phase.value),
        "concurrency": np.full(n, spec.loads[0].concurrency),
        "repeat": np.ones(n, int),
        "worker": np.zeros(n, int),
        "request_id": np.char.add("r", np.arange(n).astype(str)),
        "slot": np.arange(n) % spec.loads[0].concurrency,
        "started_s": started,
        "send_lag_s": np.full(n, 0.0002),
        "refill_s": np.full(n, 0.0003),
        "paused_s": np.zeros(n),
        "ttft_s": ttft if streamed else blank,
        "first_answer_s": ttft if streamed else blank,
        "last_token_s": np.where(failed, np.nan, ttft + decode),
        "e2e_s": ttft + decode,
        "deadline_s": np.full(n, 60.0 if streamed else 120.0),
        "asked_prompt_tokens": rng.integers(16, 4000, n),
        "prompt_tokens": rng.integers(16, 4000, n),
        "asked_max_tokens": tokens,
        "output_tokens": tokens,
        "usage_estimated": np.zeros(n, bool),
        "chunks": tokens,
        "first_chunk_tokens": np.ones(n, int),
        "first_chunk_tokens_known": np.ones(n, bool),
        "streamed": np.full(n, streamed),
        "outcome": np.where(failed, Outcome.CONNECTION_LOST.value, Outcome.COMPLETED.value),
        "finish_reason": np.where(failed, "", "length"),
        "http_status": np.full(n, 200),
        "error": np.full(n, ""),
        "counted": np.ones(n, bool),
    }
    arrays = [pa.array(values[field.name], from_pandas=True).cast(field.type) for field in REQUEST_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=REQUEST_SCHEMA)


def judge(folder: Path) -> dict[str, float]:
    """Seconds (processor, wall) and peak bytes of this process for everything from rows to limits."""
    from include.capacity.flow.sweep import limits, recompute_evidence, write_steps

    sweep = SweepDir(FolderStore(folder))
    wall, cpu = time.perf_counter(), time.process_time()
    write_steps(sweep, recompute_evidence(sweep))
    sweep.write_json(
        "quality.json",
        {"schema": 1, "verdict": "ok", "findings": [], "steps": [], "not_checked": [], "gx": {}},
    )
    result = limits(sweep)
    return {
        "seconds": time.process_time() - cpu,
        "wall": time.perf_counter() - wall,
        "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "limits": sum(one["limit"] is not None for one in result["limits"]),
    }


def main(argv: list[str] | None = None) -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--judge", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    out = sys.stdout.write
    if arguments.judge:
        out(json.dumps(judge(arguments.judge)) + "\n")
        return 0
    good, first = True, None
    out(f"{'rows':>12}{'CPU s':>10}{'wall s':>10}{'MiB':>10}{'CPU/row':>10}{'MiB/row':>10}\n")
    for rows in sorted(arguments.sizes):
        with tempfile.TemporaryDirectory() as name:
            write_sweep(Path(name), rows)
            command = [sys.executable, "-m", "tests.benchmarks.bench_rows", "--judge", name]
            answer = subprocess.run(command, check=True, capture_output=True, text=True)
        it = json.loads(answer.stdout)
        if it["limits"] != 2:
            raise RuntimeError(f"{rows} rows gave {it['limits']} limits, expected 2")
        first = first or (rows, it)
        growth = [it[what] / rows / (first[1][what] / first[0]) for what in ("seconds", "bytes")]
        out(f"{rows:12,}{it['seconds']:10.1f}{it['wall']:10.1f}{it['bytes'] / 2**20:10.0f}")
        out(f"{growth[0]:10.2f}{growth[1]:10.2f}\n")
        sys.stdout.flush()
        good &= max(growth) <= GROWTH_MOST
        if rows == 1_000_000:
            good &= it["seconds"] < MILLION_MOST_S and it["bytes"] < MILLION_MOST_BYTES
    out("met\n" if good else "MISSED\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
