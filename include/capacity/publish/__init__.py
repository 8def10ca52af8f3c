"""Publication: an immutable folder per run, and single objects in ``latest/`` that gateways read."""
