"""Finds how many requests may be in flight per model and service class, and proves it.

The package reads like the flow, and imports go one way, left to right::

    config ──▶ servers ──▶ load ──▶ results ──▶ quality ──▶ limits ──▶ report ──▶ publish

``results`` (the tables, the step specification, the sweep directory) is the ground floor that all
others read. ``flow`` strings the stages together for the command line and for Airflow.
"""

__version__ = "0.1.0"
