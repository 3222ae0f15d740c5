"""Small models of the families and of their stock classes, and the largest difference of their logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from pipeline.models.config_classes import CONFIG_CLASSES
from tools.audit.family_cases import SIZES

SEQUENCE, FIRST_TOKEN, PADDING = 24, 5, 1  # some stock classes identify padding by its id, so no token has it


def configuration(family: str, fields: dict[str, Any]) -> Any:
    schema = CONFIG_CLASSES[family]
    known = {field.name for field in dataclasses.fields(schema)}
    config = schema(**{key: value for key, value in SIZES.items() if key in known} | fields)
    assert not config.violations(), config.violations()
    return config


def randomize(model: nn.Module, exclude: tuple[str, ...] = ()) -> nn.Module:
    """Add noise to every weight whose name matches no pattern of `exclude`, so that no bias is zero and no norm weight is one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (p for name, p in model.named_parameters() if not any(fnmatchcase(name, pattern) for pattern in exclude)):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def batches(vocab_size: int, length: int = SEQUENCE) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield two batches, of equal lengths and with padding: tokens, a mask that is False for padding, and tokens for a decoder."""
    generator = torch.Generator().manual_seed(7)
    for lengths in ([length] * 3, [length, max(1, length // 2), min(3, length)]):
        real = torch.arange(length) < torch.tensor(lengths)[:, None]
        tokens, decoder = (torch.randint(FIRST_TOKEN, vocab_size, real.shape, generator=generator) for _ in range(2))
        yield tokens.where(real, PADDING), real, decoder


@torch.no_grad()
def difference(ours: nn.Module, stock: Any, vocab_size: int, length: int = SEQUENCE) -> tuple[float, int]:
    """Return the largest absolute difference of two logits, and the number of compared tokens."""
    largest, compared = 0.0, 0
    for tokens, real, other in batches(vocab_size, length):
        documents = {} if real.all() else {"documents": torch.where(real, 0, -1)}
        mask = {} if real.all() else {"attention_mask": real.long()}
        if stock.config.is_encoder_decoder:
            pairs = [(ours(tokens, decoder_tokens=other, **documents), stock(input_ids=tokens, decoder_input_ids=other, **mask).logits)]
        elif isinstance(stock, transformers.BertForPreTraining):
            pairs = sentence_pair_logits(ours, stock, (tokens, real, other % 2), documents | {"segments": other % 2})
        else:
            pairs = [(ours(tokens, **documents)[real], stock(input_ids=tokens, **mask).logits[real])]
        for actual, expected in pairs:
            assert expected.std() > 0.1, "the logits vary too little for a comparison"
            largest = max(largest, float((actual - expected).abs().max()))
        compared += pairs[0][1].numel() // vocab_size
    return largest, compared


def sentence_pair_logits(
    ours: Any, stock: Any, inputs: tuple[Tensor, Tensor, Tensor], batch: dict[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return the logits of tokens and of next-sentence prediction, which our head computes from its input."""
    tokens, real, segments = inputs
    head_inputs: list[Tensor] = []
    hook = ours.head.register_forward_pre_hook(lambda _, arguments: head_inputs.append(arguments[0]))
    actual = ours(tokens, **batch)
    hook.remove()
    expected = stock(input_ids=tokens, attention_mask=real.long(), token_type_ids=segments)
    return [(actual[real], expected.prediction_logits[real]), (ours.head.sentence(head_inputs[0]), expected.seq_relationship_logits)]
