"""Settings of the local installation's SQLite database, in a module that costs nothing to import."""

ARGUMENTS = {"timeout": 120}
"""Patience with its lock: on a busy machine the default of 5 s ends schedulers."""
