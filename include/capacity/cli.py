"""The command line: one command per stage, each reading files and writing files.

Exit status: 0 done, 2 wrong usage or configuration, 3 the data or the server says no (rejected sweep,
no limit); 1 is left to crashes. ``--json`` prints one JSON document and nothing else.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from include.capacity.config import (
    Accelerator,
    EndpointServer,
    Fleet,
    Gateway,
    Model,
    Publish,
    ServiceClass,
    StepBounds,
    load_fleet,
    parse_yaml,
    read_text,
    validate,
)
from include.capacity.errors import CapacityError, ConfigError, DataError, NoLimit
from include.capacity.results.plain import finite
from include.capacity.results.store import FolderStore
from include.capacity.results.sweepdir import SweepDir
from include.capacity.words import EXPORTABLE

OK, NO = 0, 3

ENDPOINT_PATIENCE_S = 15.0
"""A server named on the command line is said to run already."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for noisy in ("httpx", "great_expectations"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        return int(options.run(options))
    except CapacityError as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return error.exit_status
    except OSError as error:  # no space, no permission, a file where a folder should be
        print(f"{options.command}: {error.filename or 'file'}: {error.strerror or error}", file=sys.stderr)
        return NO
    except KeyboardInterrupt:
        print(f"{options.command}: stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m include.capacity", description=__doc__.partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(run=run)
        return sub

    sub = command("simulate", simulate, "Run a simulated vLLM server until interrupted.")
    sub.add_argument("--profile", required=True, help="name in include/config/profiles, or a file")
    sub.add_argument("--port", type=_port, required=True, help="0: a free one")
    sub.add_argument("--host", default="127.0.0.1")

    sub = command("sweep", sweep, "Measure one class of one model on a running server, and judge it.")
    sub.add_argument("--url", required=True, help="base URL of the server, without /v1")
    sub.add_argument("--model", required=True, help="served model name")
    sub.add_argument("--class", dest="service_class", required=True, help="service class of the fleet file")
    sub.add_argument("--concurrency", required=True, type=_ladder, help="steps, such as 1,2,4")
    sub.add_argument(
        "--out", required=True, type=Path, help="sweep directory to write; an interrupted one goes on"
    )
    sub.add_argument("--config", type=Path, help="fleet file (default: the one shipped)")
    sub.add_argument(
        "--find", action="store_true", help="search for the limit and prove it (default: exactly the steps)"
    )
    sub.add_argument("--repeats", type=int, default=1)
    sub.add_argument("--requests", type=int, help="proof size instead of the fleet file's")
    sub.add_argument("--seconds", type=float, help="shortest window instead of the fleet file's")
    sub.add_argument("--api-key-env", help="environment variable that holds the server's API key")
    sub.add_argument(
        "--accelerator", default="unknown", help="what the server runs on, such as H100-SXM-80GB"
    )

    sub = command("import", import_, "Read other tools' result files into a sweep directory.")
    sub.add_argument("files", nargs="+", type=Path)
    sub.add_argument("--out", required=True, type=Path)

    sub = command("check", check, "Judge whether the measurements may be used.")
    sub.add_argument("dir", type=Path)
    sub.add_argument("--json", action="store_true")

    sub = command("limits", limits, "Compute the limits from what may be used.")
    sub.add_argument("dir", type=Path)
    sub.add_argument("--classes", type=Path, help="judge by the `classes` of this fleet or classes file")
    sub.add_argument("--json", action="store_true")

    sub = command("report", report, "Write report.html, report.md and the figures.")
    sub.add_argument("dir", type=Path)

    sub = command("policy", policy, "Write the limits as files that gateways load, into DIR/policy.")
    sub.add_argument("dir", type=Path)
    sub.add_argument("--replicas", type=int, help="gateways before one server (default: as sweep.json says)")
    sub.add_argument("--processes", type=int, help="worker processes of each, where they count (LiteLLM)")
    sub.add_argument("--listen", help="ADDRESS:PORT of the gateway")
    sub.add_argument("--upstream", help="http://HOST:PORT where it finds the server")

    sub = command("replicas", replicas, "Plan replicas by hour from the limits and a demand file.")
    sub.add_argument(
        "limits", help="sweep directory, its limits.json, or latest/limits.json; may be file:// or s3://"
    )
    sub.add_argument("--demand", required=True, type=Path, help="CSV or YAML; see the README")
    sub.add_argument("--headroom", type=float, default=0.2, help="share above the demand (default: 0.2)")
    sub.add_argument("--json", action="store_true")

    sub = command("compare", compare, "What a gateway costs: sweeps of one server, direct and through it.")
    sub.add_argument("direct", type=Path)
    sub.add_argument("through", type=Path)
    sub.add_argument("--json", action="store_true")

    sub = command("publish", publish, "Publish a sweep directory to file:///path or s3://bucket/prefix.")
    sub.add_argument("dir", type=Path)
    sub.add_argument("--to", required=True)
    sub.add_argument(
        "--promote", action="store_true", help="let limits of the fleet's own classes move latest/"
    )
    sub.add_argument(
        "--config",
        type=Path,
        help="fleet file whose classes and valid_for_s count (default: the one shipped)",
    )

    sub = command("reap", reap, "Stop servers and break leases whose run is over, on this machine.")
    sub.add_argument(
        "--run",
        dest="over",
        action="append",
        default=[],
        type=_run_name,
        metavar="DAG_ID/RUN_ID",
        help="this run of Airflow is over (only Airflow's own reaper can tell by itself); may be repeated",
    )
    sub.add_argument("--dry-run", action="store_true", help="only say what would be done")
    sub.add_argument("--json", action="store_true")

    sub = command("check-config", check_config, "Validate a fleet file and say what it asks for.")
    sub.add_argument("file", type=Path, nargs="?")
    return parser


def simulate(options: argparse.Namespace) -> int:
    from include.capacity.simulator.profile import load_profile
    from include.capacity.simulator.server import serve

    serve(load_profile(options.profile), options.host, options.port)
    return OK


def sweep(options: argparse.Namespace) -> int:
    from include.capacity.flow import sweep as stages
    from include.capacity.flow.params import resized
    from include.capacity.load.progress import step_progress
    from include.capacity.servers import alive, start, stop, target_of

    fleet = load_fleet(options.config)
    if options.service_class not in fleet.classes:
        raise ConfigError(f"--class: {options.service_class!r} is none of {sorted(fleet.classes)}")
    if options.api_key_env and not os.environ.get(options.api_key_env):
        raise ConfigError(f"--api-key-env: the environment has no {options.api_key_env}")
    model = _endpoint_model(options, fleet)
    bounds = validate(
        StepBounds,
        resized(fleet.steps.model_dump(), options.requests, options.seconds),
        "--requests, --seconds",
    )
    out = SweepDir(FolderStore(options.out))
    options.out.mkdir(parents=True, exist_ok=True)
    stages.open_sweep(
        out,
        run_id=f"cli-{datetime.now(UTC):%Y%m%dt%H%M%Sz}",
        model_key=options.model,
        model=model,
        accelerator=Accelerator(kind=options.accelerator),
        bounds=bounds,
    )
    handle = start(options.model, model, {"run_id": "cli", "model": options.model}, options.out / "server")
    try:
        stages.record_stack(out, handle.stack, simulated=handle.simulated, clock_scale=handle.clock_scale)
        stages.run_all(out, target_of(handle), step_progress, alive=lambda: alive(handle))
    finally:
        stop(handle)
    quality = stages.check(out)
    if quality["verdict"] == "reject":
        _print_quality(quality)
    return _print_limits(stages.limits(out), as_json=False)


def _endpoint_model(options: argparse.Namespace, fleet: Fleet) -> Model:
    """A server that somebody else runs, as a model of the fleet."""
    chosen = fleet.classes[options.service_class].model_dump()
    server = {
        "kind": "endpoint",
        "url": options.url.rstrip("/"),
        "api_key_env": options.api_key_env,
        "start_timeout_s": ENDPOINT_PATIENCE_S,
    }
    return validate(
        Model,
        {
            "served_name": options.model,
            "server": validate(EndpointServer, server, "--url"),
            "accelerator": "endpoint",
            "mode": "find" if options.find else "exact",
            "repeats": options.repeats,
            "classes": {options.service_class: {**chosen, "ladder": options.concurrency}},
        },
        "sweep",
    )


def import_(options: argparse.Namespace) -> int:
    from include.capacity.importers import import_files

    out = SweepDir(FolderStore(options.out))
    steps = import_files(options.files, out)
    print(f"{len(steps)} steps in {options.out}")
    return OK


def check(options: argparse.Namespace) -> int:
    from include.capacity.flow import sweep as stages

    quality = stages.check(_existing(options.dir))
    if options.json:
        fields = ("source", "model", "series", "workload", "concurrency", "repeat", "verdict", "findings")
        _print_json({"steps": [{key: step.get(key) for key in fields} for step in quality["steps"]]})
    else:
        _print_quality(quality)
    if not quality["steps"]:
        raise NoLimit(f"{options.dir}: no step was measured, so there is nothing to judge")
    if all(step["verdict"] == "reject" for step in quality["steps"]):
        raise NoLimit(f"{options.dir}: every step is rejected, so nothing can be concluded")
    return OK if quality["verdict"] != "reject" else NO


def limits(options: argparse.Namespace) -> int:
    from include.capacity.flow import sweep as stages

    folder = _existing(options.dir)
    if not folder.exists("quality.json") or not folder.exists("steps.csv"):
        stages.check(folder)
    classes = _classes(options.classes) if options.classes else None
    return _print_limits(stages.limits(folder, classes), as_json=options.json)


def report(options: argparse.Namespace) -> int:
    from include.capacity.flow import sweep as stages

    stages.report(_with_limits(options.dir))
    print(f"{options.dir}/report.html")
    return OK


def policy(options: argparse.Namespace) -> int:
    from include.capacity.policy import INDEX, policy_files

    folder = _with_limits(options.dir)
    about, found = folder.read_json("sweep.json"), folder.read_json("limits.json")
    given = {
        name: getattr(options, name)
        for name in ("replicas", "processes", "listen", "upstream")
        if getattr(options, name) is not None
    }
    configured = validate(Gateway, about.get("gateway") or {}, "sweep.json: gateway")
    gateway = validate(Gateway, {**configured.model_dump(), **given}, "policy")
    files = policy_files(about, found, gateway)
    if (options.dir / "policy").exists():  # of an earlier time, with other limits
        shutil.rmtree(options.dir / "policy")
    for name, data in files.items():
        folder.write(name, data)
    entries = json.loads(files[INDEX])["policies"]
    for entry in entries:
        classes = ", ".join(f"{name} {limit or '-'}" for name, limit in entry["classes"].items())
        print(f"{entry['measured']}: {classes}")
        for name in entry["files"].values():
            print(f"    {options.dir}/{name}")
        for name, reason in entry["why_not"].items():
            print(f"    no {name}: {reason}")
    return OK if any(entry["files"] for entry in entries) else NO


def replicas(options: argparse.Namespace) -> int:
    from include.capacity.policy.replicas import plan, read_capacities, read_demand, replicas_table

    if not 0 <= options.headroom <= 10:
        raise ConfigError(f"--headroom: expected a share from 0 to 10, found {options.headroom:g}")
    capacities, simulated = read_capacities(options.limits)
    found = plan(read_demand(options.demand), capacities, options.headroom)
    if options.json:
        _print_json({"simulated": simulated, **found})
    else:
        print(("SIMULATED server.\n" if simulated else "") + replicas_table(found))
    return OK


def compare(options: argparse.Namespace) -> int:
    from include.capacity.policy.compare import compare as compared
    from include.capacity.policy.compare import compare_table

    found = compared(_existing(options.direct), _existing(options.through))
    if options.json:
        _print_json(found)
    else:
        print(compare_table(found))
    return OK


def publish(options: argparse.Namespace) -> int:
    from include.capacity.publish.publish import publish_run
    from include.capacity.results.store import open_store

    folder = _with_limits(options.dir)
    to = validate(Publish, {"to": options.to}, "--to").to
    about = folder.read_json("sweep.json")
    fleet = load_fleet(options.config)
    known = fleet.models.get(about["model"])
    classes = known.classes if known else fleet.classes
    done = publish_run(
        open_store(to),
        about["run_id"],
        {about["model"]: folder},
        promote=options.promote,
        valid_for_s=fleet.publish.valid_for_s,
        own_classes={about["model"]: {name: item.model_dump(mode="json") for name, item in classes.items()}},
    )
    _print_json(done)
    return OK


def reap(options: argparse.Namespace) -> int:
    from include.capacity.servers.reap import lines
    from include.capacity.servers.reap import reap as clear_away

    over = frozenset(options.over)
    untold = "only Airflow can tell whether its run is over; if you know that it is, name it with --run"
    found = clear_away(over.__contains__, dry_run=options.dry_run, untold=untold)
    if options.json:
        _print_json({"dry_run": options.dry_run, **found.to_json()})
    else:
        print("\n".join(lines(found.to_json(), dry_run=options.dry_run)))
    return NO if found.failed else OK


def check_config(options: argparse.Namespace) -> int:
    fleet = load_fleet(options.file)
    for name, model in fleet.models.items():
        for class_name, item in model.classes.items():
            where = f"{model.accelerator} ({model.server.kind})"
            print(f"{name} {class_name}: {model.mode} {item.ladder} on {where}")
    return OK


def _existing(path: Path) -> SweepDir:
    folder = SweepDir(FolderStore(path))
    if not folder.exists("sweep.json"):
        raise DataError(f"{path}: not a sweep directory: it holds no sweep.json")
    about = folder.read_json("sweep.json")
    missing = {"run_id", "model", "source", "classes"} - (about.keys() if isinstance(about, dict) else set())
    if missing:
        raise DataError(f"{path}/sweep.json: not what a sweep writes: no {', '.join(sorted(missing))}")
    return folder


def _with_limits(path: Path) -> SweepDir:
    folder = _existing(path)
    if not folder.exists("limits.json"):
        raise DataError(f"{path}: no limits.json: run `limits` first")
    return folder


def _classes(path: Path) -> dict[str, ServiceClass]:
    data = parse_yaml(read_text(path), str(path))
    found = data.get("classes") if isinstance(data, dict) else None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a mapping `classes` of service classes")
    return {name: validate(ServiceClass, item, f"{path}: classes.{name}") for name, item in found.items()}


def _print_quality(quality: dict[str, Any]) -> None:
    for step in quality["steps"]:
        print(f"{step['verdict']:7} {step['key']}")
        for finding in step["findings"]:
            print(f"        {finding['severity']} {finding['check']}: {finding['reason']}")
    for finding in quality["findings"]:
        print(f"sweep: {finding['severity']} {finding['check']}: {finding['reason']}")
    print(f"sweep: {quality['verdict']}")


def _print_limits(result: dict[str, Any], *, as_json: bool) -> int:
    from include.capacity.limits.compute import limits_table

    if as_json:
        _print_json({"limits": result["limits"], "saturation": result["saturation"]})
    else:
        print(limits_table(result))
    return OK if any(item["status"] in EXPORTABLE for item in result["limits"]) else NO


def _print_json(data: Any) -> None:
    print(json.dumps(finite(data), indent=1, ensure_ascii=False, allow_nan=False))


def _ladder(text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers separated by commas, found {text!r}"
        ) from None
    if not numbers or numbers[0] < 1:
        raise argparse.ArgumentTypeError(f"expected concurrencies of at least 1, found {text!r}")
    return numbers


def _run_name(text: str) -> str:
    if not re.fullmatch(r"[^/\s]+/\S+", text):
        raise argparse.ArgumentTypeError(f"expected dag_id/run_id, found {text!r}")
    return text


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, found {text!r}")
    return int(text)
