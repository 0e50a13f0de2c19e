"""The fleet: Ray actors of a run, found by name, rebuilt when dead."""

from workers.fleet.fleet import RayFleet

__all__ = ["RayFleet"]
