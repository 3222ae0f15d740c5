"""Python's garbage collection at fixed steps: one that begins by itself stops a single rank, and all others wait for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.training.callback import Callback, Step

#: Steps between two collections. A step leaves no tensor in a cycle of references (tests/training/test_garbage_collection.py).
EVERY = 50


class GarbageCollection(Callback):
    """Collects at every EVERY-th step, which is the same on all ranks."""

    def after_step(self, step: Step) -> None:
        """See Callback."""
        if step.state.step % EVERY == 0:
            gc.collect()


@contextmanager
def at_fixed_steps() -> Iterator[None]:
    """A context in which garbage is collected by GarbageCollection alone. What exists at its beginning is not looked at again."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()
