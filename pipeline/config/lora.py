"""The configuration group of LoRA, with the names of PEFT; and which weights are adapters."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from pipeline.common.knobs import knob


@dataclass(frozen=True)
class LoraConfig:
    """LoRA (Hu et al. 2022): linear layers get adapters of low rank, which are trained instead of the weights."""

    rank: int = knob(0, "rank of the adapters; 0 trains the weights themselves", at_least=0, at_most=65536)
    alpha: float = knob(16.0, "the output of an adapter is scaled by alpha / rank", above=0, at_most=1e6)
    dropout: float = knob(0.0, "dropout rate of the inputs of the adapters", at_least=0, at_most=0.9)
    targets: list[str] = knob(
        ["blocks.*.attention.*", "blocks.*.mlp.*"],
        "patterns of names of linear layers that get an adapter; matrices of routed experts, such as blocks.0.mlp.experts.up, get one "
        "only by a pattern with the word experts",
    )
    rank_pattern: dict[str, int] = knob(
        {}, "pattern of names -> another rank for these layers; 0 for no adapter", at_least=0, at_most=65536
    )
    alpha_pattern: dict[str, float] = knob({}, "pattern of names -> another alpha for these layers", above=0)
    quantize: str = knob(
        "none",
        "weights of the linear layers of the blocks: in the dtype of the run, or in 4 bits with double quantization (nf4; QLoRA)",
        choices=("none", "nf4"),
    )
    modules_to_save: list[str] = knob(
        [], "patterns of names of modules whose weights are trained beside the adapters, such as embed.tokens or *norm"
    )
    adapter: str | None = knob(None, "folder of an adapter in PEFT's format to start from, instead of rank, alpha and targets")

    def rank_of(self, layer: str) -> int:
        """Return the rank of the adapter of a linear layer, or of a matrix of routed experts; 0 for none."""
        of_experts = ".experts." in layer
        if self.rank == 0 or not any(fnmatchcase(layer, target) and (not of_experts or "experts" in target) for target in self.targets):
            return 0
        return next((rank for pattern, rank in self.rank_pattern.items() if fnmatchcase(layer, pattern)), self.rank)

    def saves(self, weight: str) -> bool:
        """Whether a weight is trained beside the adapters; `weight` is its full name."""
        return self.rank > 0 and any(fnmatchcase(weight.rpartition(".")[0], pattern) for pattern in self.modules_to_save)

    def alpha_of(self, layer: str) -> float:
        """Return alpha of the adapter of a linear layer."""
        return next((alpha for pattern, alpha in self.alpha_pattern.items() if fnmatchcase(layer, pattern)), self.alpha)


#: In the names of an adapter's weights: those of LAYER are LAYER.lora.a and b, those of a matrix of experts EXPERTS.lora.MATRIX.a and b.
_INFIX = ".lora."
#: The two factors.
FACTORS = ("a", "b")


def is_adapter(name: str) -> bool:
    """Whether a weight is one of an adapter."""
    return _INFIX in name and factor_of(name) in FACTORS


def factor_of(name: str) -> str:
    """Return which factor a weight of an adapter is."""
    return name.rpartition(".")[2]


def layer_of(name: str) -> str:
    """Return the layer of an adapter's weight, or the matrix of experts."""
    module, _, part = name.rpartition(_INFIX)
    matrix = part.rpartition(".")[0]
    return f"{module}.{matrix}" if matrix else module
