"""``make demo``: the nightly job once, on two simulated models, in a local Airflow with a local S3.

Prints what it measures while it measures, the limits as a table, and where to look; then stays up
until Ctrl-C. ``--once`` stops everything and exits with the run's status (0 green, 3 red).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from include.capacity.config import load_fleet
from include.capacity.limits.compute import limits_table
from scripts.local_stack import ROOT, LocalStack

DAG = "capacity_nightly"
POLL_S = 1.0


def main() -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", action="store_true", help="stop everything when the run has ended")
    parser.add_argument("--home", type=Path, default=ROOT / "var" / "demo")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    stack = LocalStack(options.home, airflow_port=8080, s3_port=9000)
    try:
        say("starting Airflow and an S3 server (about half a minute) ...")
        with stack.running():
            say(f"Airflow  {stack.airflow_url}\nS3       {stack.s3_url}  bucket {stack.bucket}")
            run = stack.trigger(DAG)
            state = watch(stack, run)
            show(stack, run, state)
            if not options.once:
                say("\nEverything stays up until Ctrl-C.")
                threading.Event().wait()
            return 0 if state == "success" else 3
    except KeyboardInterrupt:
        say("\nstopped")
        return 130


def watch(stack: LocalStack, run: str) -> str:
    """Follow the run to its end, one line for each step; returns its state."""
    began = time.monotonic()
    done: set[str] = set()
    shown = ""
    while True:
        state = stack.run_state(DAG, run)
        for task in sorted(stack.tasks(DAG, run), key=lambda item: item["end_date"] or "9"):
            name = f"{task['task_id']} {task['rendered_map_index'] or ''}".strip()
            key = f"{name}{task['map_index']}"
            if key in done or task["state"] not in ("success", "failed", "upstream_failed"):
                continue
            done.add(key)
            clear_line(shown)
            took = f"{task['duration']:.0f} s" if task["duration"] else ""
            say(f"[{clock(began)}] {name:55} {task['state']:8} {took}")
        shown = progress_line(stack, began, shown)
        if state in ("success", "failed"):
            clear_line(shown)
            say(f"[{clock(began)}] the run ended: {state}")
            return state
        time.sleep(POLL_S)


def progress_line(stack: LocalStack, began: float, before: str) -> str:
    """What is being measured right now, rewritten in place on a terminal."""
    lines = []
    for file in sorted((stack.home / "state" / "progress").glob("*.json")):
        try:
            now = json.loads(file.read_text())
        except (FileNotFoundError, ValueError):
            continue  # the step ended, or the file is being replaced
        lines.append(f"{now['model']} {now['line']}")
    line = f"[{clock(began)}] " + " | ".join(lines) if lines else ""
    if line and line != before:
        if sys.stdout.isatty():
            sys.stdout.write(f"\r\033[K{line[:160]}")
            sys.stdout.flush()
        else:
            say(line)
    return line


def clear_line(line: str) -> None:
    """Make room for a full line where the progress line stands."""
    if line and sys.stdout.isatty():
        sys.stdout.write("\r\033[K")


def show(stack: LocalStack, run: str, state: str) -> None:
    """The limits, and where to look."""
    target = load_fleet().publish.to
    prefix = target.removeprefix(f"s3://{stack.bucket}").strip("/")
    limits = published(stack, f"{prefix}/latest/limits.json")
    say("")
    if limits is not None:
        say(limits_table(limits))
    else:
        say("Nothing was published; the run's check_run task says why.")
    say(
        f"\nThe run in Airflow   {stack.airflow_url}/dags/{DAG}/runs/{run}\n"
        f"The report           {stack.home}/s3/{stack.bucket}/{prefix}/latest/report.html\n"
        f"On S3                {target}/latest/limits.json at {stack.s3_url} (key {stack.access_key}, "
        f"secret in {stack.home}/s3-secret)\n"
        f"Logs                 {stack.home}/logs, {stack.home}/airflow/logs"
    )
    if state != "success":
        failed = [task["task_id"] for task in stack.tasks(DAG, run) if task["state"] == "failed"]
        say(f"\nThe run is red: {', '.join(failed)}")


def published(stack: LocalStack, key: str) -> dict[str, Any] | None:
    """A JSON object of the bucket, if it is there."""
    client = stack.s3()
    try:
        body = client.get_object(Bucket=stack.bucket, Key=key)["Body"].read()
    except client.exceptions.NoSuchKey:
        return None
    return dict(json.loads(body))


def clock(began: float) -> str:
    """``mm:ss`` since ``began``."""
    minutes, seconds = divmod(int(time.monotonic() - began), 60)
    return f"{minutes:02d}:{seconds:02d}"


def say(text: str) -> None:
    """Print at once, also into a pipe."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
