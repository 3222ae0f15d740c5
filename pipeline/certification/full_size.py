"""Part "shapes", what small sizes do not reach: the learning rate of every step, and the rotary angles of all positions of the job."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from pipeline.certification.plain_rate import plain_rate
from pipeline.config.schema import RunConfig
from pipeline.layers.rotary import Rotary
from pipeline.models import registry
from pipeline.training.lr_schedule import learning_rate

#: Of a longer run, so many steps are compared, in equal distances; and positions of a long context.
MOST = 10_000
#: Largest difference of two rates, relative to optimizer.lr.
RATE_TOLERANCE = 1e-9


def wrong_rates(config: RunConfig) -> Iterator[str]:
    """Yield the first step whose learning rate is not that of the second implementation."""
    steps, optimizer = config.training.steps, config.optimizer
    for step in (*range(0, steps, math.ceil(steps / MOST)), steps - 1):
        found, expected = learning_rate(step, optimizer, config.training), plain_rate(step, optimizer, config.training)
        if not abs(found - expected) <= RATE_TOLERANCE * optimizer.lr:
            yield f"the learning rate of step {step + 1} is {found:.6g}, by the formula of {optimizer.schedule} {expected:.6g}"
            return


def wrong_rotations(config: RunConfig) -> Iterator[str]:
    """Yield tables of rotary embeddings whose angles do not grow in proportion to the position."""
    with torch.device("meta"):
        model = registry.build(config.model)
    for name, module in model.named_modules():
        if not isinstance(module, Rotary):
            continue
        module.compute_buffers(torch.device("cpu"))
        rows = min(len(module.cos), config.training.sequence_length)
        positions = torch.arange(0, rows, math.ceil(rows / MOST))
        half = module.head_dim // 2
        cos, sin = module.cos[positions, half:].double(), module.sin[positions, half:].double()
        angle, size = torch.atan2(module.sin[1, half:], module.cos[1, half:]).double(), torch.hypot(module.cos[1], module.sin[1])[half:]
        angles = positions[:, None] * angle
        error = torch.hypot(cos - size * angles.cos(), sin - size * angles.sin())
        # The angle of position 1 is read from numbers in fp32, and its error grows with the position.
        wrong = (error > 1e-4 + 4 * torch.finfo(torch.float32).eps * angles.abs()).any(dim=1)
        if bool(wrong.any()):
            first = int(wrong.int().argmax())
            yield f"{name}: the rotation of position {positions[first]} is not {positions[first]} times that of position 1"
