"""Tracking: the local JSONL is the truth, everything else is a copy."""
