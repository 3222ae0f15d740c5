"""Compares an imported model with its source: logits where a stock class computes them, and the digest of every weight that was written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from pipeline.checkpoint.fragments import Fragment
from pipeline.checkpoint.reader import Checkpoint
from pipeline.common.errors import CheckFailed
from pipeline.conversion import stock_logits
from pipeline.conversion.full_weights import FullWeights
from pipeline.models import registry

log = logging.getLogger("pipeline")


def compare_logits(weights: FullWeights, load_stock: Callable[[Any], nn.Module] | None) -> bool:
    """Compare the logits of the weights with those that the stock class computes from the source, on random tokens.

    Args:
        load_stock: returns the model of the source, given its class of transformers; None if the source has other names.

    Returns:
        Whether they were compared: the model is a decoder, both fit in memory, and transformers has the class.

    Raises:
        CheckFailed: the logits differ.
    """
    config = weights.config
    if load_stock is None or config.objective != "causal" or not stock_logits.fit_in_memory(weights):
        return False
    if find_spec("transformers") is None:
        log.info("convert: logits are compared if transformers is installed (pip install transformers)")
        return False
    architecture = registry.mapping_of(config).architecture
    if (stock_class := stock_logits.stock_class_of(config)) is None:
        return False
    ours, tokens = stock_logits.sample(weights, config, torch.float32)
    with torch.inference_mode(), stock_logits.quiet():
        actual = ours(tokens)
        stock = load_stock(stock_class).eval()
        stock.config.use_cache = False  # type: ignore[union-attr] # a class may have no cache without a layer of attention
        expected = stock(input_ids=tokens).logits
    found = f"convert: {architecture} computes other logits from the source than the imported weights give"
    difference = stock_logits.check_difference(actual, expected, found, "Nothing was written")
    log.info("convert: the logits of %s on %d tokens differ by at most %.1e", architecture, tokens.numel(), difference)
    return True


class Digests:
    """Digests of weights and moments on their way into a checkpoint, and of what can be read from it."""

    def __init__(self) -> None:
        self._expected: dict[tuple[str, str], str] = {}
        self._norms: dict[tuple[str, str], float] = {}

    def of(self, fragments: Iterator[Fragment]) -> Iterator[Fragment]:
        """Yield fragments of full weights, and keep their digests."""
        for fragment in fragments:
            for kind, values in fragment.tensors.items():
                assert isinstance(values, Tensor), f"{fragment.piece.name} is quantized"
                self._expected[fragment.piece.name, kind] = _digest(values)
                self._norms[fragment.piece.name, kind] = float(torch.linalg.vector_norm(values, dtype=torch.float64))
            yield fragment

    def compare(self, checkpoint: Checkpoint, *, listed: bool) -> None:
        """Read every weight of a checkpoint again, and its moments.

        Args:
            listed: whether norm and digest of each are logged.

        Raises:
            CheckFailed: a weight is another one than that of the source.
        """
        for (name, kind), expected in self._expected.items():
            value, shown = checkpoint.tensor(name, kind), name if kind == "weight" else f"{kind} of {name}"
            if (digest := _digest(value)) != expected:
                raise CheckFailed(f"convert: {checkpoint.path} has {shown} with the digest {digest}, and the source has {expected}")
            if listed:
                log.info("convert: %s %s: norm %.9g, xxh3 %s", shown, list(value.shape), self._norms[name, kind], expected)
        weights = sum(kind == "weight" for _, kind in self._expected)
        also = " and of their moments" if len(self._expected) > weights else ""
        log.info("convert: the digests of all %d weights%s equal those of the source", weights, also)


def _digest(weight: Tensor) -> str:
    """Return the digest of a weight in fp32."""
    return xxhash.xxh3_64_hexdigest(weight.detach().flatten().contiguous().numpy().data)
