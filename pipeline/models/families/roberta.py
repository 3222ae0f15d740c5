"""RoBERTa (Liu et al. 2019, https://arxiv.org/abs/1907.11692): BERT's encoder with RoBERTa's configuration.

XLM-R (Conneau et al. 2020, https://arxiv.org/abs/1911.02116) and CamemBERT (Martin et al. 2020, https://arxiv.org/abs/1911.03894) are the
same model with other vocabularies and data.

RobertaForMaskedLM of transformers; by model_type, XLMRobertaForMaskedLM or CamembertForMaskedLM. With labels, the same names with
ForSequenceClassification.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models.decoder_mapping import BOTH
from pipeline.models.families import bert
from pipeline.models.huggingface_mapping import HuggingFaceMapping, KeyGroup, refusal, tensors

#: model_type of config.json; the classes compute the same function of weights with the same names.
MODEL_TYPES = ("roberta", "xlm-roberta", "camembert")
#: Padding token id of the Hugging Face class; position 0 is in row PADDING + 1 of its position embedding.
PADDING = 1


@dataclass(frozen=True)
class RobertaConfig(bert.BertConfig, family="roberta", vocab_size=50265, segments=1, norm_eps=1e-5):
    """BERT's encoder (Liu et al. 2019, https://arxiv.org/abs/1907.11692) with one segment, without next-sentence prediction."""

    model_type: str = knob("roberta", "Hugging Face type and class of the export: RoBERTa, XLM-R or CamemBERT", choices=MODEL_TYPES)
    next_sentence: bool = knob(False, "must stay false: RoBERTa has no next-sentence prediction")

    @property
    def position_offset(self) -> int:
        """Row of the position embedding that holds position 0."""
        return PADDING + 1

    @property
    def padding_token(self) -> int | None:
        """Token id that must not occur in text, since the Hugging Face class does not count its position."""
        return PADDING

    def violations(self) -> list[Violation]:
        """See Sizes."""
        if self.next_sentence:
            rule = "is supported by BERT only; RoBERTa has no next-sentence head"
            return [Violation("model.next_sentence", True, rule, "leave it out, or choose a BERT")]
        return super().violations()


def _read_positions(content: dict[str, Any]) -> dict[str, Any]:
    """Return max_positions: the position embedding has additional rows before position 0."""
    count = content.get("max_position_embeddings", 512)
    if not isinstance(count, int) or count <= PADDING + 2:
        raise refusal("max_position_embeddings", count, f"must be an integer above {PADDING + 2}", "fix config.json")
    return {"max_positions": count - PADDING - 1}


_POSITIONS = KeyGroup(
    keys=("max_position_embeddings",),
    write=lambda config: {"max_position_embeddings": config.max_positions + config.position_offset},
    read=_read_positions,
)
_IGNORED = ("roberta.embeddings.position_ids", "roberta.pooler.*")


def _classifier(prefix: str, model_type: str, vocab_size: int) -> HuggingFaceMapping:
    """Return the mapping of the class of sequence classification."""
    return HuggingFaceMapping(
        architecture=f"{prefix}ForSequenceClassification",
        model_type=model_type,
        keys={**bert.UNTIED_KEYS, "vocab_size": ("vocab_size", vocab_size)},
        constants={**bert.CONSTANTS, "pad_token_id": PADDING},
        table=(
            *bert.encoder("roberta"),
            *tensors("classifier.dense", "head.sentence.dense", leaves=BOTH),
            *tensors("classifier.out_proj", "head.sentence.output", leaves=BOTH),
        ),
        implied={**bert.CLASSIFIER, "model_type": model_type},
        nested=(_POSITIONS, bert.LABELS),
        ignored_keys=("tie_word_embeddings",),
        ignored_weights=_IGNORED,
    )


def _masked_lm(prefix: str, model_type: str, vocab_size: int) -> HuggingFaceMapping:
    """Return the mapping of the class of masked language modeling; its default vocabulary has `vocab_size` tokens."""
    return HuggingFaceMapping(
        architecture=f"{prefix}ForMaskedLM",
        model_type=model_type,
        keys={**bert.KEYS, "vocab_size": ("vocab_size", vocab_size)},
        constants={**bert.CONSTANTS, "pad_token_id": PADDING},
        table=lambda config: (
            *bert.encoder("roberta"),
            *tensors("lm_head.dense", "head.dense", leaves=BOTH),
            *tensors("lm_head.layer_norm", "head.norm", leaves=BOTH),
            *bert.output("lm_head", "lm_head.decoder", config),
        ),
        implied={"next_sentence": False, "is_classifier": False, "model_type": model_type},
        nested=(_POSITIONS,),
        copies={"lm_head.decoder.bias": "lm_head.bias"},
        ignored_weights=_IGNORED,
    )


_CLASSES = (("Roberta", "roberta", 50265), ("XLMRoberta", "xlm-roberta", 30522), ("Camembert", "camembert", 30522))

#: BERT's next-sentence head is RoBERTa's head of sequence classification.
FAMILY = replace(
    bert.FAMILY, config=RobertaConfig, huggingface=tuple(make(*names) for make in (_masked_lm, _classifier) for names in _CLASSES)
)
