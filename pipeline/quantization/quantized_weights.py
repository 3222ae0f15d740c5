"""Quantized weights of a model: which ones, by tensors of the stock class, and the weights that they stand for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pipeline.checkpoint.weights import Weights
from pipeline.common.errors import UserError
from pipeline.layers.lora import linear_layers
from pipeline.layers.uniform_quantization import QuantizedMatrix, Scheme, quantize
from pipeline.models import registry
from pipeline.models.config import ModelConfig
from pipeline.models.stock_tensors import StockTensor


def quantized_layers(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the layers of a model that are quantized, the linear layers of its blocks: name -> (output, input)."""
    with torch.device("meta"):
        layers = dict(linear_layers(registry.build(config)))
    return {name: (layer.out_features, layer.in_features) for name, layer in layers.items() if name.startswith("blocks.")}


def quantized_rows(config: ModelConfig) -> list[StockTensor]:
    """Return the rows of the stock model whose tensors are quantized."""
    names = {f"{layer}.weight" for layer in quantized_layers(config)}
    return [row for row in registry.stock_tensors(config)[0] if row.names and names.issuperset(row.names)]


def check_model(config: ModelConfig, scheme: Scheme, kind: str) -> None:
    """Refuse a model that cannot be quantized.

    Raises:
        UserError: stock transformers has no linear layers for its weights, or a group size does not divide the inputs of a layer.
    """
    fix = "export it with stage.quantize=none"
    if config.objective != "causal":
        raise UserError.of("stage.quantize", kind, f"is supported for decoders; model.family={config.family} is not one", fix)
    if getattr(config, "experts", 0):
        rule = f"is not supported for MoE models (model.family={config.family}): stock transformers stacks the experts of a layer"
        raise UserError.of("stage.quantize", kind, rule, fix)
    if read := getattr(config, "beside_hidden_states", ""):
        rule = f"computes one block after the other from its input, and blocks of model.family={config.family} also read {read}"
        raise UserError.of("stage.quantize", kind, rule, fix)
    if any(row.transposed for row in quantized_rows(config)):
        rule = f"is not supported for model.family={config.family}: its stock class has Conv1D in place of linear layers"
        raise UserError.of("stage.quantize", kind, rule, fix)
    for layer, (_, inputs) in quantized_layers(config).items():
        if scheme.group and inputs % scheme.group:
            rule = f"must divide the {inputs} inputs of {layer}"
            raise UserError.of("stage.group_size", scheme.group, rule, "choose a common divisor of the inputs, such as 32")


class QuantizedWeights:
    """The weights of a checkpoint after quantization; it has the interface of a checkpoint, with the dequantized weights.

    Args:
        weights: the original weights.
        scheme: how matrices are quantized.
        dtype: dtype in which scales are stored.
        solved: name of a layer -> its quantized weight, where it is known already (GPTQ); others are rounded to nearest.
    """

    def __init__(
        self, weights: Weights, config: ModelConfig, scheme: Scheme, dtype: torch.dtype, solved: Mapping[str, QuantizedMatrix] | None = None
    ) -> None:
        self.scheme = scheme
        self._weights, self._dtype, self._solved = weights, dtype, solved or {}
        self._rows = {name: row for row in quantized_rows(config) for name in row.names}
        self._last: tuple[StockTensor, list[Tensor]] | None = None

    def quantized(self, row: StockTensor) -> QuantizedMatrix:
        """Return the quantized tensor of the stock model, for a row of quantized_rows."""
        layers = [name.removesuffix(".weight") for name in row.names]
        if all(layer in self._solved for layer in layers):
            parts = [self._solved[layer] for layer in layers]
            return QuantizedMatrix(*(row.to_hf([getattr(part, field) for part in parts]) for field in ("codes", "scale", "zero_point")))
        return quantize(row.to_hf([self._weights.tensor(name) for name in row.names]), self.scheme, self._dtype)

    def names(self) -> list[str]:
        """Names of all weights."""
        return list(self._weights.names())

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a weight."""
        return self._weights.shape(name)

    def tensor(self, name: str) -> Tensor:
        """Return a full weight, fp32, dequantized."""
        if (row := self._rows.get(name)) is None:
            return self._weights.tensor(name)
        if self._last is None or self._last[0] is not row:  # a tensor of the stock model may hold several of our weights
            self._last = row, row.from_hf(self.quantized(row).dequantize(), [self.shape(part) for part in row.names])
        return self._last[1][row.names.index(name)]
