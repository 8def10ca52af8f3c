"""The Capacity page in Airflow's UI: the current limits, their trend, and the way to their evidence."""
