"""Two made-up sweeps and their reports, built once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from include.capacity.report.build import build_fleet_report, build_model_report
from include.capacity.report.data import ModelData, read_model
from include.capacity.results.store import FolderStore
from include.capacity.results.sweepdir import SweepDir
from tests.report.fixtures import SPRINTER, STEADY, make_sweep

LADDERS = {"interactive": [1, 4, 16, 32, 64], "batch": [1, 8, 16, 32]}


@dataclass
class Built:
    """Sweeps with their reports, and the fleet's report beside them."""

    sweeps: dict[str, SweepDir]
    fleet: SweepDir
    models: dict[str, ModelData]

    def page(self, model: str, name: str) -> str:
        return self.sweeps[model].read(name).decode()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    store = FolderStore(Path(tmp_path_factory.mktemp("reports")))
    sweeps = {
        "steady": make_sweep(store, "steady", "steady", STEADY, ladders=LADDERS),
        "sprinter": make_sweep(store, "sprinter", "sprinter", SPRINTER, ladders=LADDERS),
    }
    for sweep in sweeps.values():
        build_model_report(sweep)
    fleet = SweepDir(store)
    run = {
        "run_id": "nightly-2026-11-30",
        "fleet": "demo",
        "started_at": "2026-11-30T01:00:00+00:00",
        "failed": {"broken": "The server died at start: out of memory."},
    }
    build_fleet_report(sweeps, fleet, run)
    return Built(sweeps, fleet, {name: read_model(sweep) for name, sweep in sweeps.items()})
