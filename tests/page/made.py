"""Published runs for the page to show: two models over some nights."""

from __future__ import annotations

from datetime import datetime, timedelta

from include.capacity.publish.publish import publish_run
from include.capacity.results.store import FolderStore, Store
from include.capacity.results.sweepdir import SweepDir
from tests.publish.made import limit_entry, small_sweep

ROUTES = (
    "/",
    "/limits",
    "/runs/night-2/1/",
    "/runs/night-2/1/llama/limits.json",
    "/latest/limits.json",
    "/view/latest/report.html",
    "/view/runs/night-2/1/llama/report.html",
    "/newest/night-2",
    "/newest/night-2/llama",
)
"""One of each route, for the runs below."""

FIGURE = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20"><path d="M0 20L40 0"/></svg>'

FELL = {
    "verdict": "fell",
    "was": 64,
    "was_bracket": [64, 68],
    "since_run": "night-1",
    "since": None,
    "confirmed_by": "evidence",
    "stack": "changed",
    "stack_changes": ["vllm 0.32 -> 0.33"],
    "sentence": "Fell from 64 to 40, with vllm 0.32 -> 0.33.",
}


def publish_nights(target: Store, work: FolderStore, last: datetime, *, evil: str = "") -> None:
    """Three nights: ``llama`` falls in the last one; ``coder`` failed in it and never had a batch limit.

    ``evil``: a name of one more model.
    """
    for night, limit in enumerate((64, 64, 40)):
        at = last - timedelta(days=2 - night)
        falls = limit_entry(
            "llama",
            "interactive",
            limit,
            bracket=[limit, limit + 4],
            change=FELL if night == 2 else None,
        )
        sweeps = {"llama": small_sweep(work, "llama", [falls], created_at=at.isoformat(), simulated=False)}
        if night < 2:
            entries = [
                limit_entry("coder", "interactive", 24 + night),
                limit_entry("coder", "batch", None, status="no_passing_step", bracket=[None, 4]),
            ]
            sweeps["coder"] = small_sweep(work, "coder", entries, created_at=at.isoformat(), simulated=True)
        if evil:
            entries = [limit_entry(evil, "interactive", 7)]
            sweeps[evil] = small_sweep(work, evil, entries, created_at=at.isoformat())
        for sweep in sweeps.values():
            sweep.write("figures/interactive-latency.svg", FIGURE)
        fleet = SweepDir(work, f"fleet{night}")
        fleet.write("report.html", '<h1>Fleet</h1><a href="./llama/report.html">llama</a>')
        fleet.write("report.md", "# Fleet")
        publish_run(
            target,
            f"night-{night}",
            sweeps,
            fleet,
            promote=True,
            failed={"coder": "its server did not start"} if night == 2 else {},
            valid_for_s=36 * 3600,
            now=at,
        )
