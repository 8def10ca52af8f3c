"""The Airflow plugin: the Capacity page, and quick tasks.

Importing pandas, SciPy, the AWS hook and Great Expectations takes longer than most of our tasks. With
``CAPACITY_PRELOAD=1`` the scheduler imports them once before the LocalExecutor forks its workers, and
every task inherits them. Without it nothing changes but the time.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys

from airflow.listeners import hookimpl
from airflow.plugins_manager import AirflowPlugin

from include.capacity.page.plugin import external_views, fastapi_apps

log = logging.getLogger(__name__)

PRELOADED = (
    "airflow.providers.amazon.aws.hooks.s3",
    "include.capacity.flow.tasks",
    "include.capacity.quality.suites",
    "include.capacity.report.build",
    "include.capacity.publish.publish",
)


class PreloadListener:
    """Imports what tasks need when a scheduler (not a task) starts."""

    @hookimpl
    def on_starting(self, component: object) -> None:
        """Called once by each Airflow job, and by each task before it runs.

        A job does not know its own type yet at this point, so the command line has to tell.
        """
        is_scheduler = type(component).__name__ == "Job" and "scheduler" in sys.argv
        if os.environ.get("CAPACITY_PRELOAD") != "1" or not is_scheduler:
            return
        for name in PRELOADED:
            importlib.import_module(name)
        log.info("preloaded %d modules", len(sys.modules))


class CapacityPlugin(AirflowPlugin):
    """Registers what this project adds to Airflow."""

    name = "capacity"
    # Airflow reads plain class attributes.
    listeners = [PreloadListener()]  # noqa: RUF012 - as said
    fastapi_apps = fastapi_apps()
    external_views = external_views()
