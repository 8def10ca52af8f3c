"""An Airflow DAG. Every quarter of an hour: stop servers and break leases whose run is over."""

from include.capacity.config import load_fleet
from include.capacity.flow.reaper_dag import reaper_dag

dag = reaper_dag(load_fleet())
