"""The ground floor: the tables, the step specification and the sweep directory."""
