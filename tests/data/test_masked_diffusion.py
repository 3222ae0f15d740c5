"""Masked diffusion: rates and weights of sequences, what is masked, the loss beside a plain loop; runs, evaluation and refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pipeline.certification.reference import initialize
from pipeline.common.errors import UserError
from pipeline.config.rules import check
from pipeline.data.load.objectives import registry
from pipeline.data.load.objectives.objective import IGNORE
from pipeline.models import registry as models
from tests.data.test_masked import ids, whole
from tests.helpers import pipeline
from tests.training.one_rank import lines, run
from tests.world import configured

LENGTH = 32
DIFFUSION = "training.objective=masked_diffusion"


def config_of(text, *more):
    paths = (f"data.tokens={text}/tokens", f"tokenizer.path={text}/tokenizer")
    return configured("stage=pretrain", "model=roberta-tiny", f"training.sequence_length={LENGTH}", *paths, DIFFUSION, *more)


@pytest.mark.parametrize("eps", [1e-3, 0.4])
def test_rates_masks_and_weights(text, eps):
    """Rates are uniform in (eps, 1]; given its rate, every text token of a sequence is masked with that probability."""
    found, special = registry.open_training(config_of(text, f"training.diffusion_eps={eps}")).arrays(np.arange(4000)), ids(text)
    sequences, masked, weights = whole(found), found["targets"] != IGNORE, found["loss_weights"]
    is_text = ~np.isin(sequences, list(special.values()))
    assert np.array_equal(weights > 0, is_text)
    assert not (masked & ~is_text).any()
    assert (found["tokens"][masked] == special["<mask>"]).all(), "no random and no kept tokens"
    assert np.array_equal(found["tokens"][~masked], sequences[~masked])
    rates = 1 / weights.max(axis=1)
    assert np.array_equal(np.where(is_text, weights.max(axis=1, keepdims=True), 0), weights), "one weight in a sequence"
    assert eps < rates.min()
    assert rates.max() <= 1 + 1e-6
    # of 4,000 uniform numbers, the largest difference of the distributions is above 0.0257 in 1 % of all cases
    assert np.abs(np.sort(rates) - (eps + (1 - eps) * np.linspace(0, 1, 4000))).max() < 0.03 * (1 - eps)
    numbers, expected = masked.sum(axis=1), rates * is_text.sum(axis=1)
    deviations = (numbers - expected) / np.sqrt(np.maximum(expected * (1 - rates), 1e-3))
    assert abs(deviations.mean()) < 0.1
    assert 0.85 < deviations[(rates > 0.1) & (rates < 0.9)].std() < 1.15, "independent of each other"
    # The mean of mask / rate is 1 at every position: the loss has no bias.
    at = (masked * weights)[:, 1:-1].sum(axis=0) / is_text[:, 1:-1].sum(axis=0)
    assert at == pytest.approx(np.ones(LENGTH - 2), abs=0.35 if eps < 0.1 else 0.1)


def test_a_sample_depends_on_its_number_and_the_seed_alone(text):
    objective = registry.open_training(config_of(text))
    together = objective.arrays(np.arange(12, 36))
    again = registry.open_training(config_of(text, "parallel.tensor=2", "training.global_batch_size=128")).arrays(np.arange(20, 36))
    for name, array in again.items():
        assert np.array_equal(array, together[name][8:]), name
    other = registry.open_training(config_of(text, "training.seed=1")).arrays(np.arange(12, 36))
    assert not np.array_equal(other["loss_weights"], together["loss_weights"])
    validation, indices = registry.open_validation(config_of(text)), np.arange(4)
    count = int(validation.samples.counts[0])
    first, second = validation.arrays(indices), validation.arrays(indices + count)
    assert np.array_equal(whole(first), whole(second))
    assert not np.array_equal(first["targets"], second["targets"])
    assert objective.fingerprint(config_of(text), 4) != objective.fingerprint(config_of(text, "training.diffusion_eps=0.1"), 4)


def test_padding_has_no_weight(text):
    found = registry.open_training(config_of(text, "data.packing=best_fit")).arrays(np.arange(200))
    padding = found["documents"] == -1
    assert padding.any()
    assert (found["loss_weights"][padding] == 0).all()
    assert (found["targets"][padding] == IGNORE).all()


SETTINGS = ("model=roberta-tiny", DIFFUSION, "optimizer.schedule=constant")


@pytest.fixture(scope="module")
def straight(text, tmp_path_factory):
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("diffusion")
    paths = (f"data.tokens={text}/tokens", f"tokenizer.path={text}/tokenizer")
    return folder, run("pretrain", folder / "straight", *SETTINGS, *paths, "training.steps=4"), paths


def test_the_loss_is_that_of_a_plain_loop(straight):
    """The sum over masked tokens of cross-entropy / rate, divided by the number of text tokens of the global batch."""
    folder, config, _ = straight
    found = registry.open_training(config).arrays(np.arange(config.training.global_batch_size))
    model = models.build(config.model)
    initialize(model, config.model, config.training.seed)
    total, count = 0.0, 0
    for tokens, targets, weights in zip(found["tokens"], found["targets"], found["loss_weights"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor(tokens.astype(np.int64))[None])[0]
        for position in np.flatnonzero(weights):
            count += 1
            if targets[position] != IGNORE:
                total += float(F.cross_entropy(logits[position], torch.tensor(int(targets[position])))) * float(weights[position])
    assert lines(folder / "straight")[1]["loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.long
def test_a_run_continues_exactly_and_with_the_same_masks_only(straight):
    folder, _, paths = straight
    run("pretrain", folder / "run", *SETTINGS, *paths, "training.steps=2")
    for changed, said in (
        ("training.diffusion_eps=0.1", "training.diffusion_eps=0.1: .* was made with 0.001"),
        ("training.objective=auto", "training.objective=auto: .* was made with masked_diffusion"),
        ("training.seed=3", "training.seed=3: .* was made with 0"),
    ):
        with pytest.raises(UserError, match=said):
            run("pretrain", folder / "run", *SETTINGS, *paths, changed, "training.steps=4")
    run("pretrain", folder / "run", *SETTINGS, *paths, "training.steps=4")
    numbers = [[(m["loss"], m["grad_norm"]) for m in lines(folder / name).values()] for name in ("straight", "run")]
    assert numbers[0] == numbers[1]


def test_an_evaluation_has_the_objective_of_the_run(straight):
    folder, config, paths = straight
    common = [word for word in SETTINGS if word != DIFFUSION and not word.startswith("optimizer")]
    sizes = ("training.sequence_length=32", "training.global_batch_size=4", "training.micro_batch_size=4", "precision=fp32")
    pipeline("stage=evaluate", *common, *sizes, *paths, f"run_dir={folder}/straight", "stage.batches=1", "parallel.zero_stage=0")
    evaluation = json.loads((folder / "straight/evaluation.json").read_text())
    trained = [json.loads(line) for line in (folder / "straight/metrics.jsonl").read_text().splitlines()]
    expected = [line["validation_loss"] for line in trained if "validation_loss" in line][-1]
    assert evaluation["validation_loss"] == pytest.approx(expected, rel=1e-5)
    assert registry.objective_of(config).__name__ == "MaskedDiffusion"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((DIFFUSION,), None),
        ((DIFFUSION, "model=llama-tiny"), "training.objective=masked_diffusion: requires attention to both sides"),
        ((DIFFUSION, "model=bert-tiny"), "model.next_sentence=True: reads two segments"),
        ((DIFFUSION, "model=bert-tiny", "model.next_sentence=false"), None),
        ((DIFFUSION, "data.masking.rate=0.3"), "data.masking.rate=0.3: has no effect"),
        ((DIFFUSION, "data.infill.rate=0.5"), "data.infill.rate=0.5: reorders documents"),
        ((DIFFUSION, "training.goldfish_k=4"), "training.goldfish_k=4: has no effect with the objective masked_diffusion"),
        (("training.diffusion_eps=0.1",), "training.diffusion_eps=0.1: has no effect with the objective masked"),
    ],
)
def test_what_is_refused(settings, said):
    found = [str(violation) for violation in check.violations(configured("stage=pretrain", "model=roberta-tiny", *settings), 1)]
    assert any(said in text for text in found) if said else not found, found
