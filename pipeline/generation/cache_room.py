"""The memory of the KV cache: what a sequence takes of it, and the refusal of settings that do not fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipeline.common import host_memory
from pipeline.common.errors import UserError
from pipeline.config.stages import Generate
from pipeline.generation.pages import PAGE, SLACK
from pipeline.generation.runner import Runner
from pipeline.parallel import collectives
from pipeline.parallel.mesh import Mesh

#: Share of the free memory that the cache may take; the rest is for activations.
FREE_SHARE = 0.8


class CacheRoom:
    """What sequences take of the caches of a rank.

    With several ranks, a share is the largest one on all ranks: they have different layers and memories, and must decide alike.

    Args:
        runners: of the model, and of the draft model.
        max_positions: longest sequence, tokens.
        available: bytes for the caches of this rank.
        maximum: returns the elementwise maximum over all ranks.
    """

    def __init__(self, runners: Sequence[Runner], max_positions: int, available: float, maximum: Callable[[Tensor], Tensor]) -> None:
        lengths = range(0, max_positions + PAGE, PAGE)
        sizes = [sum(runner.bytes_of(min(length, max_positions)) for runner in runners) * (1 + 1 / SLACK) for length in lengths]
        shares = [size / max(available, 1.0) for size in sizes]
        found = maximum(torch.tensor([*sizes, *shares], dtype=torch.float64, device=runners[0].device))
        self._bytes, self._shares = (part.tolist() for part in found.chunk(2))

    def share(self, length: int) -> float:
        """Return the share of the memory that a sequence of `length` tokens takes."""
        return float(self._shares[-(-length // PAGE)])

    def check(self, stage: Generate, rows: int, prompt: int, max_positions: int) -> None:
        """Refuse a batch that does not fit.

        Args:
            stage: the settings of the stage.
            rows: number of sequences.
            prompt: tokens of the longest prompt.
            max_positions: longest sequence, tokens.

        Raises:
            UserError: with the memory that is needed and the nearest setting that fits.
        """
        length = min(prompt + stage.max_tokens, max_positions)
        share = self.share(length)
        if rows * share <= 1:
            return
        needed = self._bytes[-(-length // PAGE)]
        rule = (
            f"{rows} sequences of up to {length:,} tokens (the longest prompt has {prompt:,}) need {rows * needed / 1e9:.3g} GB of KV "
            f"cache; {needed / share / 1e9:.3g} GB are available"
        )
        if share <= 1:
            raise UserError.of("stage.batch_size", stage.batch_size, rule, f"set stage.batch_size={math.floor(1 / share)}")
        fitting = PAGE * sum(each <= 1 for each in self._shares[1:]) - prompt
        if fitting >= 1:
            fix = f"set stage.batch_size=1 and stage.max_tokens={fitting}, or shard the model with parallel.tensor"
            raise UserError.of("stage.max_tokens", stage.max_tokens, rule, fix)
        raise UserError.of("stage.prompts", stage.prompts, rule, "shorten the longest prompt, or shard the model with parallel.tensor")


def of_mesh(stage: Generate, runners: Sequence[Runner], max_positions: int, mesh: Mesh, local_ranks: int) -> CacheRoom:
    """Return the room of the caches of a job, after the weights are loaded.

    Args:
        stage: the settings of the stage.
        runners: of the model, and of the draft model.
        max_positions: longest sequence, tokens.
        mesh: this rank's process groups.
        local_ranks: ranks that share the memory of this machine.
    """
    if stage.cache_gigabytes is not None:
        available = stage.cache_gigabytes * 1e9
    elif mesh.device.type == "cuda":
        available = FREE_SHARE * torch.cuda.mem_get_info(mesh.device)[0]
    else:
        available = FREE_SHARE * host_memory.available_bytes() / local_ranks

    def maximum(values: Tensor) -> Tensor:
        for group in mesh.all_ranks:
            values = collectives.all_reduce(values, group, "max")
        return values

    return CacheRoom(runners, max_positions, available, maximum)
