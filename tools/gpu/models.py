"""Section models: a small model of every family, trained by the code of pretraining on the device, beside the plain loop on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pipeline.certification.certificate import beside_ranks
from pipeline.certification.comparison import Difference, Outcome, differences, zero_gradients
from pipeline.certification.conditioning import in_precision, with_small_updates
from pipeline.certification.layout_training import begin, train_in_layout
from pipeline.certification.reference import train_plain
from pipeline.certification.tolerances import compare_fp32, compare_low, largest_drift
from pipeline.config.schema import RunConfig
from tools.audit.family_cases import MODELS
from tools.gpu.rows import Row, Setup, guarded
from tools.jobs import configured, one_rank

QUICK_FAMILIES = ("llama", "mixtral", "t5")
#: Heads are wider than in tools/numerics, since FlexAttention on a GPU requires a width of 16; nothing is compiled, to save time.
WIDER = ("model.heads=4", "training.compile=off", "training.micro_batch_size=2")
#: Smallest tolerance in fp32 on a GPU, whose kernels not only add in another order but approximate exponentials and products.
GPU_FLOOR = 1e-4


def rows(setup: Setup) -> Iterator[Row]:
    with one_rank():
        for family in QUICK_FAMILIES if setup.quick else MODELS:
            for dtype in ("fp32", "bf16"):
                yield guarded(f"{family} {dtype}", check, setup, family, dtype)


def configuration(family: str, *, steps: int) -> RunConfig:
    return configured(*MODELS[family].overrides, *WIDER, f"training.steps={steps}")


def check(name: str, setup: Setup, family: str, dtype: str) -> Row:
    """Train a family in a dtype on the device and on the CPU."""
    torch._dynamo.reset()  # it compiles only eight masks of FlexAttention
    config = configuration(family, steps=2 if setup.quick else 4)
    if dtype == "fp32":
        tolerances, found = in_fp32(setup, config)
    else:
        tolerances, found = in_low_precision(with_small_updates(in_precision(config, dtype)), dtype)
    return worst(name, tolerances, found, f"{config.training.steps} steps")


def worst(name: str, tolerances: dict[str, float], found: dict[str, Difference], remark: str) -> Row:
    """Return the row of the quantity whose difference is largest in relation to its tolerance."""
    quantity = max(found, key=lambda each: found[each].value / tolerances[each] if tolerances[each] else found[each].value)
    text = f"relative difference of the {quantity} ({found[quantity].where}), {remark}"
    return Row.bounded(name, found[quantity].value, tolerances[quantity], text)


def in_fp32(setup: Setup, config: RunConfig) -> tuple[dict[str, float], dict[str, Difference]]:
    """Compare in fp32: tolerances as in certificates, on a GPU at least GPU_FLOOR."""
    reference, precise = train_plain(config), train_plain(config, torch.float64)
    return against(setup, config, reference, precise, train_in_layout(config, begin(config)))


def against(
    setup: Setup, config: RunConfig, reference: Outcome, precise: Outcome, run: Outcome
) -> tuple[dict[str, float], dict[str, Difference]]:
    """Compare a training in fp32 with the plain loop in fp32, whose rounding errors are those to its twin in fp64."""
    zero, drift = zero_gradients(precise), largest_drift(config)
    rounding = differences(reference, precise, zero=zero, drift=drift)
    compared = compare_fp32(run, reference, rounding, zero, drift)
    floor = GPU_FLOOR if setup.cuda else 0.0
    return {name: max(floor, tolerance) for name, tolerance in compared.tolerances.items()}, compared.differences


def in_low_precision(config: RunConfig, dtype: str) -> tuple[dict[str, float], dict[str, Difference]]:
    """Compare in 16 bits: tolerances from perturbed runs of the plain loop, as in certificates."""
    with beside_ranks(dtype, config) as running:
        assert running.runs is not None
        plain = running.runs.result()  # not beside the device: the switches of PyTorch's attention kernels hold for all threads
    run = train_in_layout(config, begin(config))
    compared = compare_low(dtype, run, plain.reference, plain.perturbed)
    return compared.tolerances, compared.differences
