"""Benchmarks: what they print are shares and ratios, measured in one run; tests never time anything."""
