"""One installation for all fault tests: a real scheduler, API server, PostgreSQL and S3 server.

Each test finds it healthy and leaves it so: parts that have ended are started again, runs that still go on
are marked failed. A test that leaves a server, a lease or half a published run behind fails.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from include.capacity import servers
from include.capacity.config import load_fleet
from include.capacity.results.store import S3Store
from scripts.local_stack import AIRFLOW_PARTS, LocalStack
from tests.faults.kit import ENDED, NIGHTLY, SWEEP, Faults, Run, write_fleet

PREFIX = "faults"


@pytest.fixture(scope="session")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    """Everything running, on PostgreSQL; stopped at the end."""
    home = tmp_path_factory.mktemp("faults")
    stack = LocalStack(
        home,
        postgres=True,
        env={
            "CAPACITY_FLEET": str(home / "fleet.yaml"),
            "CAPACITY_LEASE_POLL_S": "2",
            "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "20",
        },
    )
    load_fleet(write_fleet(home, f"s3://{stack.bucket}/{PREFIX}"))
    with stack.running():
        yield Faults(stack, S3Store(stack.bucket, PREFIX, stack.s3))


@pytest.fixture
def faults(installation: Faults) -> Iterator[Faults]:
    """The installation, healthy at the beginning and at the end."""
    yield installation
    heal(installation)


def heal(faults: Faults) -> None:
    """Start what has ended, and end what still runs."""
    stack = faults.stack
    if faults.refused():
        stack.end_part("s3")
    for part in ("s3", "postgres", *AIRFLOW_PARTS):
        process = stack.processes.get(part)
        if process is None or process.poll() is not None:
            stack.start_part(part)
    stack.wait_for_all()
    write_fleet(stack.home, faults.store.url)
    for dag in (SWEEP, NIGHTLY):
        for item in stack.api("GET", f"/dags/{dag}/dagRuns", params={"limit": 100}).json()["dag_runs"]:
            run = Run(faults, dag, item["dag_run_id"])
            if item["state"] not in ENDED:
                run.set_state("failed")
                run.state()
    for state in faults.servers():  # a test that failed must not fail the next one
        servers.stop(state.handle)
    for accelerator in faults.leases():
        (stack.home / "state" / "leases" / f"{accelerator}.json").unlink()
