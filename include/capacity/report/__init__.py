"""The report: figures, computed conclusions, and one self-contained page per model and for the fleet."""
