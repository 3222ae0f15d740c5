"""RoBERTa <-> transformers' RobertaForMaskedLM; by model_type, XLMRobertaForMaskedLM or CamembertForMaskedLM.

With labels, the same names with ForSequenceClassification.
"""

from __future__ import annotations

from typing import Any

from pipeline.models.bert.huggingface import CLASSIFIER, CONSTANTS, DEFAULTS, FIELDS, LABELS, encoder, output
from pipeline.models.huggingface_mapping import HuggingFaceMapping, KeyGroup, refusal, tensors
from pipeline.models.roberta.config import PADDING

_BOTH = ("weight", "bias")


def _positions(content: dict[str, Any]) -> dict[str, Any]:
    """Return max_positions: the position embedding has additional rows before position 0."""
    count = content.get("max_position_embeddings", 512)
    if not isinstance(count, int) or count <= PADDING + 2:
        raise refusal("max_position_embeddings", count, f"must be an integer above {PADDING + 2}", "fix config.json")
    return {"max_positions": count - PADDING - 1}


_POSITIONS = KeyGroup(
    keys=("max_position_embeddings",),
    write=lambda config: {"max_position_embeddings": config.max_positions + config.position_offset},
    read=_positions,
)


def _classifier(prefix: str, model_type: str, vocab_size: int) -> HuggingFaceMapping:
    """Return the mapping of the class of sequence classification."""
    return HuggingFaceMapping(
        architecture=f"{prefix}ForSequenceClassification",
        model_type=model_type,
        fields={key: name for key, name in FIELDS.items() if name != "tie_embeddings"},
        constants={**CONSTANTS, "pad_token_id": PADDING},
        table=(
            *encoder("roberta"),
            *tensors("classifier.dense", "head.sentence.dense", leaves=_BOTH),
            *tensors("classifier.out_proj", "head.sentence.output", leaves=_BOTH),
        ),
        implied={**CLASSIFIER, "model_type": model_type},
        defaults={**DEFAULTS, "vocab_size": vocab_size},
        nested=(_POSITIONS, LABELS),
        ignored_keys=("tie_word_embeddings",),
        ignored_weights=("roberta.embeddings.position_ids", "roberta.pooler.*"),
    )


def _masked_lm(prefix: str, model_type: str, vocab_size: int) -> HuggingFaceMapping:
    """Return the mapping of the class of masked language modeling; its default vocabulary has `vocab_size` tokens."""
    return HuggingFaceMapping(
        architecture=f"{prefix}ForMaskedLM",
        model_type=model_type,
        fields=FIELDS,
        constants={**CONSTANTS, "pad_token_id": PADDING},
        table=lambda config: (
            *encoder("roberta"),
            *tensors("lm_head.dense", "head.dense", leaves=_BOTH),
            *tensors("lm_head.layer_norm", "head.norm", leaves=_BOTH),
            *output("lm_head", "lm_head.decoder", config),
        ),
        implied={"next_sentence": False, "is_classifier": False, "model_type": model_type},
        defaults={**DEFAULTS, "vocab_size": vocab_size},
        nested=(_POSITIONS,),
        copies={"lm_head.decoder.bias": "lm_head.bias"},
        ignored_weights=("roberta.embeddings.position_ids", "roberta.pooler.*"),
    )


_CLASSES = (("Roberta", "roberta", 50265), ("XLMRoberta", "xlm-roberta", 30522), ("Camembert", "camembert", 30522))
MAPPINGS = tuple(make(*names) for make in (_masked_lm, _classifier) for names in _CLASSES)
