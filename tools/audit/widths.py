"""Trains one decoder at several widths, in one process: what coordinate_check measures."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

#: Width of a head at every width, of the feed-forward over that of the residual stream, and bytes of text that are read at most.
HEAD_WIDTH, FEED_FORWARD, TEXT = 16, 4, 8_000_000
#: Kinds of activations, in the order of the forward pass; those of blocks are measured over all blocks. Without experts there is no router.
KINDS = ("embedding", "queries", "attention", "router", "feed-forward", "residual stream", "final norm", "logits")
#: Kinds whose initial values vanish with the width in muP: only their change counts.
VANISHING = ("router", "logits")


def settings(model: str, width: int, base: int, parametrization: str, lr: float, seed: int, steps: int, sequences: int) -> list[str]:
    """Return the model and the training of a width, with a warm-up over a tenth of the steps.

    Args:
        model: a small one with muP.
        width: model.hidden.
        base: width of the base model.
        parametrization: standard or mup.
        lr: optimizer.lr.
        seed: of the initial weights, and of the samples.
        steps: optimizer steps.
        sequences: of 64 bytes in a batch.
    """
    heads = width // HEAD_WIDTH
    sizes = (f"model.hidden={width}", f"model.heads={heads}", f"model.kv_heads={heads}", f"model.ffn_hidden={FEED_FORWARD * width}")
    mup = (f"model.parametrization={parametrization}", *((f"model.mup_base_width={base}",) if parametrization == "mup" else ()))
    text = ("model.layers=2", "model.vocab_size=256", "model.max_positions=64", "training.sequence_length=64")
    batch = (
        f"training.global_batch_size={sequences}",
        f"training.micro_batch_size={sequences}",
        f"training.steps={steps}",
        f"training.seed={seed}",
    )
    rate = (f"optimizer.lr={lr}", f"optimizer.warmup_steps={max(1, steps // 10)}")
    return ["stage=pretrain", f"model={model}", "precision=fp32", "parallel.zero_stage=0", *sizes, *mup, *text, *batch, *rate]


@cache
def text() -> Tensor:
    """The sources of Python's standard library, one after the other, as bytes: int64 (bytes,)."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found += path.read_bytes()
    return torch.frombuffer(found[:TEXT], dtype=torch.uint8).long()


def batches(config: Any, *, held_out: bool = False) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield global batches without end: random windows of the first nine tenths of the text, or of the last one."""
    generator = torch.Generator().manual_seed(config.training.seed)
    bytes_of, length = text(), config.training.sequence_length
    border = len(bytes_of) * 9 // 10
    first, last = (border, len(bytes_of)) if held_out else (0, border)
    while True:
        starts = torch.randint(first, last - length, (config.training.global_batch_size, 1), generator=generator)
        windows = bytes_of[starts + torch.arange(length + 1)]
        yield windows[:, :-1], {"targets": windows[:, 1:]}


def build(config: Any) -> Any:
    """Return the trainer of a configuration on a CPU, in the process group of one rank."""
    from pipeline.config.layout import Layout
    from pipeline.parallel import mesh as meshes
    from pipeline.training.trainer import Trainer

    return Trainer(config, meshes.build_mesh(Layout.of(config, 1), torch.device("cpu")))


def coordinates(config: Any, steps: int) -> list[dict[str, Tensor]]:
    """Train on one batch, and return its activations before the first step and after each step: kind -> values, flat.

    One batch, as in get_coord_data of the package mup (github.com/microsoft/mup, with fix_data=True).
    """
    trainer = build(config)
    model = next(trainer.model.stage_modules())
    tokens, batch = next(batches(config))
    found = [_activations(model, tokens)]
    for _ in range(steps):
        trainer.train(tokens, batch)
        found.append(_activations(model, tokens))
    return found


@torch.no_grad()
def _activations(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """The outputs of a forward pass by kind, flat; those of all blocks one after the other."""
    kept: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}

    def keep(kind: str) -> Callable[..., None]:
        return lambda _module, _inputs, output: kept[kind].append((output.logits if kind == "router" else output).flatten().clone())

    modules: list[tuple[str, nn.Module]] = [("embedding", model.embed), ("final norm", model.norm), ("logits", model.head)]
    for block in model.blocks.values():
        modules += [("queries", block.attention.query), ("attention", block.attention), ("feed-forward", block.mlp)]
        modules += [("router", block.mlp.router)] if hasattr(block.mlp, "router") else []
        modules.append(("residual stream", block))
    hooks = [module.register_forward_hook(keep(kind)) for kind, module in modules]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return {kind: torch.cat(values) for kind, values in kept.items() if values}


def final_loss(config: Any, steps: int) -> float:
    """Train, and return the loss of four held-out batches, nats per byte; infinite if the training diverges."""
    trainer = build(config)
    for _, (tokens, batch) in zip(range(steps), batches(config), strict=False):
        loss, _ = trainer.train(tokens, batch)
        if not math.isfinite(float(loss)):
            return math.inf
    total = count = 0.0
    for _, (tokens, batch) in zip(range(4), batches(config, held_out=True), strict=False):
        losses, targets = trainer.evaluate(tokens, batch)
        total, count = total + float(losses.sum()), count + float(targets.sum())
    return total / count


def slope(widths: list[int], values: list[float]) -> float:
    """Return the slope of log value over log width, by least squares."""
    x, y = (torch.tensor(some, dtype=torch.float64).log() for some in (widths, values))
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / x.square().sum())


def best_rate(rates: list[float], losses: list[float]) -> float | None:
    """Return the rate with the smallest loss, by a parabola over log rate through the best rate and its neighbors.

    Returns:
        None if the best rate is the first or the last one: the minimum may be outside.
    """
    best = min(range(len(losses)), key=losses.__getitem__)
    if best in (0, len(losses) - 1):
        return None
    (x0, x1, x2), (y0, y1, y2) = map(math.log, rates[best - 1 : best + 2]), losses[best - 1 : best + 2]
    if not all(map(math.isfinite, (y0, y2))):
        return rates[best]
    above = (x1 - x0) ** 2 * (y1 - y2) - (x1 - x2) ** 2 * (y1 - y0)
    below = (x1 - x0) * (y1 - y2) - (x1 - x2) * (y1 - y0)
    return math.exp(x1 - above / (2 * below)) if below else rates[best]
