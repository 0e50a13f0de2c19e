"""Scheduled retraining: choose new data, decide on what was trained, keep lineage and pointer."""
