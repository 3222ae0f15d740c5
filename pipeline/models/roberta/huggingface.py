"""RoBERTa <-> transformers' RobertaForMaskedLM."""

from __future__ import annotations

from typing import Any

from pipeline.models.adapter import Adapter, Nested, refusal, rows
from pipeline.models.bert.huggingface import CONSTANTS, DEFAULTS, FIELDS, HARMLESS, bias, encoder
from pipeline.models.roberta.config import PADDING

_BOTH = ("weight", "bias")


def _positions(content: dict[str, Any]) -> dict[str, Any]:
    """The longest sequence: the table of positions has rows before that of position 0."""
    rows_there = content.get("max_position_embeddings", 512)
    if not isinstance(rows_there, int) or rows_there <= PADDING + 2:
        raise refusal("max_position_embeddings", rows_there, f"must be a number above {PADDING + 2}", "mend config.json")
    return {"max_positions": rows_there - PADDING - 1}


ADAPTER = Adapter(
    architecture="RobertaForMaskedLM",
    model_type="roberta",
    fields=FIELDS,
    constants={**CONSTANTS, "pad_token_id": PADDING},
    table=lambda config: (
        *encoder("roberta"),
        *rows("lm_head.dense", "head.dense", leaves=_BOTH),
        *rows("lm_head.layer_norm", "head.norm", leaves=_BOTH),
        *bias("lm_head", "lm_head.decoder", config),
    ),
    implied={"next_sentence": False},
    defaults={**DEFAULTS, "vocab_size": 50265},
    nested=(
        Nested(
            keys=("max_position_embeddings",),
            write=lambda config: {"max_position_embeddings": config.max_positions + config.position_offset},
            read=_positions,
        ),
    ),
    harmless=HARMLESS,
    copies={"lm_head.decoder.bias": "lm_head.bias"},
    unused=("roberta.embeddings.position_ids", "roberta.pooler.*"),
)
