"""May this be used? Checks over the request table, the step table and the whole sweep."""

from include.capacity.quality.check import check_sweep, check_tables

__all__ = ["check_sweep", "check_tables"]
