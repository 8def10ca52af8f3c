"""Load: requests sent, measured and judged, one step at a time."""
