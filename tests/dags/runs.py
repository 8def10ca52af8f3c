"""What the tests do inside Airflow, all in one process: importing it takes longer than most of that."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

ROOT = Path(__file__).parents[2]
PATIENCE_S = 240

T = TypeVar("T")


class Airflow:
    """Functions of this module, called in an Airflow of the environment ``env``, whose database it makes."""

    def __init__(self, env: Mapping[str, str]) -> None:
        with mock.patch.dict(os.environ, env, clear=True):
            self._process = multiprocessing.get_context("spawn").Pool(1)
        self._call({}, make_database)

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()

    def run(self, dag_id: str, *confs: Mapping[str, Any], **env: str) -> list[dict[str, Any]]:
        """Runs of a DAG with these parameters, one after another; ``env``: more variables."""
        return self._call(env, dag_runs, dag_id, confs)

    def import_errors(self, **env: str) -> list[str]:
        """What Airflow says of DAG files that cannot be imported."""
        return self._call(env, import_errors)

    def notifier_errors(self, cases: list[tuple[str, dict[str, Any]]]) -> list[str | None]:
        """What is said of notifiers with these names and arguments; None: nothing is wrong."""
        return self._call({}, notifier_errors, cases)

    def _call(self, env: Mapping[str, str], work: Callable[..., T], *arguments: Any) -> T:
        return self._process.apply_async(_with, (env, work, arguments)).get(PATIENCE_S)


def _with(env: Mapping[str, str], work: Callable[..., T], arguments: Sequence[Any]) -> T:
    with mock.patch.dict(os.environ, env):
        return work(*arguments)


def make_database() -> None:
    """An empty metadata database."""
    from airflow.utils.db import initdb

    initdb()


def dag_runs(dag_id: str, confs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each run's ``state``, its ``tasks`` (a mapped one with its index) and what its assets ``told``."""
    from airflow.dag_processing.dagbag import DagBag
    from airflow.models.asset import AssetEvent
    from airflow.utils.session import create_session

    dag = DagBag(str(ROOT / "dags")).dags[dag_id]
    found = []
    for conf in confs:
        with mock.patch("time.sleep", _impatient):
            run = dag.test(run_conf=dict(conf))
        with create_session() as session:
            events = session.query(AssetEvent).filter_by(source_run_id=run.run_id).all()
            told = [event.extra for event in events]
        tasks = {
            f"{ti.task_id}[{ti.map_index}]" if ti.map_index >= 0 else ti.task_id: str(ti.state)
            for ti in run.get_task_instances()
        }
        found.append({"state": str(run.state), "tasks": tasks, "told": told})
    return found


_sleep = time.sleep


def _impatient(seconds: float) -> None:
    """``DAG.test`` sleeps a second for each wave of tasks that others fail or skip; only that is cut."""
    from airflow.sdk import DAG

    _sleep(seconds / 20 if sys._getframe(1).f_code is DAG.test.__code__ else seconds)


def import_errors() -> list[str]:
    from airflow.dag_processing.dagbag import DagBag

    return list(DagBag(str(ROOT / "dags")).import_errors.values())


def notifier_errors(cases: list[tuple[str, dict[str, Any]]]) -> list[str | None]:
    from include.capacity.config import Notify
    from include.capacity.errors import ConfigError
    from include.capacity.flow.notify import notifier

    said: list[str | None] = []
    for name, arguments in cases:
        try:
            notifier(Notify(notifier=name, on=["run_failed"], arguments=arguments))
            said.append(None)
        except ConfigError as error:
            said.append(str(error))
    return said
