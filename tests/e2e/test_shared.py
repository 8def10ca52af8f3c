"""Both classes alone and together on one simulated server, by the real client, against brute force."""

from __future__ import annotations

from pathlib import Path

import pytest

from include.capacity import servers
from include.capacity.config import load_fleet
from include.capacity.flow import sweep as stages
from include.capacity.results.store import FolderStore
from include.capacity.results.sweepdir import SweepDir
from include.capacity.simulator.profile import load_profile
from include.capacity.simulator.truth import closed_loop

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

MODEL = "sprinter"
REQUESTS = 40_000
SEED = 77


def holds(pair: dict[str, int]) -> bool:
    """Whether a pair truly holds together: 40,000 requests of each class."""
    classes = load_fleet().models[MODEL].classes
    points = closed_loop(
        load_profile(MODEL), {name: (classes[name], n) for name, n in pair.items()}, REQUESTS, SEED
    )
    return all(
        point.completed >= classes[name].completion_floor
        and (classes[name].ttft is None or point.met >= classes[name].ttft.share)
        for name, point in points.items()
    )


def test_a_pair_is_proven_together_and_truly_holds(tmp_path: Path) -> None:
    fleet = load_fleet()
    model = fleet.models[MODEL].model_copy(update={"shared": True})
    sweep = SweepDir(FolderStore(tmp_path / "sweep"))
    owner: servers.Owner = {"run_id": "shared", "model": MODEL}
    handle = servers.start(MODEL, model, owner, tmp_path / "servers")
    try:
        stages.open_sweep(
            sweep,
            run_id="shared",
            model_key=MODEL,
            model=model,
            accelerator=fleet.accelerators[model.accelerator],
            bounds=fleet.steps,
        )
        stages.record_stack(sweep, handle.stack, simulated=handle.simulated, clock_scale=handle.clock_scale)
        stages.run_all(sweep, servers.target_of(handle), alive=lambda: servers.alive(handle))
    finally:
        servers.stop(handle)
    stages.check(sweep)
    limits = stages.limits(sweep)["limits"]

    alone = {item["class"]: item for item in limits if item["measured"] == "alone"}
    shared = {item["class"]: item for item in limits if item["measured"] == "shared"}
    assert {name: item["status"] for name, item in alone.items()} == dict.fromkeys(model.classes, "proven")
    assert {name: item["status"] for name, item in shared.items()} == dict.fromkeys(model.classes, "proven")
    pair = {name: item["limit"] for name, item in shared.items()}
    assert holds(pair), pair
    assert sum(pair.values()) >= 12, pair  # the server takes 16 at once
    # Limits measured alone do not add up.
    assert not holds({name: item["limit"] for name, item in alone.items()})
    for name, item in shared.items():
        assert item["evidence"]["n"] >= 600
        assert item["beside"] == {other: n for other, n in pair.items() if other != name}
