"""Part "state", the export: stock transformers computes the logits and the gradients of the small run's checkpoint.

The plain loop and the ranks compute with the same layers; transformers has its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.certification.parts import PartReport
from pipeline.checkpoint import native
from pipeline.checkpoint.lora_merge import open_merged
from pipeline.checkpoint.weights import InMemory, Weights
from pipeline.common.errors import CheckFailed, UserError
from pipeline.config import loss_weights
from pipeline.config.schema import RunConfig
from pipeline.conversion import huggingface_export, stock_logits
from pipeline.layers.moe import moe_layers
from pipeline.models import registry
from pipeline.models.config import ModelConfig


def report(config: RunConfig) -> PartReport:
    """Export the newest checkpoint of run_dir to Hugging Face's format, and compare logits and gradients of stock transformers and ours.

    Args:
        config: of the small run.
    """
    result = PartReport("state")
    compared = config.model.objective in stock_logits.OBJECTIVES
    if not compared or find_spec("transformers") is None:
        reason = "transformers is not installed" if compared else "the model is a classifier"
        result.not_covered.append(f"logits of an export: {reason}")
        return result
    weights = open_merged(native.complete(Path(config.run_dir))[-1], None)
    folder = Path(config.run_dir, "hf")
    folder.mkdir()
    try:
        architecture = registry.mapping_of(config.model).architecture
        huggingface_export.check_weights(weights, config.model, "stage.checkpoint", weights.path)
    except UserError as error:
        result.not_covered.append(f"logits of an export: {error.violations[0].rule}")
        return result
    if stock_logits.stock_class_of(config.model) is None:
        result.not_covered.append(f"logits of an export: this version of transformers has no {architecture}")
        return result
    try:
        huggingface_export.write_weights(folder, weights, config.model, dtype=torch.float32, shard_bytes=1 << 30)
        huggingface_export.write_configs(folder, config.model, dtype=torch.float32, end_of_document_id=0)
        stock_logits.compare(folder, weights, config.model, torch.float32)
        different = differences(folder, weights, config.model)
    except CheckFailed as failed:
        result.failures.append(f"export: {failed}")
        return result
    except RuntimeError as error:  # kernels of transformers do not support all small sizes
        result.not_covered.append(f"logits of an export: transformers computes none at these sizes ({str(error).splitlines()[0]})")
        return result
    result.failures += [f"export: the gradient of {name} differs by {value:.1e} from that of {architecture}" for name, value in different]
    result.covered.append(f"exported; logits and gradients of {architecture} of stock transformers compared with those of the plain model")
    return result


#: Largest difference of the gradients of a weight, relative to its norm.
TOLERANCE = 1e-4
#: The difference of a gradient below this share of that of all weights is relative to the share: one that is zero in exact arithmetic, such
#: as that of a key's bias, is a sum of rounding errors.
SMALL = 1e-4
#: Sequences, and tokens of each at most.
SEQUENCES, LENGTH = 2, 32
#: The delta rule in chunks in a module of transformers -> the same token by token.
_RULES = {
    "torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "recurrent_kimi_delta_attention",
}


def differences(folder: Path, weights: Weights, config: ModelConfig) -> list[tuple[str, float]]:
    """Return the weights of the stock class whose gradients differ by more than TOLERANCE, with the relative difference.

    The order is that of a backward pass. The loss is the cross-entropy of the next tokens alone, on random tokens, without losses that
    balance experts. It serves encoders and encoder-decoders, too: the logits depend on all tokens that they read. A weight that it does not
    depend on has no gradient in the stock class, and is not compared: that of BERT's next sentences.

    Args:
        folder: the export; the folder "gradients" is added.
        weights: of the checkpoint, fp32.
        config: of the model, which the stock class supports; of an objective of stock_logits.OBJECTIVES.
    """
    stock_class = stock_logits.stock_class_of(config)
    ours = registry.build(config).eval()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(weights.tensor(name))
    for moe in moe_layers(ours):
        moe.capacity_factor = None  # stock models drop nothing
    ours.set_loss_weights(dict.fromkeys(loss_weights.defaults(config), 0.0))
    first = 0 if config.objective == "causal" else stock_logits.FIRST_TOKEN  # positions of RoBERTa do not count padding, a token
    shape, generator = (SEQUENCES, min(LENGTH, config.max_positions)), torch.Generator().manual_seed(1)
    tokens = torch.randint(first, config.vocab_size, shape, generator=generator)
    _next_token_loss(stock_logits.our_logits(ours, config, tokens), tokens).backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in ours.named_parameters()}
    # An export divides and joins tensors only, and so does loading: gradients pass through both as weights do.
    written = folder / "gradients"
    written.mkdir()
    huggingface_export.write_weights(written, InMemory(gradients), config, dtype=torch.float32, shard_bytes=1 << 30)
    huggingface_export.write_configs(written, config, dtype=torch.float32, end_of_document_id=0)
    stock = stock_logits.load(stock_class, folder)
    with _token_by_token(stock):
        _next_token_loss(stock_logits.stock_logits(stock, config, tokens), tokens).backward()
    expected = {name: parameter.grad for name, parameter in stock.named_parameters() if parameter.grad is not None}
    actual = dict(stock_logits.load(stock_class, written).named_parameters())
    smallest = SMALL * float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    sizes = {
        name: float((actual[name].detach() - gradient).norm() / gradient.norm().clamp(min=smallest)) for name, gradient in expected.items()
    }
    return [(name, size) for name, size in reversed(sizes.items()) if not size <= TOLERANCE]


@contextmanager
def _token_by_token(stock: nn.Module) -> Iterator[None]:
    """Let stock layers with linear attention apply the delta rule to one token after the other, as in generation.

    In chunks, the gradients of strong decays are differences of larger numbers, and in fp32 mostly their rounding errors.
    """
    module = sys.modules[type(stock).__module__]
    chunked = {name: getattr(module, name) for name in _RULES if hasattr(module, name)}
    for name in chunked:
        setattr(module, name, getattr(module, _RULES[name]))
    try:
        yield
    finally:
        for name, function in chunked.items():
            setattr(module, name, function)


def _next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (batch, sequence, vocabulary) and the next tokens."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
