"""The trigger forms: one Airflow Param per field of :class:`SweepParams` and :class:`ImportParams`.

A field that may stay blank then means "as the fleet file says".
"""

from __future__ import annotations

from airflow.sdk import Param

from include.capacity.config import STORE_URL, Fleet
from include.capacity.flow.params import MOST_SECONDS_PER_STEP

CONCURRENCY_PATTERN = r"^\s*(\d{1,6}\s*(,\s*\d{1,6}\s*)*)?$"


def sweep_form(fleet: Fleet) -> dict[str, Param]:
    """The form's fields, in the order in which they are shown."""
    models, classes = sorted(fleet.models), sorted(fleet.classes)
    return {
        "models": Param(
            models[:1],
            type="array",
            items={"type": "string", "enum": models},
            examples=models,
            title="Models",
            description_md="Which models to sweep. None chosen: **all** of the fleet.",
        ),
        "classes": Param(
            classes,
            type="array",
            items={"type": "string", "enum": classes},
            examples=classes,
            title="Service classes",
            description_md="Each class is swept with its own workload, because their limits differ.",
        ),
        "mode": Param(
            "find",
            type="string",
            enum=["find", "exact"],
            title="Mode",
            description_md="`find` searches for the limit and proves it on fresh requests; "
            "`exact` measures the given steps, nothing else.",
        ),
        "concurrency": Param(
            "",
            type=["null", "string"],
            pattern=CONCURRENCY_PATTERN,
            title="Concurrency steps",
            description_md="Requests in flight, separated by commas, such as `1, 4, 8, 16`. "
            "Blank: the ladder in the fleet file.",
        ),
        "repeats": Param(
            None,
            type=["null", "integer"],
            minimum=1,
            maximum=20,
            title="Repeats",
            description_md="Runs of each step (mode `exact`). Three or more give an interval over runs.",
        ),
        "requests_per_step": Param(
            None,
            type=["null", "integer"],
            minimum=20,
            title="Requests per step",
            description_md="Proof size; each step takes at least 10 x its concurrency as well. "
            "Fewer than 600 seldom prove anything.",
            section="Size of a step",
        ),
        "seconds_per_step": Param(
            None,
            type=["null", "number"],
            exclusiveMinimum=0,
            maximum=MOST_SECONDS_PER_STEP,
            title="Seconds per step",
            description_md="Shortest measured window, at most an hour.",
            section="Size of a step",
        ),
        "deadline_s": Param(
            None,
            type=["null", "number"],
            exclusiveMinimum=0,
            title="Deadline (s)",
            description_md="A request counts as completed only within this time. "
            "Set it to your gateway's timeout.",
            section="Objectives",
        ),
        "ttft_objective_s": Param(
            None,
            type=["null", "number"],
            exclusiveMinimum=0,
            title="TTFT objective (s)",
            description_md="Time to first token that the class's share of requests must keep "
            "(streamed classes).",
            section="Objectives",
        ),
        "completion_floor": Param(
            None,
            type=["null", "number"],
            exclusiveMinimum=0,
            exclusiveMaximum=1,
            title="Completion floor",
            description_md="Share of attempted requests that must complete, such as `0.99`.",
            section="Objectives",
        ),
        "publish_to": _publish_to(fleet),
        "promote": _promote(False),
    }


def nightly_form() -> dict[str, Param]:
    """The nightly run has one choice: it moves ``latest/`` unless told not to."""
    return {"promote": _promote(True)}


def import_form(fleet: Fleet) -> dict[str, Param]:
    """What to read and where the report goes; an import has no `promote`: it never moves ``latest/``."""
    return {
        "path": Param(
            type="string",
            pattern=STORE_URL,
            title="Path",
            description_md="`s3://bucket/key` or `file:///path` (on the worker): a result file, or a folder "
            "of them. Read are `vllm bench serve` and `sweep`, guidellm, aiperf, InferenceMAX, and CSV whose "
            "column names carry units.",
        ),
        "publish_to": _publish_to(fleet),
    }


def _publish_to(fleet: Fleet) -> Param:
    return Param(
        "",
        type=["null", "string"],
        title="Publish to",
        description_md=f"`s3://bucket/prefix` or `file:///path`. Blank: `{fleet.publish.to}`.",
        section="Publication",
    )


def _promote(default: bool) -> Param:
    return Param(
        default,
        type="boolean",
        title="Promote",
        description_md="Let this run move `latest/limits.json`, which gateways read. "
        "Only limits of the fleet file's own classes move it.",
        section="Publication",
    )
