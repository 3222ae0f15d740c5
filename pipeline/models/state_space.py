"""What families with Mamba-2 layers share: the fields of these layers, their initial values, and their tensors in Hugging Face classes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.common.knobs import knob
from pipeline.layers.recipes import Constant, Init, InverseSoftplus, LogOfUniform, scaled_residual
from pipeline.models.huggingface_mapping import StockTensor, tensors
from pipeline.models.shared_sizes import LayerPatternConfig

if TYPE_CHECKING:
    from pipeline.layers.mamba2 import Mamba2


@dataclass(frozen=True)
class StateSpaceConfig(LayerPatternConfig):
    """Fields of a decoder with Mamba-2 layers in some blocks."""

    mamba_heads: int = knob(128, "heads of a Mamba-2 layer", at_least=1)
    mamba_head_dim: int = knob(64, "width of a head of a Mamba-2 layer", at_least=1)
    mamba_state: int = knob(128, "width of the queries and keys of a Mamba-2 layer (the paper's C and B), its state dimension", at_least=1)
    mamba_kernel: int = knob(4, "tokens that the convolutions of a Mamba-2 layer read, with the present one", at_least=1)

    @property
    def linear_layers(self) -> int:
        """Number of layers with a recurrent state."""
        return len(self.blocks_of("M"))


def mamba(config: Any, groups: int, **options: Any) -> Mamba2:
    """Return a Mamba-2 layer of a StateSpaceConfig."""
    from pipeline.layers.mamba2 import Mamba2

    return Mamba2(
        config.hidden,
        config.mamba_heads,
        groups,
        head_dim=config.mamba_head_dim,
        state=config.mamba_state,
        kernel=config.mamba_kernel,
        eps=config.norm_eps,
        **options,
    )


def mamba_std(config: Any, name: str) -> Init:
    """Return the initial values of the weights of Mamba-2 layers by the authors' recipe, of others by GPT-2's."""
    if name.endswith("decay_rate_log"):
        return LogOfUniform(1.0, 16.0)
    if name.endswith("decay_bias"):
        return InverseSoftplus(0.001, 0.1)
    if name.endswith(("_conv_bias", "skip")):
        return Constant(1.0 if name.endswith("skip") else 0.0)
    return 1 / math.sqrt(3 * config.mamba_kernel) if name.endswith("_conv") else scaled_residual(config, name)


def mamba_tensors(mixer: str) -> tuple[StockTensor, ...]:
    """Return the tensors of a Mamba-2 layer, which is the stock module `mixer`."""
    ours, channels = "blocks.{i}.attention", ("value", "group_key", "group_query")
    return (
        *tensors(f"{mixer}.in_proj", *(f"{ours}.{name}" for name in ("gate", *channels, "decay"))),
        StockTensor(f"{mixer}.conv1d.weight", tuple(f"{ours}.{name}_conv" for name in channels)),
        StockTensor(f"{mixer}.conv1d.bias", tuple(f"{ours}.{name}_conv_bias" for name in channels)),
        StockTensor(f"{mixer}.dt_bias", (f"{ours}.decay_bias",)),
        StockTensor(f"{mixer}.A_log", (f"{ours}.decay_rate_log",)),
        StockTensor(f"{mixer}.D", (f"{ours}.skip",)),
        *tensors(f"{mixer}.norm", f"{ours}.group_norm"),
        *tensors(f"{mixer}.out_proj", f"{ours}.output"),
    )
