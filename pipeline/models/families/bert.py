"""BERT (Devlin et al. 2019, https://arxiv.org/abs/1810.04805).

BertForPreTraining of transformers, BertForMaskedLM without next-sentence prediction, or BertForSequenceClassification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.layers.recipes import single_std
from pipeline.models.decoder_mapping import BOTH
from pipeline.models.family import Family, Model, tied_output
from pipeline.models.huggingface_mapping import HuggingFaceMapping, KeyGroup, Table, refusal, tensors
from pipeline.models.shared_sizes import LayerNormConfig


@dataclass(frozen=True)
class BertConfig(LayerNormConfig, family="bert", vocab_size=30522, max_positions=512, norm_eps=1e-12):
    """Encoder with post-norm LayerNorm, exact GELU, learned position and segment embeddings, tied embeddings and biases."""

    layers: int = knob(12, "encoder blocks", at_least=1, at_most=2000)
    ffn_hidden: int = knob(3072, "intermediate width of the feed-forward", at_least=1)
    segments: int = knob(2, "number of segment embeddings", at_least=1)
    next_sentence: bool = knob(True, "add next-sentence prediction, trained on pairs of segments")
    labels: list[str] = knob([], "labels of sequence classification, set by stage=finetune; empty for a masked language model")

    @property
    def objective(self) -> str:
        """Training objective: masked-token prediction, or sequence classification."""
        return "classification" if self.labels else "masked"

    @property
    def is_classifier(self) -> bool:
        """Whether the head classifies sequences."""
        return bool(self.labels)

    def classifier(self, labels: Sequence[str]) -> Self:
        """Return the configuration of the encoder with a head for these labels."""
        return replace(self, labels=list(labels), next_sentence=False, tie_embeddings=False)

    @property
    def position_offset(self) -> int:
        """Row of the position embedding that holds position 0."""
        return 0

    @property
    def padding_token(self) -> int | None:
        """Token id that must not occur in text, since the Hugging Face class does not count its position; None for none."""
        return None

    def violations(self) -> list[Violation]:
        """See Sizes."""
        violations = super().violations()
        if self.labels and (self.next_sentence or self.tie_embeddings):
            fix = "leave it empty: stage=finetune training.objective=classification sets it"
            rule = "replaces the head of masked language modeling (model.next_sentence=false, model.tie_embeddings=false)"
            violations.append(Violation("model.labels", ", ".join(self.labels), rule, fix))
        if self.next_sentence and self.segments < 2:
            rule = "is too small for model.next_sentence, which needs two segments"
            violations.append(Violation("model.segments", self.segments, rule, "set it to 2, or model.next_sentence=false"))
        return violations


def _build(config: BertConfig) -> Model:
    from torch import nn

    from pipeline.layers.masked_head import ClassificationHead, Encoder, MaskedHead
    from pipeline.models.decoder import decoder, plain_mlp

    return decoder(
        config,
        norm=nn.LayerNorm,
        attention=lambda _: {"bias": True},
        mlp=plain_mlp(config, "gelu", bias=True),
        block=lambda _: {"post_norm": True},
        embed={
            "max_positions": config.max_positions,
            "position_offset": config.position_offset,
            "segments": config.segments,
            "norm": nn.LayerNorm(config.hidden, eps=config.norm_eps),
        },
        final_norm=False,
        head=(
            ClassificationHead(config.hidden, len(config.labels))
            if config.labels
            else MaskedHead(config.vocab_size, config.hidden, config.norm_eps, sentence=config.next_sentence)
        ),
        stack=Encoder,
        causal=False,
    )


#: key of config.json -> our field, and the default of the classes
KEYS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 30522),
    "type_vocab_size": ("segments", 2),
    "hidden_size": ("hidden", 768),
    "num_hidden_layers": ("layers", 12),
    "num_attention_heads": ("heads", 12),
    "intermediate_size": ("ffn_hidden", 3072),
    "layer_norm_eps": ("norm_eps", 1e-12),
    "initializer_range": ("init_std", 0.02),
    "tie_word_embeddings": ("tie_embeddings", True),
}
#: of classes with labels, which have no tied weights
UNTIED_KEYS = {key: value for key, value in KEYS.items() if key != "tie_word_embeddings"}
CONSTANTS = {
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}
_POSITIONS = {"max_position_embeddings": ("max_positions", 512)}


def encoder(prefix: str) -> Table:
    """Return the tensors of embedding and blocks; RoBERTa has the same names with its own prefix."""
    block, module = f"{prefix}.encoder.layer.{{i}}", "blocks.{i}"
    return (
        *tensors(f"{prefix}.embeddings.word_embeddings", "embed.tokens"),
        *tensors(f"{prefix}.embeddings.position_embeddings", "embed.positions"),
        *tensors(f"{prefix}.embeddings.token_type_embeddings", "embed.segments"),
        *tensors(f"{prefix}.embeddings.LayerNorm", "embed.norm", leaves=BOTH),
        *tensors(f"{block}.attention.self.query", f"{module}.attention.query", leaves=BOTH),
        *tensors(f"{block}.attention.self.key", f"{module}.attention.key", leaves=BOTH),
        *tensors(f"{block}.attention.self.value", f"{module}.attention.value", leaves=BOTH),
        *tensors(f"{block}.attention.output.dense", f"{module}.attention.output", leaves=BOTH),
        *tensors(f"{block}.attention.output.LayerNorm", f"{module}.attention_norm", leaves=BOTH),
        *tensors(f"{block}.intermediate.dense", f"{module}.mlp.up", leaves=BOTH),
        *tensors(f"{block}.output.dense", f"{module}.mlp.down", leaves=BOTH),
        *tensors(f"{block}.output.LayerNorm", f"{module}.mlp_norm", leaves=BOTH),
    )


def output(hf_bias: str, hf_decoder: str, config: Any) -> Table:
    """Return the tensors of the output projection and its bias. The class has the bias under two names only if the projection is tied."""
    shared = tensors(hf_bias, "head.output", leaves=("bias",))
    return (
        (*shared, *tensors(hf_decoder, "head.output"))
        if config.tie_embeddings
        else (*tensors(hf_decoder, "head.output", leaves=BOTH), *shared)
    )


def _table(config: BertConfig) -> Table:
    """Return the tensors of all weights, with next-sentence prediction its pooler and head."""
    sentence = {"bert.pooler.dense": "head.sentence.dense", "cls.seq_relationship": "head.sentence.output"}
    return (
        *encoder("bert"),
        *tensors("cls.predictions.transform.dense", "head.dense", leaves=BOTH),
        *tensors("cls.predictions.transform.LayerNorm", "head.norm", leaves=BOTH),
        *output("cls.predictions", "cls.predictions.decoder", config),
        *(entry for hf, ours in sentence.items() if config.next_sentence for entry in tensors(hf, ours, leaves=BOTH)),
    )


_RENAMED = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))


def _masked_lm(architecture: str, *, next_sentence: bool) -> HuggingFaceMapping:
    return HuggingFaceMapping(
        architecture=architecture,
        model_type="bert",
        keys={**KEYS, **_POSITIONS},
        constants=CONSTANTS,
        table=_table,
        implied={"next_sentence": next_sentence, "is_classifier": False},
        copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
        ignored_weights=("bert.embeddings.position_ids", *(() if next_sentence else ("bert.pooler.*", "cls.seq_relationship.*"))),
        renamed=_RENAMED,
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
    keys={**UNTIED_KEYS, **_POSITIONS},
    constants=CONSTANTS,
    table=(
        *encoder("bert"),
        *tensors("bert.pooler.dense", "head.sentence.dense", leaves=BOTH),
        *tensors("classifier", "head.sentence.output", leaves=BOTH),
    ),
    implied=CLASSIFIER,
    nested=(LABELS,),
    ignored_keys=("tie_word_embeddings",),
    ignored_weights=("bert.embeddings.position_ids",),
    renamed=_RENAMED,
)

FAMILY = Family(
    config=BertConfig,
    build=_build,
    # Google's recipe (github.com/google-research/bert, modeling.py), here not truncated.
    initial_std=single_std,
    huggingface=(*(_CLASSIFIER, _masked_lm("BertForPreTraining", next_sentence=True)), _masked_lm("BertForMaskedLM", next_sentence=False)),
    tied_weights=tied_output,
)
