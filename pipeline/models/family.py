"""What a model family consists of, as one object. `registry.py` lists the families. Importing it loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeline.layers.recipes import Init
from pipeline.models.config import ModelConfig
from pipeline.models.huggingface_mapping import HuggingFaceMapping
from pipeline.models.tensor_parallel_roles import ROLES

if TYPE_CHECKING:
    from pipeline.layers.stack import Stack
    from pipeline.models.costs import Costs

#: What `build` returns. A string, so that the families' files load no torch.
Model: TypeAlias = "Stack"


def tied_head(config: ModelConfig) -> dict[str, str]:
    """Return the tied weights of a model whose output head is one matrix: `tied_weights` of most families."""
    return {"head.weight": "embed.tokens.weight"} if config.tie_embeddings else {}


def tied_output(config: ModelConfig) -> dict[str, str]:
    """Return the tied weights of a model whose head has further layers: `tied_weights` of masked language models."""
    return {"head.output.weight": "embed.tokens.weight"} if config.tie_embeddings else {}


@dataclass(frozen=True)
class Family:
    """A model family. Functions of a configuration receive an instance of `config`.

    Attributes:
        config: its configuration dataclass.
        build: configuration -> the full model with uninitialized weights on torch's default device (meta included).
        initial_std: (configuration, name of a weight) -> the standard deviation of its initial values, or another Init.
        tensor_parallel: the roles of its weights (models/tensor_parallel_roles.py).
        huggingface: its mappings, one for each Hugging Face class.
        tied_weights: configuration -> name of a weight of the last pipeline stage -> name of the weight of the first stage it is tied to.
        on_every_stage: patterns (fnmatch) of the weights that every pipeline stage holds.
        rate: (configuration, name of a weight) -> its learning rate as a factor of optimizer.lr; weight decay is divided by it.
        counted: the results of costs_per_token.
    """

    config: type[Any]
    build: Callable[[Any], Stack]
    initial_std: Callable[[Any, str], Init]
    huggingface: tuple[HuggingFaceMapping, ...]
    tensor_parallel: dict[str, str] = field(default_factory=lambda: ROLES)
    tied_weights: Callable[[Any], dict[str, str]] = tied_head
    on_every_stage: tuple[str, ...] = ()
    rate: Callable[[Any, str], float] = lambda _config, _name: 1.0
    counted: dict[tuple[str, int, int | None], Costs] = field(default_factory=dict, init=False, repr=False, compare=False)

    def costs_per_token(self, config: ModelConfig, sequence_length: int, decoder_length: int | None = None) -> Costs:
        """Count FLOPs as Chowdhery et al. 2022 (PaLM, appendix B) do for MFU.

        6 FLOPs per weight of a matrix product (including the output head, excluding the embedding lookup; of an MoE layer, only the
        experts that a token is routed to), and 12 * layers * hidden * sequence for the attention products, not halved for causality. In a
        layer with sliding-window attention, the window, in an encoder that on both sides, replaces the sequence length; where values are
        narrower than queries and keys, both widths count. An MTP module counts as a layer with an output head, and linear attention as its
        recurrence: three products of a state and a vector for each token and value head. Recomputation is not counted. For an
        encoder-decoder, the result is per encoder token; each comes with `decoder_length / sequence_length` decoder tokens (one when None).
        """
        import torch

        from pipeline.models.costs import costs_per_token

        key = repr(config), sequence_length, decoder_length  # a search asks for each of its layouts
        if key not in self.counted:
            with torch.device("meta"):
                model = self.build(config)
            self.counted[key] = costs_per_token(model, config, sequence_length, decoder_length)
        return self.counted[key]
