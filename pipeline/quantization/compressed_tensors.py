"""The format of the package compressed-tensors, which stock transformers and vLLM load."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.common.errors import UserError
from pipeline.layers.uniform_quantization import Scheme
from pipeline.models import registry
from pipeline.models.config import ModelConfig
from pipeline.models.stock_tensors import Shape, StockTensor
from pipeline.quantization.quantized_weights import QuantizedWeights, quantized_rows


class QuantizedTensors:
    """The tensors in which an export stores quantized weights; see huggingface_export.Packing.

    Args:
        weights: the quantized weights.
        dynamic: inputs are quantized, too: codes are stored as int8, not packed into int32.
        dtype: dtype of the scales.

    Attributes:
        stored_bytes: of the quantized tensors that have been returned.
    """

    def __init__(self, weights: QuantizedWeights, config: ModelConfig, *, dynamic: bool, dtype: torch.dtype) -> None:
        self.stored_bytes = 0
        self._weights, self._dynamic, self._dtype = weights, dynamic, dtype
        self._names = {row.hf_name for row in quantized_rows(config)}

    def size(self, row: StockTensor, shape: Shape) -> int | None:
        """Bytes of a quantized tensor, about; None for a tensor that is not quantized."""
        if row.hf_name not in self._names:
            return None
        scheme, (outputs, inputs) = self._weights.scheme, shape
        scales = 1 if scheme.per_tensor else outputs * inputs // (scheme.group or inputs)
        return outputs * inputs * scheme.bits // 8 + scales * self._dtype.itemsize

    def tensors(self, row: StockTensor) -> dict[str, Tensor] | None:
        """Names and values that are stored for a tensor of the stock model; None if it is not quantized."""
        if row.hf_name not in self._names:
            return None
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

        scheme, value = self._weights.scheme, self._weights.quantized(row)
        scale, zero_point = (part.flatten() if scheme.per_tensor else part for part in (value.scale, value.zero_point))
        stored = {"_scale": scale}
        if self._dynamic:
            stored[""] = value.codes
        else:
            stored["_packed"] = pack_to_int32(value.codes, scheme.bits)
            stored["_shape"] = torch.tensor(value.codes.shape)
        if not scheme.symmetric:
            packs = not self._dynamic and not scheme.per_tensor
            stored["_zero_point"] = pack_to_int32(zero_point, scheme.bits, packed_dim=0) if packs else zero_point
        self.stored_bytes += sum(tensor.nbytes for tensor in stored.values())
        return {row.hf_name + suffix: tensor.contiguous() for suffix, tensor in stored.items()}


def quantization_config(config: ModelConfig, scheme: Scheme, *, dynamic: bool) -> dict[str, Any]:
    """Return the entry quantization_config of config.json."""
    strategy = "tensor" if scheme.per_tensor else "group" if scheme.group else "channel"
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": strategy,
        "group_size": scheme.group,
        "dynamic": False,
    }
    form = "int-quantized" if dynamic else "pack-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": _TOKENS if dynamic else None, "format": form}
    affine = {} if scheme.symmetric else {"dequantize": True}  # stock transformers cannot allocate packed zero points: it dequantizes
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        **affine,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(_ignored(config)),
    }


#: Inputs that are quantized when the model runs: one scale per token.
_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


#: The head in the code of transformers 5; files of GPT-NeoX have another name.
HEAD = "lm_head.weight"


def _ignored(config: ModelConfig) -> Iterable[str]:
    """The stock modules with matrices that are not quantized: embeddings and head, by their names in files and in transformers."""
    matrices = {name for name, shape in registry.weight_shapes(config).items() if len(shape) == 2}
    rows, duplicates = registry.stock_tensors(config)
    quantized = {row.hf_name for row in quantized_rows(config)}
    names = {row.hf_name for row in rows if matrices.issuperset(row.names) and row.hf_name not in quantized} | duplicates.keys()
    in_files = HEAD
    for pattern, replacement in registry.mapping_of(config).renamed:
        in_files = re.sub(pattern, replacement, in_files)
    names |= {HEAD} if in_files in names else set()
    return {name.removesuffix(".weight") for name in names if name.endswith(".weight")}


def quantize_inputs(layers: Iterable[nn.Linear]) -> None:
    """Round the inputs of layers as the package does when a model with dynamic quantization runs."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    arguments = QuantizationArgs(**_TOKENS)

    def rounded(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        scale, zero_point = compute_dynamic_scales_and_zp(inputs[0], arguments, layer)
        return (fake_quantize(inputs[0], scale, zero_point, arguments),)

    for layer in layers:
        layer.register_forward_pre_hook(rounded)


def check_installed(kind: str) -> None:
    """Refuse to quantize without the package.

    Raises:
        UserError: it is not installed.
    """
    try:
        logging.getLogger("torchao").setLevel(logging.ERROR)  # which transformers imports; it warns of kernels for other GPUs
        import compressed_tensors  # noqa: F401
    except ModuleNotFoundError:
        raise UserError.of("stage.quantize", kind, "requires the package compressed-tensors", "pip install '.[quantize]'") from None
