"""BERT <-> transformers' BertForPreTraining, BertForMaskedLM without next-sentence prediction, or BertForSequenceClassification."""

from __future__ import annotations

from typing import Any

from pipeline.models.bert.config import BertConfig
from pipeline.models.huggingface_mapping import HuggingFaceMapping, KeyGroup, Table, refusal, tensors

_BOTH = ("weight", "bias")

FIELDS: dict[str, str] = {
    "vocab_size": "vocab_size",
    "type_vocab_size": "segments",
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn_hidden",
    "layer_norm_eps": "norm_eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tie_embeddings",
}
CONSTANTS = {
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}
DEFAULTS = {
    "vocab_size": 30522,
    "type_vocab_size": 2,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}


def encoder(prefix: str) -> Table:
    """Return the tensors of embedding and blocks; RoBERTa has the same names with its own prefix."""
    block, module = f"{prefix}.encoder.layer.{{i}}", "blocks.{i}"
    return (
        *tensors(f"{prefix}.embeddings.word_embeddings", "embed.tokens"),
        *tensors(f"{prefix}.embeddings.position_embeddings", "embed.positions"),
        *tensors(f"{prefix}.embeddings.token_type_embeddings", "embed.segments"),
        *tensors(f"{prefix}.embeddings.LayerNorm", "embed.norm", leaves=_BOTH),
        *tensors(f"{block}.attention.self.query", f"{module}.attention.query", leaves=_BOTH),
        *tensors(f"{block}.attention.self.key", f"{module}.attention.key", leaves=_BOTH),
        *tensors(f"{block}.attention.self.value", f"{module}.attention.value", leaves=_BOTH),
        *tensors(f"{block}.attention.output.dense", f"{module}.attention.output", leaves=_BOTH),
        *tensors(f"{block}.attention.output.LayerNorm", f"{module}.attention_norm", leaves=_BOTH),
        *tensors(f"{block}.intermediate.dense", f"{module}.mlp.up", leaves=_BOTH),
        *tensors(f"{block}.output.dense", f"{module}.mlp.down", leaves=_BOTH),
        *tensors(f"{block}.output.LayerNorm", f"{module}.mlp_norm", leaves=_BOTH),
    )


def output(hf_bias: str, hf_decoder: str, config: Any) -> Table:
    """Return the tensors of the output projection and its bias. The class has the bias under two names only if the projection is tied."""
    shared = tensors(hf_bias, "head.output", leaves=("bias",))
    return (
        (*shared, *tensors(hf_decoder, "head.output"))
        if config.tie_embeddings
        else (*tensors(hf_decoder, "head.output", leaves=_BOTH), *shared)
    )


def _table(config: BertConfig) -> Table:
    """Return the tensors of all weights."""
    return (
        *encoder("bert"),
        *tensors("cls.predictions.transform.dense", "head.dense", leaves=_BOTH),
        *tensors("cls.predictions.transform.LayerNorm", "head.norm", leaves=_BOTH),
        *output("cls.predictions", "cls.predictions.decoder", config),
        *(_SENTENCE if config.next_sentence else ()),
    )


#: The pooler and the next-sentence head.
_SENTENCE: Table = (
    *tensors("bert.pooler.dense", "head.sentence.dense", leaves=_BOTH),
    *tensors("cls.seq_relationship", "head.sentence.output", leaves=_BOTH),
)


def _masked_lm(architecture: str, *, next_sentence: bool) -> HuggingFaceMapping:
    return HuggingFaceMapping(
        architecture=architecture,
        model_type="bert",
        fields={**FIELDS, "max_position_embeddings": "max_positions"},
        constants=CONSTANTS,
        table=_table,
        implied={"next_sentence": next_sentence, "is_classifier": False},
        defaults={**DEFAULTS, "max_position_embeddings": 512},
        copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
        ignored_weights=("bert.embeddings.position_ids", *(() if next_sentence else ("bert.pooler.*", "cls.seq_relationship.*"))),
        renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
    )


def _write_labels(config: BertConfig) -> dict[str, Any]:
    """Return the keys of config.json with the names of the labels."""
    numbered = list(enumerate(config.labels))
    return {"id2label": {str(number): label for number, label in numbered}, "label2id": {label: number for number, label in numbered}}


def _read_labels(content: dict[str, Any]) -> dict[str, Any]:
    """Return the labels in the order of their numbers; LABEL_0 and LABEL_1 without names, as in transformers."""
    names = content.get("id2label") or {str(number): f"LABEL_{number}" for number in range(content.get("num_labels") or 2)}
    if not isinstance(names, dict) or sorted(names) != sorted(str(number) for number in range(len(names))):
        raise refusal("id2label", names, "must map the numbers 0, 1, ... to names", "fix config.json")
    return {"labels": [str(names[str(number)]) for number in range(len(names))]}


#: Names of the labels of sequence classification.
LABELS = KeyGroup(keys=("id2label", "label2id"), write=_write_labels, read=_read_labels)
#: What a class with labels has instead of the heads of masked language modeling.
CLASSIFIER: dict[str, Any] = {"next_sentence": False, "tie_embeddings": False, "is_classifier": True}

_CLASSIFIER = HuggingFaceMapping(
    architecture="BertForSequenceClassification",
    model_type="bert",
    fields={**{key: name for key, name in FIELDS.items() if name != "tie_embeddings"}, "max_position_embeddings": "max_positions"},
    constants=CONSTANTS,
    table=(
        *encoder("bert"),
        *tensors("bert.pooler.dense", "head.sentence.dense", leaves=_BOTH),
        *tensors("classifier", "head.sentence.output", leaves=_BOTH),
    ),
    implied=CLASSIFIER,
    defaults={**DEFAULTS, "max_position_embeddings": 512},
    nested=(LABELS,),
    ignored_keys=("tie_word_embeddings",),
    ignored_weights=("bert.embeddings.position_ids",),
    renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
)

MAPPINGS = (_CLASSIFIER, _masked_lm("BertForPreTraining", next_sentence=True), _masked_lm("BertForMaskedLM", next_sentence=False))
