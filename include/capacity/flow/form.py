"""The trigger forms: one Airflow Param per field of :class:`SweepParams` and :class:`ImportParams`.

A field that may stay blank then means "as the fleet file says". Airflow shows a pattern as it is when a value
does not match it, so patterns are loose and readable; the first task checks strictly, in words.
"""

from __future__ import annotations

from airflow.sdk import Param

from include.capacity.config import STORE_URL, Fleet
from include.capacity.flow.params import MOST_SECONDS_PER_STEP

CONCURRENCY_PATTERN = "^[0-9, ]*$"


def sweep_form(fleet: Fleet) -> dict[str, Param]:
    """The form's fields, in the order in which they are shown."""
    models, classes = sorted(fleet.models), sorted(fleet.classes)
    return {
        "models": Param(
            models[:1],
            type="array",
            items={"type": "string", "enum": models},
            examples=models,
            values_display={key: f"{key} ({model.served_name})" for key, model in fleet.models.items()},
            title="Models",
            description_md="Which models to sweep, one after another. None chosen: **all** of the fleet.",
        ),
        "classes": Param(
            classes,
            type="array",
            items={"type": "string", "enum": classes},
            examples=classes,
            title="Service classes",
            description_md="Each is swept with its own workload, because their limits differ. "
            "None chosen: **all** that a model has.",
        ),
        "mode": Param(
            "find",
            type="string",
            enum=["find", "exact"],
            values_display={
                "find": "Find: search for the limit and prove it",
                "exact": "Exact: measure the given steps only",
            },
            title="Mode",
            description_md="**Find** scouts upwards, narrows down and proves the limit on fresh requests. "
            "**Exact** measures each concurrency step as given, at proof size.",
        ),
        "concurrency": Param(
            "",
            type=["null", "string"],
            pattern=CONCURRENCY_PATTERN,
            examples=["1, 4, 8, 16, 32, 64", "8, 16, 32", "32"],
            title="Concurrency steps",
            description_md="Requests in flight: whole numbers separated by commas, such as `1, 4, 8, 16`. "
            "Blank: the ladder in the fleet file.",
        ),
        "repeats": Param(
            None,
            type=["null", "integer"],
            minimum=1,
            maximum=20,
            title="Repeats",
            description_md="How often each step is measured (mode **Exact**), 1 to 20. "
            "Three or more give an interval over runs. Blank: as the fleet file says.",
        ),
        "requests_per_step": Param(
            None,
            type=["null", "integer"],
            minimum=20,
            title="Requests per step",
            maximum=1_000_000,
            description_md="Size of a proof, at least 20; each step takes at least 10 x its concurrency as "
            f"well. Fewer than 600 seldom prove anything. Blank: {fleet.steps.prove_requests:,}.",
            section="Size of a step",
        ),
        "seconds_per_step": Param(
            None,
            type=["null", "number"],
            exclusiveMinimum=0,
            maximum=MOST_SECONDS_PER_STEP,
            title="Seconds per step",
            description_md="Shortest measured window, above 0, at most an hour. "
            f"Blank: {fleet.steps.min_window_s:g}.",
            section="Size of a step",
        ),
        "deadline_s": Param(
            None,
            type=["null", "number"],
            exclusiveMinimum=0,
            title="Deadline (s)",
            description_md="A request counts as completed only within this time, above 0. "
            f"Set it to your gateway's timeout. Blank: {_own(fleet, 'deadline_s')}.",
            section="Objectives",
        ),
        "ttft_objective_s": Param(
            None,
            type=["null", "number"],
            exclusiveMinimum=0,
            title="TTFT objective (s)",
            description_md="Within this time the first token must come, for the class's share of requests "
            f"(streamed classes only). Blank: {_own(fleet, 'ttft')}.",
            section="Objectives",
        ),
        "completion_floor": Param(
            None,
            type=["null", "number"],
            exclusiveMinimum=0,
            exclusiveMaximum=1,
            title="Completion floor",
            description_md="Share of attempted requests that must complete, above 0 and below 1, such as "
            f"`0.99`. Blank: {_own(fleet, 'completion_floor')}.",
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
            title="Path of the results",
            description_md="`s3://bucket/key` or `file:///path` (on the worker): a result file, or a folder "
            "of them. Format and version are told by content: vllm bench serve and sweep, guidellm, aiperf, "
            "InferenceMAX, and CSV whose column names carry units, such as ttft_p95_ms. Objects are read "
            f"through the connection {fleet.publish.connection}.",
        ),
        "publish_to": _publish_to(fleet),
    }


def _publish_to(fleet: Fleet) -> Param:
    return Param(
        "",
        type=["null", "string"],
        pattern=f"{STORE_URL}|^$",
        title="Publish to",
        description_md=f"`s3://bucket/prefix` or `file:///path`. Blank: `{fleet.publish.to}`, "
        "which the Capacity page reads.",
        section="Publication",
    )


def _promote(default: bool) -> Param:
    return Param(
        default,
        type="boolean",
        title="Promote",
        description_md="On: this run may move `latest/limits.json`, which gateways read; only limits of the "
        "fleet file's own classes do. Off: the results are published beside it.",
        section="Publication",
    )


def _own(fleet: Fleet, key: str) -> str:
    """What the fleet file's classes say: ``60 (interactive), 120 (batch)``; models may differ."""
    said = []
    for name, found in fleet.classes.items():
        value = getattr(found, key)
        if value is not None:
            said.append(f"{getattr(value, 'at_most_s', value):g} ({name})")
    return ", ".join(said) or "none"
