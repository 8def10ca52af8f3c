"""The DAGs as Airflow reads them: thin, documented, and shaped so that a server cannot leak."""

from __future__ import annotations

import pytest

LOOK = """
import json, sys
from airflow.dag_processing.dagbag import DagBag
bag = DagBag("dags")
dags = {}
for dag in bag.dags.values():
    dags[dag.dag_id] = {
        "owner": dag.owner, "tags": sorted(dag.tags), "doc": dag.doc_md, "description": dag.description,
        "max_active_runs": dag.max_active_runs, "paused": dag.is_paused_upon_creation, "catchup": dag.catchup,
        "schedule": type(dag.timetable).__name__, "params": sorted(dag.params),
        "leaves": [task.task_id for task in dag.leaves],
        "tasks": {
            task.task_id: {
                "up": sorted(task.upstream_task_ids), "setup": task.is_setup, "teardown": task.is_teardown,
                "mapped": task.is_mapped, "retries": getattr(task, "retries", 0),
                "at_once": task.max_active_tis_per_dagrun,
                "limit_s": task.execution_timeout.total_seconds() if task.execution_timeout else None,
                "fails_run": bool(getattr(task, "on_failure_fail_dagrun", False)),
                "doc": task.python_callable.__doc__,
                "links": [link.name for link in task.operator_extra_links],
            }
            for task in dag.tasks
        },
    }
print(json.dumps({"errors": bag.import_errors, "dags": dags}))
"""
IMPORTED = """
import json, sys
before = set(sys.modules)
import airflow.sdk
already = set(sys.modules)
import importlib.util
for name in ("capacity_import", "capacity_nightly", "capacity_reaper", "capacity_sweep"):
    spec = importlib.util.spec_from_file_location(name, f"dags/{name}.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
heavy = {"pandas", "numpy", "scipy", "matplotlib", "great_expectations", "boto3", "pyarrow", "kneed"}
print(json.dumps(sorted(heavy & (set(sys.modules) - already))))
"""

SWEEPS = ("capacity_nightly", "capacity_sweep")
REPORTING = ("report", "fleet_report", "publish")


@pytest.fixture(scope="module")
def bag(in_airflow):
    return in_airflow(LOOK)


def test_dags_import_without_an_error(bag) -> None:
    assert bag["errors"] == {}
    assert sorted(bag["dags"]) == ["capacity_import", "capacity_nightly", "capacity_reaper", "capacity_sweep"]


def test_reading_a_dag_file_imports_nothing_heavy(in_airflow) -> None:
    assert in_airflow(IMPORTED) == []


def test_every_dag_has_owner_tags_and_a_run_book(bag) -> None:
    for dag in bag["dags"].values():
        assert dag["owner"] == "capacity"
        assert "capacity" in dag["tags"]
        assert dag["description"]
        for part in ("What the tasks do", "What the colour means", "When it is red"):
            assert part in dag["doc"]
        assert all(task["doc"] for task in dag["tasks"].values())


def test_nightly_is_off_until_enabled_and_never_catches_up(bag) -> None:
    nightly, sweep = (bag["dags"][name] for name in SWEEPS)
    assert nightly["paused"] is True
    assert nightly["catchup"] is False
    assert nightly["schedule"] == "CronTriggerTimetable"
    assert sweep["schedule"] == "NullTimetable"
    assert (nightly["max_active_runs"], sweep["max_active_runs"]) == (1, 1)


def test_each_model_has_a_group_from_lease_to_report(bag) -> None:
    tasks = bag["dags"]["capacity_nightly"]["tasks"]
    for model in ("steady", "sprinter"):
        assert tasks[f"{model}.lease"]["setup"]
        assert tasks[f"{model}.start_server"]["setup"]
        stop = tasks[f"{model}.stop_server"]
        assert stop["teardown"]
        assert stop["fails_run"]
        assert {f"{model}.lease", f"{model}.start_server"} <= set(stop["up"])
        for name in ("ladder", "refine", "prove", "anchor"):
            step = tasks[f"{model}.{name}"]
            assert step["mapped"]
            assert step["at_once"] == 1  # never two steps on one accelerator
            assert step["retries"] == 0  # a retry would break the order; steps retry inside
            # a slow server's proof (an hour), its warm-up, last answers, and a server to bring back
            assert step["limit_s"] > 3600 + 120 + 2 * 120 + 60
        # Judging does not wait for the teardown, nor the teardown for judging.
        assert tasks[f"{model}.validate"]["up"] == [f"{model}.anchor"]
    assert not any("sprinter" in up for up in tasks["steady.plan"]["up"])


def test_check_run_is_the_only_leaf_and_sees_every_end(bag) -> None:
    for name in SWEEPS:
        dag = bag["dags"][name]
        assert dag["leaves"] == ["check_run"]
        assert set(dag["tasks"]["check_run"]["up"]) == {
            "publish",
            "steady.stop_server",
            "sprinter.stop_server",
        }


def test_an_import_is_one_chain_whose_end_makes_its_colour(bag) -> None:
    dag = bag["dags"]["capacity_import"]
    assert dag["schedule"] == "NullTimetable"
    assert {name: task["up"] for name, task in dag["tasks"].items()} == {
        "read": [],
        "validate": ["read"],
        "limits": ["validate"],
        "report": ["limits"],
        "publish": ["report"],
    }


def test_the_reaper_is_on_from_the_start_and_comes_every_quarter_of_an_hour(bag) -> None:
    dag = bag["dags"]["capacity_reaper"]
    assert (dag["paused"], dag["catchup"], dag["schedule"]) == (False, False, "CronTriggerTimetable")
    assert (dag["leaves"], dag["params"]) == (["reap"], ["dry_run"])


def test_every_task_ends_by_itself(bag) -> None:
    for dag in bag["dags"].values():
        unlimited = [
            name for name, task in dag["tasks"].items() if task["limit_s"] is None and "lease" not in name
        ]
        assert unlimited == []


def test_form_offers_what_a_sweep_can_be_asked(bag) -> None:
    assert bag["dags"]["capacity_sweep"]["params"] == [
        "classes",
        "completion_floor",
        "concurrency",
        "deadline_s",
        "mode",
        "models",
        "promote",
        "publish_to",
        "repeats",
        "requests_per_step",
        "seconds_per_step",
        "ttft_objective_s",
    ]
    assert bag["dags"]["capacity_nightly"]["params"] == ["promote"]


def test_form_and_parameters_name_the_same_fields(bag) -> None:
    from include.capacity.flow.imports import ImportParams
    from include.capacity.flow.params import SweepParams

    assert set(bag["dags"]["capacity_sweep"]["params"]) == set(SweepParams.model_fields)
    assert set(bag["dags"]["capacity_import"]["params"]) == set(ImportParams.model_fields)


LINKS = """
import json
from include.capacity.config import load_fleet
from include.capacity.flow import links
to, answers = load_fleet().publish.to, {}
for name, link, returned in (
    ("published", links.OpenReport(), {"report": "runs/a/2/report.html", "url": f"{to}/runs/a/2"}),
    ("without report", links.OpenReport(), {"report": None, "url": f"{to}/runs/a/2"}),
    ("elsewhere", links.OpenReport(), {"report": "runs/a/2/report.html", "url": f"{to}-b/runs/a/2"}),
    ("never returned", links.OpenReport(), None),
    ("model", links.OpenPublished(), f"{to}/work/a/steady"),
    ("model elsewhere", links.OpenPublished(), "file:///elsewhere/work/a/steady"),
    ("model never returned", links.OpenPublished(), None),
):
    links._returned = lambda key: returned
    answers[name] = link.get_link(None, ti_key=None)
print(json.dumps(answers))
"""


def test_links_lead_to_the_page_or_nowhere(in_airflow) -> None:
    assert in_airflow(LINKS, AIRFLOW__API__BASE_URL="https://example.com/airflow/") == {
        "published": "/airflow/plugin/capacity/airflow/capacity/view/runs/a/2/report.html",
        "without report": "",
        "elsewhere": "",
        "never returned": "",
        "model": "/airflow/plugin/capacity/airflow/capacity/newest/a/steady",
        "model elsewhere": "",
        "model never returned": "",
    }


def test_reports_open_from_the_tasks_that_write_and_publish_them(bag) -> None:
    for name, dag in bag["dags"].items():
        linked = {task_id for task_id, task in dag["tasks"].items() if task["links"] == ["Open report"]}
        writing = {task_id for task_id in dag["tasks"] if task_id.rpartition(".")[2] in REPORTING}
        assert linked == writing, name


PLUGIN = """
import json, sys
import airflow.plugins_manager, airflow.sdk
before = set(sys.modules)
sys.path.insert(0, "plugins")
import capacity_plugin
plugin = capacity_plugin.CapacityPlugin
heavy = {"fastapi", "jinja2", "pandas", "numpy", "boto3", "botocore", "pyarrow", "jsonschema"}
print(json.dumps({
    "heavy": sorted(heavy & (set(sys.modules) - before)), "new": len(set(sys.modules) - before),
    "apps": [(app["name"], app["url_prefix"]) for app in plugin.fastapi_apps],
    "views": [(view["name"], view["href"], view["destination"]) for view in plugin.external_views],
}))
"""


def test_the_plugin_loads_nothing_heavy(in_airflow) -> None:
    found = in_airflow(PLUGIN, AIRFLOW__API__BASE_URL="https://example.com/airflow/")
    assert found["heavy"] == []
    assert found["new"] < 30
    assert found["apps"] == [["Capacity", "/capacity"]]
    assert found["views"] == [["Capacity", "/airflow/capacity/", "nav"]]


QUEUES = """
import json
from airflow.dag_processing.dagbag import DagBag
bag = DagBag("dags")
wanted = ("capacity_sweep", "capacity_reaper")
print(json.dumps({dag: {task.task_id: task.queue for task in bag.dags[dag].tasks} for dag in wanted}))
"""


def test_what_uses_an_accelerator_runs_on_its_queue_and_nothing_else_does(in_airflow) -> None:
    queues = in_airflow(QUEUES, CAPACITY_FLEET="deploy/fleet.compose.yaml")
    there = {
        task.removeprefix("steady.") for task, queue in queues["capacity_sweep"].items() if queue == "gpu"
    }
    there = {task for task in there if not task.startswith("sprinter.")}
    assert there == {"lease", "start_server", "ladder", "refine", "prove", "anchor", "stop_server"}
    assert queues["capacity_sweep"]["steady.plan"] == queues["capacity_sweep"]["publish"] == "default"
    assert queues["capacity_reaper"] == {"reap_gpu": "gpu"}
