"""An Airflow DAG. On demand: judge other tools' result files and publish the report."""

from include.capacity.config import load_fleet
from include.capacity.flow.import_dag import import_dag

dag = import_dag(load_fleet())
