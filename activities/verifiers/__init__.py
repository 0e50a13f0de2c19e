"""Verifiers: scoring functions with three outcomes."""
