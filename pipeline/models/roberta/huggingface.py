"""RoBERTa <-> transformers' RobertaForMaskedLM; by model_type, XLMRobertaForMaskedLM or CamembertForMaskedLM."""

from __future__ import annotations

from typing import Any

from pipeline.models.adapter import Adapter, KeyGroup, refusal, rows
from pipeline.models.bert.huggingface import CONSTANTS, DEFAULTS, FIELDS, encoder, output
from pipeline.models.roberta.config import PADDING

_BOTH = ("weight", "bias")


def _positions(content: dict[str, Any]) -> dict[str, Any]:
    """Return max_positions: the position embedding has additional rows before position 0."""
    count = content.get("max_position_embeddings", 512)
    if not isinstance(count, int) or count <= PADDING + 2:
        raise refusal("max_position_embeddings", count, f"must be an integer above {PADDING + 2}", "fix config.json")
    return {"max_positions": count - PADDING - 1}


def _adapter(architecture: str, model_type: str, vocab_size: int) -> Adapter:
    """Return the adapter of a class; its default vocabulary has `vocab_size` tokens."""
    return Adapter(
        architecture=architecture,
        model_type=model_type,
        fields=FIELDS,
        constants={**CONSTANTS, "pad_token_id": PADDING},
        table=lambda config: (
            *encoder("roberta"),
            *rows("lm_head.dense", "head.dense", leaves=_BOTH),
            *rows("lm_head.layer_norm", "head.norm", leaves=_BOTH),
            *output("lm_head", "lm_head.decoder", config),
        ),
        implied={"next_sentence": False, "model_type": model_type},
        defaults={**DEFAULTS, "vocab_size": vocab_size},
        nested=(
            KeyGroup(
                keys=("max_position_embeddings",),
                write=lambda config: {"max_position_embeddings": config.max_positions + config.position_offset},
                read=_positions,
            ),
        ),
        copies={"lm_head.decoder.bias": "lm_head.bias"},
        ignored_weights=("roberta.embeddings.position_ids", "roberta.pooler.*"),
    )


ADAPTERS = (
    _adapter("RobertaForMaskedLM", "roberta", 50265),
    _adapter("XLMRobertaForMaskedLM", "xlm-roberta", 30522),
    _adapter("CamembertForMaskedLM", "camembert", 30522),
)
