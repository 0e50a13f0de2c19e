"""Analysis: reports from a run's artifacts alone."""
