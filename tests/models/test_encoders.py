"""BERT, RoBERTa and ModernBERT compared with the Hugging Face classes: logits, padding, losses of both heads, gradients."""

import pytest
import torch
import transformers

from pipeline.certification.reference import initialize
from pipeline.layers.loss import IGNORE
from pipeline.models import registry
from pipeline.models.families.bert import BertConfig
from pipeline.models.families.modernbert import ModernBertConfig
from pipeline.models.families.roberta import PADDING, RobertaConfig

SIZES = {"layers": 2, "hidden": 48, "heads": 4, "ffn_hidden": 96, "vocab_size": 301, "max_positions": 40}
CONFIGS = {
    "bert": BertConfig(**SIZES),
    "bert-alone": BertConfig(**SIZES, next_sentence=False),
    "bert-untied": BertConfig(**SIZES, tie_embeddings=False),
    "roberta": RobertaConfig(**SIZES),
    "modernbert": ModernBertConfig(**{**SIZES, "layers": 4}, local_attention=8, rope_local_theta=100.0),
    "modernbert-untied": ModernBertConfig(**SIZES, local_attention=7, global_attn_every_n_layers=2, tie_embeddings=False),
}


def pair(config):
    """Return our model with random weights of considerable size, and the Hugging Face model with the same weights."""
    ours = registry.build(config)
    initialize(ours, config, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    stock = registry.mapping_of(config)
    content = stock.config_json(config)
    kind = transformers.AutoConfig.for_model(**{key: value for key, value in content.items() if key != "architectures"})
    theirs = getattr(transformers, stock.architecture)(kind).eval()
    weights = dict(ours.named_parameters())
    rows, copies = registry.stock_tensors(config)
    tensors = {row.hf_name: row.to_hf([weights[name].detach() for name in row.names]) for row in rows}
    tensors |= {copy: tensors[name] for copy, name in copies.items()}
    theirs.load_state_dict(tensors, strict=True)
    return ours, theirs


def drawn(config, rows=3, length=40):
    """Return tokens other than RoBERTa's padding token."""
    return torch.randint(PADDING + 1, config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(7))


def assert_equal_gradients(config, ours, theirs):
    gradients, stock = {name: parameter.grad for name, parameter in ours.named_parameters()}, dict(theirs.named_parameters())
    for row in registry.stock_tensors(config)[0]:
        joined = row.to_hf([gradients[name] for name in row.names])
        torch.testing.assert_close(joined, stock[row.hf_name].grad, rtol=1e-4, atol=1e-6, msg=row.hf_name)


def logits_of(output):
    return output.prediction_logits if hasattr(output, "prediction_logits") else output.logits


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_stock_class(name):
    config = CONFIGS[name]
    ours, theirs = pair(config)
    tokens = drawn(config)
    two = (torch.arange(40) >= 17).long().expand(3, 40)
    segments = {"segments": two} if getattr(config, "segments", 1) > 1 else {}
    with torch.no_grad():
        expected = theirs(tokens, **({"token_type_ids": two} if segments else {}))
        found = ours(tokens, **segments)
    assert found.std() > 0.1, "differences would not show"
    torch.testing.assert_close(found, logits_of(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_changes_nothing(name):
    config = CONFIGS[name]
    ours, theirs = pair(config)
    tokens, lengths = drawn(config), torch.tensor([40, 23, 1])
    valid = torch.arange(40) < lengths[:, None]
    tokens[~valid] = PADDING
    with torch.no_grad():
        expected = logits_of(theirs(tokens, attention_mask=valid.long()))
        found = ours(tokens, documents=torch.where(valid, 0, -1).int())
        alone = ours(tokens[1:2, :23])
    torch.testing.assert_close(found[valid], expected[valid], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1, :23], alone[0], rtol=1e-5, atol=1e-5)


def test_both_losses_and_their_gradients_are_those_of_the_stock_class():
    ours, theirs = pair(CONFIGS["bert"])
    tokens, labels = drawn(CONFIGS["bert"]), torch.tensor([0, 1, 1])
    targets = torch.where(torch.rand(3, 40, generator=torch.Generator().manual_seed(1)) < 0.2, tokens, IGNORE)
    theirs(tokens, labels=targets, next_sentence_label=labels).loss.backward()
    loss = ours(tokens, targets=targets, next_sentence=labels)
    loss.backward()
    expected = theirs(tokens, labels=targets, next_sentence_label=labels).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert_equal_gradients(CONFIGS["bert"], ours, theirs)


def test_next_sentence_prediction_of_roberta_is_refused():
    assert [violation.key for violation in RobertaConfig(next_sentence=True).violations()] == ["model.next_sentence"]
    assert [violation.key for violation in BertConfig(segments=1, heads=7).violations()] == ["model.heads", "model.segments"]
