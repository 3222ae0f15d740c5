"""The goldfish loss: the same targets of a text have no loss, wherever it is; what is kept and dropped at the ends; runs and refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.common.errors import UserError
from pipeline.config.rules import check
from pipeline.data.load.objectives import registry
from pipeline.data.load.objectives.causal import dropped
from pipeline.data.load.objectives.objective import IGNORE
from tests.training.one_rank import lines, run
from tests.world import configured

END = 0
rows = st.integers(2, 40).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 4), min_size=width, max_size=width), min_size=1, max_size=5)
)


@given(rows, st.integers(2, 5), st.integers(1, 6))
def test_a_target_is_dropped_by_the_tokens_before_it_in_its_document(rows, every, context):
    found = dropped(np.array(rows, dtype=np.uint16), END, every, context)
    decisions: dict[tuple[int, ...], bool] = {}
    for row, result in zip(rows, found.tolist(), strict=True):
        assert len(result) == len(row) - 1
        for position, is_dropped in enumerate(result):
            before = row[: position + 1]
            begin = len(before) - before[::-1].index(END) if END in before else None
            known = before[begin or 0 :]
            if len(known) >= context:
                assert decisions.setdefault(tuple(known[-context:]), is_dropped) == is_dropped
            else:
                assert is_dropped == (begin is None), "kept at the begin of a document, dropped where that may be in another sample"


def test_one_of_k_targets_is_dropped_and_copies_lose_the_same_ones():
    rng = np.random.default_rng(0)
    text = rng.integers(1, 50_000, (8, 4097)).astype(np.uint32)
    copy = rng.integers(1, 50_000, 300).astype(np.uint32)
    for row, start in enumerate((0, 1, 77, 2048, 3797)):
        text[row, start : start + 300] = copy
    for every in (2, 4, 50):
        found = dropped(text, END, every, 13)
        assert found[:, 13:].mean() == pytest.approx(1 / every, rel=0.1)
        within = [found[row, start + 12 : start + 299].tolist() for row, start in enumerate((0, 1, 77, 2048, 3797))]
        assert all(other == within[0] for other in within)
        assert np.array_equal(dropped(text[3:4], END, every, 13), found[3:4]), "each by itself is the same as among others"


def config_of(tokens, *more):
    return configured("stage=pretrain", "model=gpt-tiny", "training.sequence_length=32", f"data.tokens={tokens}", *more)


@pytest.mark.parametrize("packing", ["windows", "best_fit"])
def test_samples_lose_targets_in_training_alone(tokens, packing):
    common = (f"data.packing={packing}",)
    goldfish = ("training.goldfish_k=3", "training.goldfish_context=5")
    config, plain = config_of(tokens, *common, *goldfish), config_of(tokens, *common)
    indices = np.arange(40)
    (training, validation), (all_targets, _) = registry.open_data(config, (0, 1)), registry.open_data(plain, (0, 1))
    found, expected = training.arrays(indices), all_targets.arrays(indices)
    assert np.array_equal(found["tokens"], expected["tokens"])
    lost = found["targets"] != expected["targets"]
    assert (found["targets"][lost] == IGNORE).all()
    assert 0.25 < lost.mean() < 0.6
    assert np.array_equal(training.arrays(indices[7:8])["targets"][0], found["targets"][7])
    assert (validation.arrays(indices[:4])["targets"] != IGNORE).all()
    every = np.arange(training.samples.counts.sum())
    other = registry.open_training(config_of(tokens, *common, *goldfish, "training.seed=5", "parallel.tensor=2")).arrays(every)
    targets = {text.tobytes(): row for text, row in zip(*training.arrays(every).values(), strict=True)}
    for text, row in zip(*other.values(), strict=True):
        assert np.array_equal(targets[text.tobytes()], row), "the hash does not depend on the seed of the run"
    assert not registry.objective_of(config).every_position_counts(config)
    assert training.fingerprint(config, 4) != all_targets.fingerprint(plain, 4)


@pytest.mark.long
def test_a_run_continues_exactly_and_with_the_same_targets_only(tokens, tmp_path):
    goldfish = (f"data.tokens={tokens}", "training.goldfish_k=3", "training.goldfish_context=5")
    run("pretrain", tmp_path / "straight", *goldfish, "training.steps=4", "optimizer.schedule=constant")
    run("pretrain", tmp_path / "run", *goldfish, "training.steps=2", "optimizer.schedule=constant")
    for changed, said in (
        ("training.goldfish_k=4", "training.goldfish_k=4: .* was made with 3"),
        ("training.goldfish_context=6", "training.goldfish_context=6: .* was made with 5"),
    ):
        with pytest.raises(UserError, match=said):
            run("pretrain", tmp_path / "run", *goldfish, changed, "training.steps=4", "optimizer.schedule=constant")
    run("pretrain", tmp_path / "run", *goldfish, "training.steps=4", "optimizer.schedule=constant")
    straight, continued = lines(tmp_path / "straight"), lines(tmp_path / "run")
    assert [(m["loss"], m["grad_norm"]) for m in continued.values()] == [(m["loss"], m["grad_norm"]) for m in straight.values()]
    run("pretrain", tmp_path / "all", goldfish[0], "training.steps=1")
    assert lines(tmp_path / "all")[1]["loss"] != straight[1]["loss"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("training.goldfish_k=4",), None),
        (("training.goldfish_k=1",), "training.goldfish_k=1: would drop every target"),
        (("training.goldfish_context=5",), "training.goldfish_context=5: has no effect with training.goldfish_k=0"),
        (("training.goldfish_k=4", "training.goldfish_context=256"), "must be less than training.sequence_length=256"),
        (("training.goldfish_k=4", "data.infill.rate=0.5"), "data.infill.rate=0.5: reorders documents"),
        (("training.goldfish_k=4", "model=bert-tiny"), "training.goldfish_k=4: has no effect with the objective masked"),
        (("training.goldfish_k=4", "model=deepseek-tiny", "model.mtp_depth=1"), "model.mtp_depth=1: predicts further tokens"),
    ],
)
def test_what_is_refused(settings, said):
    found = [str(violation) for violation in check.violations(configured("stage=pretrain", "model=llama-tiny", *settings), 1)]
    assert any(said in text for text in found) if said else not found, found
