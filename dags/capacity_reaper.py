"""An Airflow DAG. Every quarter of an hour: stop servers and break leases whose run is over."""

from include.capacity.flow.reaper_dag import reaper_dag

dag = reaper_dag()
