"""Loss spikes: the rule, the arithmetic of skipped samples, and runs that return to a checkpoint, also killed and in other layouts."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import shutil
import string
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint import native
from pipeline.checkpoint.native import TrainState
from pipeline.common import events
from pipeline.common.errors import UserError
from pipeline.config.rules import check
from pipeline.config.training import TrainingConfig
from pipeline.training import rewinds, skipped_samples
from pipeline.training.rewinds import LossSpikes, Spike
from pipeline.training.skipped_samples import Rewind, SkippedSamples
from pipeline.training.trainer import Trainer
from tests.checkpoint import small_checkpoints
from tests.helpers import RAW, load_tool, pipeline, prose, run_ranks
from tests.training import one_rank
from tests.world import configured

pytestmark = pytest.mark.world

TINY = (
    *("model=llama-tiny", "model.layers=4", "model.hidden=32", "model.ffn_hidden=64", "model.vocab_size=320", "precision=fp32"),
    *("training.sequence_length=32", "training.global_batch_size=16", "training.micro_batch_size=4", "training.validation_batches=1"),
    *("optimizer.warmup_steps=2", "optimizer.lr=0.01", "optimizer.schedule=constant", "tracking=disabled", "parallel.zero_stage=0"),
    *("training.spike_factor=8", "training.spike_window=16", "checkpoint.every=5", "checkpoint.keep=4", "training.steps=36"),
)
#: Steps 27 to 29 have samples of another corpus.
PLANTED = "data.phases=[{until_tokens: 13312, weights: {calm: 1}}, {until_tokens: 14848, weights: {other: 1}}, {weights: {calm: 1}}]"
EXACT = ("step", "samples", "loss", "grad_norm", "lr")


def rule(factor: float = 6.0, window: int = 16, patience: int = 2, earliest: int = 0, *, scaled: bool = False) -> LossSpikes:
    return LossSpikes(TrainingConfig(spike_factor=factor, spike_window=window, spike_patience=patience), earliest, scaled=scaled)


def observed(spikes: LossSpikes, losses: list[float | None], norms: list[float | None] | None = None) -> Spike | None:
    for step, (loss, norm) in enumerate(zip(losses, norms or [1.0] * len(losses), strict=True), start=1):
        spikes.observe({"step": step, "loss": loss, "grad_norm": norm})
    return spikes.found


def noise(count: int) -> list[float]:
    rng = random.Random(0)
    return [math.exp(rng.gauss(1.0 - 0.001 * step, 0.01)) for step in range(count)]


def test_a_spike_is_found_at_its_first_step_and_noise_a_trend_and_an_outlier_are_not():
    assert observed(rule(), noise(5000)) is None
    assert observed(rule(), [*noise(40), 9.0, *noise(40)]) is None, "a single step with patience 2"
    found = observed(rule(), [*noise(40), 9.0, 9.0, 9.0])
    assert found is not None
    assert (found.first, found.last) == (41, 42)
    assert found.reason.startswith("loss 9 above 2.")
    assert observed(rule(earliest=42), [*noise(40), 9.0, 9.0]) is None, "no checkpoint precedes it"
    assert observed(rule(), [*noise(10), 9.0, 9.0]) is None, "the window is not full"


def test_gradient_norms_and_values_that_are_not_finite():
    calm, norms = noise(42), [*noise(40), 50.0, 50.0]
    assert "gradient norm 50 above" in observed(rule(), calm, norms).reason
    lost: list[float | None] = [*noise(40), None, math.nan]
    assert observed(rule(), lost).reason == "loss not finite"
    assert observed(rule(), calm, lost).reason == "gradient norm not finite"
    assert observed(rule(scaled=True), calm, lost) is None, "fp16 searches its scale"


@given(st.lists(st.sampled_from([1.0, 1.01, 0.99, 1.5, 3.0, None]), min_size=12, max_size=60), st.integers(0, 60))
def test_a_continued_run_decides_as_an_uninterrupted_one(tmp_path_factory, losses, stop):
    """Whatever the step of the checkpoint is, and for a spike that was found but not acted on."""
    straight = rule(4.0, 8, 2)
    found = observed(straight, losses)
    stop = min(stop, len(losses), found.last + 3 if found else len(losses))
    folder = tmp_path_factory.mktemp("run")
    lines = [{"step": step, "loss": loss, "grad_norm": 1.0} for step, loss in enumerate(losses, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:stop]) + '{"step": 1, "validation_loss": 2}\n')
    continued = rule(4.0, 8, 2)
    continued.restore(folder)
    for line in lines[stop:]:
        continued.observe(line)
    assert continued.found == found


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=4),
    st.integers(0, 40),
    st.lists(st.integers(1, 15), min_size=1, max_size=6),
)
def test_steps_take_all_samples_but_the_skipped_ones_in_order(ranges, first, sizes):
    skipped = SkippedSamples([Rewind(0, 0, "", begin, begin + count) for begin, count in ranges])
    taken, position = [], first
    for size in sizes:
        taken.append(skipped.take(position, size))
        position = skipped.after(position, size)
    gone = {sample for begin, count in ranges for sample in range(begin, begin + count)}
    expected = [sample for sample in range(first, first + 500) if sample not in gone][: sum(sizes)]
    assert np.concatenate(taken).tolist() == expected
    assert taken[0].dtype == np.int64


def test_a_damaged_file_is_refused(tmp_path):
    assert skipped_samples.read(tmp_path).rewinds == ()
    entry = SkippedSamples([Rewind(5, 8, "loss 9 above 2", 80, 160)])
    skipped_samples.write(tmp_path, entry)
    assert skipped_samples.read(tmp_path).rewinds == entry.rewinds
    path = tmp_path / "skipped_samples.json"
    path.write_text(path.read_text().replace("160", "161"))
    with pytest.raises(UserError, match=r"skipped_samples.json=.*checksum.*decides which samples"):
        skipped_samples.read(tmp_path)


@pytest.mark.parametrize("made", [10, 11, 13])
def test_an_interrupted_run_skips_the_samples_of_an_uninterrupted_one(tmp_path, made):
    """Which returns three steps after the last one of the spike."""
    small_checkpoints.write(tmp_path, small_checkpoints.state(), 5)
    config = configured("stage=pretrain", "model=llama-tiny", f"run_dir={tmp_path}", "training.global_batch_size=4")
    error = rewinds.SpikeFoundError(TrainState(made, 4 * made), Spike(9, 10, "loss 9 above 2"))
    (entry,) = rewinds.rewind(config, error, SkippedSamples())[1].rewinds
    assert (entry.first, entry.last) == (4 * 5, 4 * 13)


@pytest.fixture(scope="module")
def blend(tokenizer, tmp_path_factory) -> tuple[str, ...]:
    """Settings of a blend of a corpus of prose and one of random letters."""
    folder = tmp_path_factory.mktemp("corpora")
    rng = random.Random(1)
    texts = {
        "calm": [prose(seed, 6) for seed in range(150)],
        "other": ["".join(rng.choices(string.ascii_uppercase + string.digits, k=500)) for _ in range(60)],
    }
    for name, documents in texts.items():
        lines = [json.dumps({"id": str(number), "text": text}) + "\n" for number, text in enumerate(documents)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    shards, tokens = folder / "shards", folder / "tokens"
    named = ",".join(f"{name}:[{folder}/{name}.jsonl]" for name in texts)
    pipeline("stage=shard", *RAW, f"data.corpora={{{named}}}", f"data.shards={shards}", "data.validation_fraction=0.1")
    pipeline("stage=tokenize", f"data.shards={shards}", f"tokenizer.path={tokenizer}", f"data.tokens={tokens}")
    return f"data.tokens={tokens}", "data.blend={calm: {}, other: {}}", PLANTED


def exact(run_dir: Path) -> list[tuple]:
    return [tuple(line[key] for key in EXACT) for line in one_rank.lines(run_dir).values()]


@pytest.fixture(scope="module")
def straight(blend, tmp_path_factory) -> tuple[Path, str]:
    """A run on one rank that returns from a spike."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    return folder, pipeline(*TINY, *blend, f"run_dir={folder}")


def test_a_run_returns_to_the_checkpoint_before_a_spike_and_skips_its_samples(straight):
    run_dir, printed = straight
    (entry,) = skipped_samples.read(run_dir).rewinds
    assert (entry.checkpoint, entry.spike) == (25, 27)
    assert (entry.first, entry.last) == (25 * 16, 31 * 16), "up to three steps after the second one of the spike"
    lines = exact(run_dir)
    assert [line[0] for line in lines] == list(range(1, 37)), "no line of an abandoned step"
    assert [line[1] for line in lines] == [16 * (step + 6 * (step > 25)) for step in range(1, 37)]
    assert max(line[2] for line in lines[25:]) < lines[15][2], "no loss of the other corpus"
    (event,) = [event for event in events.read(run_dir) if event["event"] == "rewind"]
    assert (event["step"], event["checkpoint"], event["first"], event["last"]) == (31, 25, 400, 496)
    assert [event["event"] for event in events.read(run_dir)].count("run_end") == 1
    assert "the loss spiked at step 27" in printed
    assert "without samples 400 to 495 (rewind 1 of training.max_rewinds=10)" in printed
    assert (run_dir / "manifest.json").is_file()


def test_without_the_rule_the_run_trains_on(blend, straight, tmp_path):
    unread = ("training.spike_window=128", "training.spike_patience=2", "training.max_rewinds=10")  # the defaults
    train(tmp_path / "run", *blend, "training.spike_factor=0", *unread, "training.steps=28", "checkpoint.every=0")
    lines = exact(tmp_path / "run")
    assert lines[:25] == exact(straight[0])[:25]
    assert lines[26][2] > 2 * lines[25][2], "the spike is planted"
    assert not (tmp_path / "run" / "skipped_samples.json").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks, settings",
    [
        pytest.param(2, ("parallel.zero_stage=3", "training.ema=0.9"), id="zero 3"),
        pytest.param(2, ("parallel.pipeline=2", "precision=bf16"), id="pipeline", marks=pytest.mark.long),
        pytest.param(4, ("parallel.tensor=2", "parallel.zero_stage=1"), id="tensor", marks=pytest.mark.long),
    ],
)
def test_in_any_layout_as_a_run_that_never_saw_the_spike(blend, straight, tmp_path, ranks, settings):
    """The other run has the list of samples from the begin: no weight or moment of the spike remains."""
    common = ("stage=pretrain", *TINY, *blend, *settings, "training.steps=34")
    run_ranks(ranks, *common, f"run_dir={tmp_path}/returned")
    (tmp_path / "never").mkdir()
    shutil.copy(tmp_path / "returned" / "skipped_samples.json", tmp_path / "never")
    run_ranks(ranks, *common, f"run_dir={tmp_path}/never")
    assert skipped_samples.read(tmp_path / "returned").rewinds[0].last == 31 * 16
    assert exact(tmp_path / "returned") == exact(tmp_path / "never")
    lines = exact(straight[0])[:34]
    assert [line[1] for line in exact(tmp_path / "returned")] == [line[1] for line in lines]
    if "precision=bf16" not in settings:
        assert [line[2] for line in exact(tmp_path / "returned")] == pytest.approx([line[2] for line in lines], rel=0.1)


def test_a_run_returns_by_hand_and_skips_what_it_is_told(blend, straight, tmp_path):
    """Whoever stops a run after a spike gets the run that would have returned by itself."""
    run_dir, tool = tmp_path / "run", load_tool("checkpoint").main
    settings = (*blend, "training.spike_factor=0", "checkpoint.every=25", "training.spike_window=128")
    train(run_dir, *settings, "training.steps=32")
    with pytest.raises(SystemExit):
        tool(["rewind", str(run_dir), "--skip-to", "30"])
    for wrong in (["--to", "24"], ["--to", "25", "--skip-to", "24"], ["--to", "25", "--skip-to", "33"]):
        assert tool(["rewind", str(run_dir), *wrong]) == 2
    assert not (run_dir / "skipped_samples.json").exists()
    assert tool(["rewind", str(run_dir), "--to", "25", "--skip-to", "31"]) == 0
    assert [folder.name for folder in native.complete(run_dir)] == ["step-00000025"]
    train(run_dir, *settings)
    assert exact(run_dir) == exact(straight[0])
    assert tool(["rewind", str(run_dir), "--to", "25", "--skip-from", "30", "--skip-to", "33"]) == 0
    train(run_dir, *settings)
    read = [line[1] // 16 for line in exact(run_dir)[25:]]
    assert read == [32, 33, 34, 35, 36, 40, 41, 42, 43, 44, 45], "samples after each step, in batches"


class Killed(BaseException):
    """The end of a process, as far as files show it."""


def train(run_dir: Path, *settings: str) -> None:
    """Train in this process, with a checkpoint at each step."""
    one_rank.run("pretrain", run_dir, *TINY, "model.heads=8", "checkpoint.every=1", "checkpoint.keep=12", *settings)


@pytest.fixture(scope="module")
def undisturbed(blend, tmp_path_factory) -> list[tuple]:
    """The metrics of a run with a checkpoint at every step, which ends by itself."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(folder, *blend)
    assert skipped_samples.read(folder).rewinds[0].checkpoint == 25
    return exact(folder)


def kill_at(moment: int | str, patch: pytest.MonkeyPatch) -> None:
    """Let the run end in a step, or while it returns."""
    one_step, drop, calls = Trainer.train, rewinds.drop_abandoned, [0]

    def killed(*_: object) -> None:
        raise Killed

    def step(self, *arguments):
        calls[0] += 1
        return killed() if calls[0] == moment else one_step(self, *arguments)

    def killed_after(run_dir):
        if (run_dir / skipped_samples.FILE).is_file():
            if moment == "removed":
                drop(run_dir)
            killed()

    patch.setattr(Trainer, "train", step)
    if moment == "half removed":
        patch.setattr(rewinds.catalog, "write", killed)
    elif isinstance(moment, str):
        patch.setattr(rewinds, "drop_abandoned", killed_after)


@pytest.mark.long
@pytest.mark.parametrize(
    "moment", [30, *(pytest.param(later, marks=pytest.mark.long) for later in (28, 31, "listed", "half removed", "removed"))]
)
def test_a_killed_run_skips_the_same_samples_and_ends_with_equal_bits(blend, undisturbed, tmp_path, monkeypatch, moment):
    """Killed in a step after the first ones of the spike, whose checkpoints are complete, or while it returns."""
    with monkeypatch.context() as patch:
        kill_at(moment, patch)
        with pytest.raises(Killed):
            train(tmp_path / "run", *blend)
    train(tmp_path / "run", *blend)
    assert exact(tmp_path / "run") == undisturbed
    (entry,) = skipped_samples.read(tmp_path / "run").rewinds
    assert (entry.checkpoint, entry.first, entry.last) == (25, 25 * 16, 31 * 16)


@pytest.mark.long
def test_the_run_ends_after_max_rewinds_and_a_kept_checkpoint_is_renamed(blend, tmp_path):
    settings = (*blend, "training.spike_factor=1e-3", "training.spike_patience=1", "training.max_rewinds=1")
    with pytest.raises(UserError) as raised:
        train(tmp_path / "run", *settings)
    assert "training.max_rewinds=1: the loss spiked at step" in str(raised.value)
    assert "after 1 rewinds of this run; skipped_samples.json lists them" in str(raised.value)
    assert events.read(tmp_path / "run")[-1]["code"] == 2
    (entry,) = skipped_samples.read(tmp_path / "run").rewinds
    newest = native.complete(tmp_path / "run")[-1]
    (newest / "keep").write_text("mine")
    skipped_samples.write(tmp_path / "run", SkippedSamples([entry, dataclasses.replace(entry, first=0, last=10**6)]))
    rewinds.drop_abandoned(tmp_path / "run")
    assert native.complete(tmp_path / "run") == []
    assert newest.with_name(f"{newest.name}.abandoned").is_dir(), "of those that are removed, the one that a user keeps"


def test_settings_that_cannot_work_are_refused():
    base = ("stage=pretrain", "run_dir=runs/never", "training.spike_factor=8")
    with pytest.raises(UserError) as raised:
        check.check(configured(*base, "checkpoint.every=1", "training.spike_patience=3"), 1)
    said = str(raised.value)
    assert "checkpoint.keep=2: with checkpoint.every=1 removes the checkpoint before a loss spike" in said
    assert "fix: set it to at least 7" in said
    assert "training.max_skipped_steps=5: ends the run before it can return" in said
    with pytest.raises(UserError, match=r"checkpoint.keep=6: with checkpoint.every=1 removes the checkpoint"):
        check.check(configured(*base, "checkpoint.every=1", "checkpoint.keep=6", "training.spike_patience=3"), 1)
    with pytest.raises(UserError, match=r"checkpoint.every=0: is required by training.spike_factor=8.0"):
        check.check(configured(*base, "checkpoint.every=0"), 1)
