"""Python's garbage collector in an actor that lives for days."""

import gc


def freeze_living_objects() -> None:
    """Leave every object that lives now out of later searches for garbage.

    A full search walks all objects and stops the process meanwhile: 0.1 s for the 110,000 that
    the imports of a producer leave, 0.3 s for the 400,000 of a trainer. It comes whenever a fourth
    as many are new, so the samples of a few collections bring one about. Call it once, after the
    start.
    """
    gc.collect()
    gc.freeze()
