"""An Airflow DAG. On demand: sweep chosen models with chosen steps, from the UI's form."""

from include.capacity.config import load_fleet
from include.capacity.flow.dags import capacity_dag
from include.capacity.flow.form import sweep_form
from include.capacity.flow.runbook import SWEEP

fleet = load_fleet()

dag = capacity_dag(
    "capacity_sweep",
    fleet,
    scheduled=False,
    params=sweep_form(fleet),
    description="Sweeps chosen models with your own steps and objectives",
    doc_md=SWEEP,
)
