"""Links from tasks to the Capacity page: "Open report".

A link names a run and is no signed URL: the page signs when somebody clicks, so links do not expire. Airflow
calls ``get_link`` when the task has ended and keeps the answer as an XCom; without one no button shows.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlsplit

from airflow.sdk import BaseOperatorLink

URL_PREFIX = "/capacity"
UI_ROUTE = "/plugin/capacity"


def ui_path(path: str) -> str:
    """A path of the page on Airflow's server, which may live below a prefix."""
    return f"{_base()}{URL_PREFIX}{path}"


def framed_path(path: str) -> str:
    """The same inside Airflow's frame, beside its navigation."""
    return f"{_base()}{UI_ROUTE}{ui_path(path)}"


def report_path(report: str) -> str:
    """Where the page shows a report, given its key below the publish target."""
    return framed_path(f"/view/{quote(report)}")


def _base() -> str:
    from airflow.sdk.configuration import conf

    return urlsplit(conf.get("api", "base_url", fallback="") or "").path.rstrip("/")


class OpenReport(BaseOperatorLink):
    """On a publish task: the report of its run, as published."""

    name = "Open report"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002 - Airflow names it
        """The page that shows the report; blank if none was published where the page reads."""
        published = _returned(ti_key)
        if not isinstance(published, dict) or not published.get("report"):
            return ""
        return report_path(published["report"]) if _below(published["url"], "runs/") else ""


class OpenPublished(BaseOperatorLink):
    """On a report task, whose run is published later: the newest published report of that run."""

    name = "Open report"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002 - Airflow names it
        """The page that finds the report; blank if the run does not publish where the page reads."""
        url = _returned(ti_key)
        work = _below(url, "work/") if isinstance(url, str) else ""
        return framed_path(f"/newest/{quote(work)}") if work else ""


def _returned(ti_key: Any) -> Any:
    """What the task returned; None if it did not."""
    from airflow.sdk.execution_time.xcom import XCom

    return XCom.get_value(ti_key=ti_key, key="return_value")


def _below(url: str, folder: str) -> str:
    """What follows a folder of the fleet's publish target in ``url``; blank if it is not there."""
    from include.capacity.config import load_fleet
    from include.capacity.results.store import open_store

    base = f"{open_store(load_fleet().publish.to).url}/{folder}"
    return url.removeprefix(base) if url.startswith(base) else ""
