"""Compares the logits of an export, as stock transformers computes them, with those of the checkpoint."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.checkpoint.weights import Weights, rounded
from pipeline.common.errors import CheckFailed
from pipeline.models import registry
from pipeline.models.config import ModelConfig

log = logging.getLogger("pipeline")

#: Both models, fp32, are compared if they fit in this many bytes: an export stays within 1.5 GB and twice its largest tensor.
MEMORY = 512 << 20
#: Largest difference of two logits, as a fraction of the largest logit. Sums in fp32 differ by their order in the last digits; a weight in
#: the wrong place changes the logits as a whole.
TOLERANCE = 1e-3
#: Samples: sequences, and tokens of each at most. Ids below the first are special in some classes.
SEQUENCES, LENGTH, FIRST_TOKEN = 2, 32, 5
#: Options of from_pretrained. The grouped product of experts refuses matrices whose rows are no multiple of 16 bytes.
IN_FP32 = {"dtype": torch.float32, "experts_implementation": "eager"}
#: Objectives of the models that are compared: they have logits for each token, and classifiers have not.
OBJECTIVES = ("causal", "masked", "span_corruption", "pairs")


def compare(folder: Path, weights: Weights, config: ModelConfig, dtype: torch.dtype, *, gguf_file: str | None = None) -> None:
    """Compare logits on random tokens, for OBJECTIVES, if both models fit in memory, and transformers is installed.

    The digests of all files have been compared when they were written; this also finds weights under a wrong name.

    Args:
        dtype: of the export; the weights of the checkpoint are rounded to it.
        gguf_file: name of the file, of an export in GGUF.

    Raises:
        CheckFailed: transformers does not load the export, or the logits differ.
    """
    architecture = registry.mapping_of(config).architecture
    if config.objective not in OBJECTIVES or not fit_in_memory(weights):
        log.info("convert: the digests of all tensors agree")
        return
    if find_spec("transformers") is None:
        log.info("convert: the digests of all tensors agree; logits are compared if transformers is installed (pip install transformers)")
        return
    if (stock_class := stock_class_of(config)) is None:
        log.info("convert: the digests of all tensors agree; this version of transformers has no %s", architecture)
        return
    ours, tokens = sample(weights, config, dtype)
    with torch.inference_mode():
        expected = our_logits(ours, config, tokens)
        actual = stock_logits(load(stock_class, folder, gguf_file), config, tokens)
    found = f"convert: {architecture} computes other logits from the export than the checkpoint"
    difference = check_difference(actual, expected, found, "Nothing is published")
    log.info("convert: the digests of all tensors agree; the logits of %s differ by at most %.1e", architecture, difference)


def fit_in_memory(weights: Weights) -> bool:
    """Whether two models with these weights, fp32, fit in MEMORY."""
    return 2 * 4 * sum(prod(weights.shape(name)) for name in weights.names()) <= MEMORY


def sample(weights: Weights, config: ModelConfig, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """Return our model, fp32, with weights that are rounded to a dtype, and random tokens for it, int64 (SEQUENCES, at most LENGTH)."""
    model = registry.build(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(rounded(weights.tensor(name), dtype, name))
    generator = torch.Generator().manual_seed(0)
    first = FIRST_TOKEN if config.vocab_size > 2 * FIRST_TOKEN else 0
    size = (SEQUENCES, min(LENGTH, config.max_positions))
    return model.eval(), torch.randint(first, config.vocab_size, size, generator=generator)


def check_difference(actual: Tensor, expected: Tensor, found: str, then: str) -> float:
    """Return the largest difference of two logits.

    Raises:
        CheckFailed: it is more than TOLERANCE; with `found`, both numbers and `then` as its text.
    """
    largest = float(expected.float().abs().max())
    difference = float((actual.float() - expected.float()).abs().max()) if actual.shape == expected.shape else float("inf")
    if not difference <= TOLERANCE * largest:
        raise CheckFailed(f"{found}: they differ by {difference:.3g}, and the largest logit is {largest:.3g}. {then}")
    return difference


def our_logits(model: nn.Module, config: ModelConfig, tokens: Tensor) -> Tensor:
    """Return the logits of a model of this package, (batch, sequence, vocabulary).

    Args:
        tokens: int64 (batch, sequence); an encoder-decoder also gets them in the opposite order, in its decoder.
    """
    logits: Tensor = model(tokens, decoder_tokens=tokens.flip(1)) if _has_decoder_tokens(config) else model(tokens)
    return logits


def stock_logits(stock: Any, config: ModelConfig, tokens: Tensor) -> Tensor:
    """Return the logits of a stock model; arguments and result as of our_logits."""
    output = stock(input_ids=tokens, **({"decoder_input_ids": tokens.flip(1)} if _has_decoder_tokens(config) else {}))
    logits: Tensor = output.prediction_logits if "prediction_logits" in output else output.logits  # BERT's, beside those of a sentence
    return logits


def _has_decoder_tokens(config: ModelConfig) -> bool:
    return config.objective in ("span_corruption", "pairs")


def stock_class_of(config: ModelConfig) -> Any | None:
    """Return the class of transformers, which is installed, for a model; None if this version has none."""
    for noisy in ("torchao", "torch.utils._pytree"):  # which transformers imports: they warn of kernels for other machines
        logging.getLogger(noisy).setLevel(logging.ERROR)
    import transformers

    return getattr(transformers, registry.mapping_of(config).architecture, None)


def load(stock_class: Any, folder: Path, gguf_file: str | None = None) -> Any:
    """Load an export in the stock class, without progress bars and dropout.

    Raises:
        CheckFailed: weights are missing or unexpected.
    """
    file = {} if gguf_file is None else {"gguf_file": gguf_file}
    # The bar of GGUF files has no switch.
    with quiet(), nullcontext() if gguf_file is None else redirect_stderr(io.StringIO()):
        model, report = stock_class.from_pretrained(folder, **IN_FP32, output_loading_info=True, **file)
    problems = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if problems and gguf_file is None:
        raise CheckFailed(f"convert: {stock_class.__name__} does not load the export: {problems}. Nothing is published")
    return model.eval()


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings and progress bars of transformers."""
    from transformers.utils import logging as stock_logging

    verbosity, bars = stock_logging.get_verbosity(), stock_logging.is_progress_bar_enabled()
    stock_logging.set_verbosity_error()
    stock_logging.disable_progress_bar()
    try:
        yield
    finally:
        stock_logging.set_verbosity(verbosity)
        if bars:
            stock_logging.enable_progress_bar()
