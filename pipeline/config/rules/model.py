"""Rules of the group model that every family has; those of a family are in its config.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields

from pipeline.common.errors import Violation
from pipeline.models.config import ModelConfig

#: Elements of the largest weight. PyTorch counts bytes in 63 bits.
LARGEST = 2**60


def violations(model: ModelConfig) -> Iterator[Violation]:
    """Yield the violated rules of the sizes: those of a family, and that PyTorch can count the bytes of a weight."""
    yield from model.violations()
    sizes = {item.name: getattr(model, item.name) for item in fields(model)}
    largest = sorted(((size, name) for name, size in sizes.items() if type(size) is int), reverse=True)[
        :3
    ]  # a weight has three dims at most
    if math.prod(size for size, _ in largest) > LARGEST:
        size, name = largest[0]
        yield Violation(f"model.{name}", size, "makes weights of more bytes than PyTorch can count", f"reduce model.{name}")
