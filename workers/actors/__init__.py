"""Thin Ray shells, no algorithms."""
