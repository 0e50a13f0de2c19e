"""Types of command line options that servers share."""

import argparse


def positive_int(text: str) -> int:
    """An integer of at least 1, else argparse's usage error."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def positive_seconds(text: str) -> float:
    """A duration above 0 s, else argparse's usage error."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0 seconds, got {text}")
    return value
