"""Checks of what a run needs, made before it starts."""
