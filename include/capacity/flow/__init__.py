"""Strings the stages together: for the command line (``cli``, ``sweep``) and for Airflow (``tasks``, ``dags``)."""
