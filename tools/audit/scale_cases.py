"""The cases of tools/audit_scale and tools/audit_reading: released models in a sensible layout for a number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """A planned job.

    Attributes:
        model: a file of conf/model.
        ranks: world size.
        layout: sizes of the axes and the ZeRO stage, as settings of parallel.
        more: further settings.
    """

    model: str
    ranks: int
    layout: str
    more: tuple[str, ...] = ()

    def overrides(self) -> list[str]:
        """Return the settings as a command line. A global batch has 16 micro-batches of one sequence per data rank, 32 for zbv."""
        sizes = dict(word.split("=") for word in self.layout.split())
        model_ranks = int(sizes.get("tensor", 1)) * int(sizes.get("pipeline", 1)) * int(sizes.get("context", 1))
        batch = 2 * max(8, int(sizes.get("pipeline", 1))) * self.ranks // model_ranks
        return [
            f"model={self.model}",
            *(f"parallel.{word}" for word in self.layout.split()),
            "training.micro_batch_size=1",
            f"training.global_batch_size={batch}",
            "training.sequence_length=4096",
            *self.more,
        ]

    def compose(self) -> Any:
        from tools.jobs import configured

        return configured(*self.overrides(), ranks=self.ranks)


GPT3 = ("training.sequence_length=2048",)

CASES = (
    Case("llama3-70b", 64, "zero_stage=3"),
    Case("llama3-70b", 64, "tensor=8 pipeline=4 zero_stage=1"),
    Case("llama3-70b", 64, "tensor=8 zero_stage=3"),
    Case("llama3-70b", 1024, "tensor=8 pipeline=4 zero_stage=1"),
    Case("llama3-405b", 1024, "tensor=8 pipeline=16 zero_stage=1"),
    Case("llama3-405b", 16384, "tensor=8 pipeline=16 zero_stage=1"),
    Case("llama3-405b", 16384, "tensor=8 pipeline=16 context=4 zero_stage=2", ("training.sequence_length=8192",)),
    Case("gpt3-175b", 128, "tensor=8 pipeline=8 zero_stage=1", GPT3),
    Case("gpt3-175b", 1024, "tensor=8 pipeline=16 schedule=interleaved zero_stage=1", GPT3),
    Case("mixtral-8x22b", 64, "tensor=2 pipeline=4 expert=8 zero_stage=1"),
    Case("mixtral-8x22b", 1024, "tensor=2 pipeline=4 expert=8 zero_stage=1"),
    Case("deepseek-v3", 2048, "pipeline=16 expert=64 schedule=zbv zero_stage=1"),
    Case("deepseek-v3", 16384, "pipeline=16 expert=64 schedule=zbv zero_stage=1"),
)
