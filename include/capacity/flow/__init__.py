"""Strings the stages together, for the command line (``sweep``) and for Airflow (``tasks``, ``dags``)."""
