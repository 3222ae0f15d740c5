"""Masked samples: rates, what is never chosen, determinism, segments of documents; by the stage's own opening, and as arithmetic."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pipeline.common.errors import UserError
from pipeline.config.data import MaskingConfig
from pipeline.data.load.objectives import masked, registry
from pipeline.data.load.objectives.masked import Vocabulary, mask
from pipeline.data.load.objectives.objective import IGNORE
from pipeline.layers import loss
from tests.data.library import here
from tests.helpers import pipeline
from tests.world import configured

LENGTH = 32
VOCABULARY = Vocabulary(first=0, between=1, mask=2, ordinary=np.arange(5, 200))


def config_of(text, *more, model="roberta-tiny"):
    paths = (f"data.tokens={text}/tokens", f"tokenizer.path={text}/tokenizer")
    return configured("stage=pretrain", f"model={model}", f"training.sequence_length={LENGTH}", *paths, *more)


def ids(text):
    added = json.loads((text / "tokenizer" / "tokenizer.json").read_text())["added_tokens"]
    return {token["content"]: token["id"] for token in added}


def whole(found):
    """The sequences as they were before tokens were changed."""
    return np.where(found["targets"] == IGNORE, found["tokens"], found["targets"])


def test_both_sides_mean_the_same_by_a_missing_target():
    assert loss.IGNORE == IGNORE


@settings(max_examples=50)
@given(
    rows=st.integers(1, 6),
    length=st.integers(1, 40),
    rate=st.floats(0.01, 1),
    shares=st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)),
    seed=st.integers(0, 1 << 32),
)
def test_masking_touches_what_it_chose_and_nothing_else(rows, length, rate, shares, seed):
    tokens = np.random.default_rng(seed).integers(0, 200, (rows, length)).astype(np.uint16)
    is_ordinary = np.isin(np.arange(200), VOCABULARY.ordinary)
    rates, samples = MaskingConfig(rate=rate, random=shares[0], keep=shares[1]), np.arange(rows) + seed
    changed, targets = mask(tokens, samples, is_ordinary, VOCABULARY, rates, seed)
    chosen = targets != IGNORE
    assert changed.dtype == tokens.dtype
    assert np.array_equal(changed[~chosen], tokens[~chosen])
    assert np.array_equal(targets[chosen], tokens[chosen])
    candidates = is_ordinary[tokens]
    assert not (chosen & ~candidates).any()
    assert np.array_equal(chosen.sum(axis=1), np.minimum(np.maximum(np.rint(rate * candidates.sum(axis=1)), 1), candidates.sum(axis=1)))
    assert (is_ordinary[changed[chosen]] | (changed[chosen] == VOCABULARY.mask)).all(), "no other special token is drawn"
    for row in range(rows):  # each by itself is the same as among others
        alone = mask(tokens[row : row + 1], samples[row : row + 1], is_ordinary, VOCABULARY, rates, seed)
        assert np.array_equal(alone[0][0], changed[row])
        assert np.array_equal(alone[1][0], targets[row])


def test_rates_and_places():
    tokens = np.full((2000, 100), 7, dtype=np.uint16)
    is_ordinary = np.isin(np.arange(200), VOCABULARY.ordinary)
    changed, targets = mask(tokens, np.arange(2000), is_ordinary, VOCABULARY, MaskingConfig(), 0)
    chosen = targets != IGNORE
    assert (chosen.sum(axis=1) == 15).all()
    assert chosen.mean(axis=0).min() > 0.11, "every place has its turn"
    seen = changed[chosen]
    # six standard deviations of 30,000 draws are 0.014 and 0.010
    assert (seen == VOCABULARY.mask).mean() == pytest.approx(0.8, abs=0.014)
    assert (seen == 7).mean() == pytest.approx(0.1 + 0.1 / 195, abs=0.011)
    drawn = np.bincount(seen[(seen != 7) & (seen != VOCABULARY.mask)], minlength=200)
    assert (drawn[VOCABULARY.ordinary] > 0).sum() > 180, "random tokens are of the whole vocabulary"
    assert np.abs(np.corrcoef(chosen[:, 0], chosen[:, 1])[0, 1]) < 0.15


def test_sequences_are_the_text_between_special_tokens(text):
    objective, special = registry.open_training(config_of(text)), ids(text)
    plain = objective.samples.samples(np.arange(50))[:, :-1]
    assert plain.shape == (50, LENGTH - 2)
    found = objective.arrays(np.arange(50))
    assert found.keys() == {"tokens", "targets"}
    sequences = whole(found)
    assert (sequences[:, 0] == special["<s>"]).all()
    assert (sequences[:, -1] == special["</s>"]).all()
    assert np.array_equal(sequences[:, 1:-1], plain), "text goes on over the ends of documents"
    assert not np.isin(found["targets"], list(special.values())).any()
    assert special["<pad>"] == 1, "what the stock class takes for padding"


def test_an_epoch_has_all_text_and_the_next_one_other_masks(text):
    objective = registry.open_validation(config_of(text))
    count = int(objective.samples.counts[0])
    first, second = (objective.arrays(np.arange(count) + epoch * count) for epoch in (0, 1))
    stream = objective.samples.stream.read(np.zeros(1, dtype=np.int64), count * (LENGTH - 2))[0]
    assert np.array_equal(whole(first)[:, 1:-1].reshape(-1), stream)
    assert np.array_equal(whole(first), whole(second))
    assert not np.array_equal(first["targets"], second["targets"])


@pytest.mark.parametrize("model", ["roberta-tiny", "bert-tiny", pytest.param("modernbert-tiny", marks=pytest.mark.long)])
def test_a_sample_depends_on_its_number_and_the_seed_alone(text, model):
    config = config_of(text, model=model)
    objective, again = registry.open_training(config), registry.open_training(config)
    together = objective.arrays(np.arange(12, 36))
    for part, rows in ((np.arange(12, 20), slice(0, 8)), (np.arange(20, 36), slice(8, 24))):
        for name, array in again.arrays(part).items():
            assert np.array_equal(array, together[name][rows]), name
    other = registry.open_training(config_of(text, "training.seed=1", model=model)).arrays(np.arange(12, 36))
    assert not np.array_equal(other["targets"], together["targets"])


def test_packed_documents_have_padding_that_nothing_is_asked_of(text):
    objective = registry.open_training(config_of(text, "data.packing=best_fit"))
    found, special = objective.arrays(np.arange(200)), ids(text)
    padding = found["documents"] == -1
    assert 0 < padding.mean() < 0.5
    assert (found["targets"][padding] == IGNORE).all()
    last = LENGTH - 1 - padding.sum(axis=1)
    assert (found["tokens"][np.arange(200), last] == special["</s>"]).all()
    assert ((found["documents"] == -1).cumsum(axis=1) > 0).sum() == padding.sum(), "padding is at the end"


def test_sentence_pairs(text):
    config = config_of(text, model="bert-tiny")
    objective, special = registry.open_training(config), ids(text)
    found = objective.arrays(np.arange(400))
    sequences, padding = whole(found), found["documents"] == -1
    plain = objective.samples.samples(np.arange(400))
    assert found["next_sentence"].mean() == pytest.approx(0.5, abs=0.15)
    assert (sequences[:, 0] == special["<s>"]).all()
    assert (found["targets"][padding] == IGNORE).all()
    assert (found["segments"][padding] == 0).all()
    followed = 0
    for row in range(400):
        length = int((~padding[row]).sum())
        closes = np.flatnonzero(sequences[row, :length] == special["</s>"])
        assert closes[-1] == length - 1
        middle = int(closes[0])
        assert 2 <= middle < length - 2, "both segments have text"
        assert np.array_equal(found["segments"][row, :length], np.arange(length) > middle)
        one, two = sequences[row, 1:middle].tolist(), sequences[row, middle + 1 : length - 1].tolist()
        written = ",".join(map(str, plain[row].tolist())) + ","
        assert ",".join(map(str, one)) + "," in written
        follows = ",".join(map(str, one + two)) + "," in written
        assert follows or found["next_sentence"][row] == 1
        followed += follows
    assert followed < 0.65 * 400


@given(st.integers(2, 1000), st.integers(0, 1 << 40), st.integers(0, 100))
def test_elsewhere_is_another_sample_of_the_same_epoch(epoch, sample, seed):
    samples = np.arange(sample, sample + 20)
    others = masked.other_samples(samples, epoch, seed)
    assert (others != samples).all()
    assert np.array_equal(others // epoch, samples // epoch)


def test_the_stock_tokenizer_pads_and_masks(text):
    stock = AutoTokenizer.from_pretrained(text / "tokenizer")
    assert (stock.pad_token, stock.cls_token, stock.sep_token, stock.mask_token) == ("<pad>", "<s>", "</s>", "<mask>")
    padded = stock(["Wald und Schnee und Wald und Schnee", f"Wald {stock.mask_token}"], padding=True)["input_ids"]
    assert padded[1].count(ids(text)["<mask>"]) == 1
    assert padded[1][-1] == ids(text)["<pad>"]


def test_a_tokenizer_without_the_tokens_is_refused_by_their_names(tokens, tokenizer, text, tmp_path):
    common = (
        "stage=pretrain",
        "model=roberta-tiny",
        f"training.sequence_length={LENGTH}",
        f"data.tokens={tokens}",
        f"run_dir={tmp_path}/run",
    )
    said = pipeline(*common, f"tokenizer.path={tokenizer}", expect=2)
    for key in ("data.masking.mask", "data.masking.first", "data.masking.between", "tokenizer.special_tokens"):
        assert key in said
    assert "Traceback" not in said
    assert "tokenizer.path" in pipeline(*common, f"tokenizer.path={text}/tokenizer", expect=2), "another tokenizer than the tokens'"
    assert not (tmp_path / "run").exists()


def test_text_where_roberta_has_padding_is_refused(shards, tmp_path):
    common = (f"data.shards={shards}", f"tokenizer.path={tmp_path}/tokenizer", "tokenizer=roberta", "tokenizer.special_tokens=[]")
    here("stage=train_tokenizer", *common, "tokenizer.vocab_size=300", "tokenizer.report=false")
    here("stage=tokenize", *common, f"data.tokens={tmp_path}/tokens")
    named = ("data.masking.mask='</s>'", "data.masking.first='</s>'")
    config = config_of(tmp_path, *named)
    with pytest.raises(UserError, match="padding"):
        registry.open_training(config)
    registry.open_training(config_of(tmp_path, *named, model="bert-tiny"))
    shutil.rmtree(tmp_path / "tokenizer")
    with pytest.raises(UserError, match=r"contains no tokenizer\.json"):
        registry.open_training(config)
