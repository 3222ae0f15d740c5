"""Which layers multiply 8-bit numbers, in the layout and in the plain loop."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn

from pipeline.certification.parts import PartReport
from pipeline.certification.reference import build_plain
from pipeline.config.schema import RunConfig
from pipeline.layers.experts import Experts
from pipeline.layers.fp8_products import FP8_PRODUCTS
from pipeline.parallel.parallelize import DTYPES
from pipeline.training.trainer import Trainer


def compare_fp8_layers(config: RunConfig, trainer: Trainer) -> PartReport:
    """Compare the names of the layers with 8-bit products on all stages with those of the plain model. Collective."""
    own = _names(trainer.model.stage_modules())
    gathered: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own)
    found = set().union(*gathered)
    expected = _names([build_plain(config, DTYPES[config.precision.dtype])])
    report = PartReport("precision", [f"{len(expected)} layers multiply 8-bit numbers, in the layout and in the plain loop"])
    report.failures += [f"{name} multiplies 8-bit numbers in the layout only" for name in sorted(found - expected)]
    report.failures += [f"{name} multiplies 8-bit numbers in the plain loop only" for name in sorted(expected - found)]
    return report


def _names(models: Iterable[nn.Module]) -> set[str]:
    """The names of the layers; a row-parallel layer, and experts on several ranks, are inside of a module that has their name."""
    return {
        name.removesuffix(".linear").replace(".experts.experts", ".experts")
        for model in models
        for name, module in model.named_modules()
        if type(module).__name__ == "Float8Linear" or (isinstance(module, Experts) and module.products is FP8_PRODUCTS)
    }
