"""An Airflow DAG. Every night: find and publish the limits of all models in the fleet file."""

from include.capacity.config import load_fleet
from include.capacity.flow.dags import capacity_dag
from include.capacity.flow.form import nightly_form
from include.capacity.flow.runbook import NIGHTLY

dag = capacity_dag(
    "capacity_nightly",
    load_fleet(),
    scheduled=True,
    params=nightly_form(),
    description="Finds and publishes how many requests each model can have in flight, every night",
    doc_md=NIGHTLY,
)
