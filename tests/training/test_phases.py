"""training.phases: other lengths, batches, corpora and RoPE settings, with the state, and with every sample read once."""

import gc
import itertools
import random
import shutil
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.certification.batches import with_loss_scale
from pipeline.certification.reference import initialize, plain_loop
from pipeline.checkpoint import native
from pipeline.common import knobs
from pipeline.common.errors import UserError
from pipeline.config import phases
from pipeline.config.rules import check
from pipeline.data.load import blend
from pipeline.data.load.blend_schedule import BlendSchedule, Phase
from pipeline.data.load.objectives.causal import Causal
from pipeline.layers.rotary import Rotary
from pipeline.models import registry
from pipeline.training import run as training_run
from tests.helpers import pipeline, run_ranks, start_ranks, torchrun
from tests.training.one_rank import TINY, lines, run
from tests.world import configured

LLAMA = (
    *("model=llama-tiny", "model.layers=1", "model.kv_heads=1", "model.max_positions=128", "training.document_mask=true"),
    *("optimizer.schedule=constant", "training.validate_every=4"),
)
LONG = 'sequence_length: 128, global_batch_size: 2, overrides: ["model.rope_theta=500000", "training.micro_batch_size=1"]'
#: 32 tokens, then 128 with another RoPE base, then 64.
PHASES = f"training.phases=[{{until_step: 2}}, {{until_step: 4, {LONG}}}, {{sequence_length: 64}}]"
END = "training.steps=6"
BLEND = "++data.blend={web: {}, books: {}}"
EXTENDED = (
    "training.phases=[{until_step: 3, weights: {web: 1}}, {until_tokens: 1408, sequence_length: 128, weights: {web: 1, books: 3}}, "
    "{sequence_length: 64, weights: {web: 2, books: 1}}]"
)


def numbers(run_dir: Path) -> dict[int, tuple]:
    return {step: tuple(line[key] for key in ("loss", "grad_norm", "lr", "samples", "tokens")) for step, line in lines(run_dir).items()}


@pytest.fixture(scope="module")
def straight(tokens, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    run("pretrain", folder, f"data.tokens={tokens}", *LLAMA, PHASES, END)
    return folder


def test_a_run_goes_through_its_phases_in_one_directory(straight):
    found = numbers(straight)
    assert [line[3] for line in found.values()] == [4, 8, 16, 24, 28, 32], "samples of 32 tokens: 4 x 32, 2 x 128, 2 x 64"
    assert all(line[4] == 32 * line[3] for line in found.values())
    models = [native.read_index(native.complete(straight)[step - 1]).config["model"] for step in (2, 3, 6)]
    assert [model["rope_theta"] for model in models] == [10000.0, 500000.0, 500000.0]


def documents_of(rows: np.ndarray, text: int, end: int) -> torch.Tensor:
    """Documents by a loop over tokens; a sequence consists of texts of so many tokens, which are no neighbors."""
    found = np.zeros(rows.shape, dtype=np.int32)
    for row, position in itertools.product(range(len(rows)), range(1, rows.shape[1])):
        new = rows[row, position - 1] == end or position % text == 0
        found[row, position] = found[row, position - 1] + new
    return torch.from_numpy(found)


def test_phases_equal_a_plain_loop_that_changes_the_model_by_hand(straight, tokens):
    config = configured("stage=pretrain", *TINY, *LLAMA, PHASES, END, f"data.tokens={tokens}")
    data = Causal.open_training(config)
    config = knobs.changed(config, {"training.phases": []})  # the loop below changes what they change
    model = registry.build(config.model)
    initialize(model, config.model, config.training.seed)

    def batches():
        first = 0
        for step, (count, length) in enumerate([(4, 32)] * 2 + [(8, 128)] * 2 + [(4, 64)] * 2):
            if step == 2:  # the context is extended
                tables = next(part for part in model.modules() if isinstance(part, Rotary))
                tables.theta = 500000.0
                tables.compute_buffers(torch.device("cpu"))
            text = data.samples.samples(np.arange(first, first + count)).astype(np.int64)
            rows = text[:, :-1].reshape(-1, length)
            documents = documents_of(rows, 32, data.samples.end_of_document)
            targets = torch.from_numpy(text[:, 1:].reshape(-1, length))
            yield torch.from_numpy(rows), with_loss_scale({"targets": targets, "documents": documents})
            first += count

    expected = plain_loop(config, model, batches(), micro_batches=1)
    found = numbers(straight).values()
    assert [line[0] for line in found] == pytest.approx(expected.losses, rel=1e-5)
    assert [line[1] for line in found] == pytest.approx(expected.norms, rel=1e-5)


@pytest.mark.long
def test_no_weight_of_an_earlier_phase_stays_in_memory(tokens, tmp_path, monkeypatch):
    begin, held = training_run._run_phase, []

    def counted(*arguments):
        held.append(sum(value.numel() for value in gc.get_objects() if issubclass(type(value), torch.Tensor)))
        return begin(*arguments)

    monkeypatch.setattr(training_run, "_run_phase", counted)
    run("pretrain", tmp_path / "run", f"data.tokens={tokens}", *LLAMA, PHASES, END, "parallel.zero_stage=1", "model.hidden=64")
    assert len(held) == 3
    assert held[2] - held[1] < 64 * 320, "not one matrix of the embedding"


@pytest.mark.parametrize("stops", [pytest.param((1, 2, 3, 4, 5), marks=pytest.mark.long), (3,)], ids=str)
def test_a_run_that_is_interrupted_anywhere_equals_one_that_is_not(straight, tokens, tmp_path, stops):
    for steps in (*stops, 6):
        run("pretrain", tmp_path / "run", f"data.tokens={tokens}", *LLAMA, PHASES, f"training.steps={steps}")
    assert numbers(tmp_path / "run") == numbers(straight)


def test_a_fork_begins_phases_that_its_trunk_does_not_have(straight, tokens, tmp_path):
    data = f"data.tokens={tokens}"
    run("pretrain", tmp_path / "trunk", data, *LLAMA, "training.steps=3")
    fork = (data, *LLAMA, f"checkpoint.fork={tmp_path}/trunk/step-2", END)
    run("pretrain", tmp_path / "run", *fork, PHASES)
    expected = numbers(straight)
    assert numbers(tmp_path / "run") == {step: expected[step] for step in range(3, 7)}
    for other, said in (
        (["training.sequence_length=128"], "training.phases=[{until_step: 2}, {sequence_length: 128}]"),
        (["model.rope_theta=3.0"], 'overrides: ["model.rope_theta=3.0"]'),
        (["training.phases=[{until_step: 1}, {sequence_length: 64}]"], "training.sequence_length=64: "),
        (
            ["training.phases=[{until_step: 2}, {sequence_length: 64}]", "training.global_batch_size=8"],
            "training.phases.0.until_tokens=512: are not the 256 tokens that the run of checkpoint.fork has read up to step 2",
        ),
    ):
        with pytest.raises(UserError) as raised:
            run("pretrain", tmp_path / "other", *fork, *other)
        assert said in str(raised.value)


def test_an_older_checkpoint_of_an_earlier_phase_replaces_damaged_ones(straight, tokens, tmp_path):
    shutil.copytree(straight, tmp_path / "run")
    for step in (3, 4, 5, 6):
        for file in (tmp_path / "run" / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:-1])
    run("pretrain", tmp_path / "run", f"data.tokens={tokens}", *LLAMA, PHASES, "training.steps=7", "checkpoint.skip_damaged=true")
    found = numbers(tmp_path / "run")
    assert {step: found[step] for step in range(1, 7)} == numbers(straight)


def resolved(two: Path, *settings: str):
    model = () if any(word.startswith("model=") for word in settings) else LLAMA
    config = configured("stage=pretrain", *TINY, *model, f"data.tokens={two}", BLEND, *settings)
    check.check(config, 1)
    return config


def test_a_corpus_that_begins_in_a_longer_phase_is_read_in_longer_texts(two):
    """Every sample of an epoch once; sequences of the new corpus are its text, those of the other one keep their windows of 32 tokens."""
    config = resolved(two, EXTENDED.replace("1408", "1300"), "training.steps=40")
    assert [phase.until_step for phase in config.training.phases] == [3, 5, None], "1,408 tokens are 3 x 4 x 32 and 2 x 4 x 128"
    assert [(phase.until_tokens, phase.run) for phase in config.data.phases] == [(384, 1), (1408, 4), (None, 2)]
    samples = blend.open_training(config)
    assert samples.counts[0] % 4 == 0
    assert blend.run_of(config.data, "books") == 4
    seen = Counter()
    total = 12 + 4 * 4000
    corpora, epochs, places = samples.sequences(np.arange(total))
    for key in zip(corpora.tolist(), epochs.tolist(), places.tolist(), strict=True):
        seen[key] += 1
    assert set(seen.values()) == {1}
    whole = min(int(epochs[corpora == corpus].max()) for corpus in (0, 1))
    assert whole >= 1
    for corpus in (0, 1):
        assert sum(1 for c, epoch, _ in seen if (c, epoch) == (corpus, 0)) == samples.counts[corpus]
    text = samples.stream.read(np.array([0]), corpus_tokens := sum(shard.entry["tokens"] for shard in samples.corpora[0].shards))[0]
    rows = samples.samples(np.arange(12, 44))[:, :-1].reshape(-1, 128)
    windows = text[: corpus_tokens // 128 * 128].reshape(-1, 128)
    books = (corpora[12:44] == 0).reshape(-1, 4)
    assert (books.all(axis=1) | ~books.any(axis=1)).all(), "a sequence is of one corpus"
    assert books.sum() in (20, 24, 28), "three quarters of 32 samples"
    for row in rows[books[:, 0]]:
        assert (windows == row).all(axis=1).sum() == 1


@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.sampled_from([1, 2, 4, 8]), st.lists(st.integers(0, 3), min_size=3, max_size=3).filter(any)),
        min_size=1,
        max_size=5,
    )
)
def test_runs_of_samples_keep_the_numbers_of_every_corpus_consecutive(plan):
    ends = np.cumsum([count for count, *_ in plan]).tolist()
    schedule = BlendSchedule([*(Phase(w, end, run) for end, (_, run, w) in zip(ends, plan, strict=True)), Phase([1, 1, 1])])
    corpora, ordinals = schedule.locate(np.arange(ends[-1] + 50))
    for corpus in range(3):
        assert ordinals[corpora == corpus].tolist() == list(range((corpora == corpus).sum()))
    for samples in (*ends, ends[-1] + 7):
        assert schedule.counts(samples).tolist() == np.bincount(corpora[:samples], minlength=3).tolist()


def test_resolving_again_changes_nothing_and_an_older_fingerprint_stays(two):
    config = resolved(two, EXTENDED)
    assert phases.resolved(config) == config
    assert phases.at(config, 4).training.sequence_length == 128
    assert phases.at(phases.at(config, 4), 0) == config
    before = resolved(two, "data.phases=[{weights: {web: 1}}]")
    assert blend.fingerprint(before, blend.open_training(before), 12, {}) == blend.fingerprint(config, blend.open_training(config), 12, {})
    assert blend.fingerprint(before, blend.open_training(before), 13, {}) != blend.fingerprint(config, blend.open_training(config), 13, {})


REFUSED = [
    ("[{}, {}]", "training.phases.0.until_step=None: must be after the start of the phase at step 0"),
    ("[{until_step: 4}, {until_step: 3}, {}]", "training.phases.1.until_step=3: must be after the start of the phase at step 4"),
    (
        "[{until_step: 4, until_tokens: 99}, {}]",
        "training.phases.0.until_tokens=99: contradicts until_step=4, which are 512 tokens|remove one",
    ),
    ("[{until_step: 4}]", "training.phases.0.until_step=4: the last phase has no end"),
    ("[{until_step: 4}, {sequence_length: 48}]", "training.phases.1.sequence_length=48: must be a multiple of 32|set it to 64"),
    (
        "[{until_step: 4}, {weights: {news: 1}}]",
        "training.phases.1.weights.news=1.0: is not a corpus of data.blend|choose among books, web",
    ),
    ("[{until_step: 4}, {weights: {web: 0}}]", "training.phases.1.weights={'web': 0.0}: gives no corpus a weight above 0"),
    (
        '[{until_step: 4}, {overrides: ["optimizer.lr=0.1"]}] optimizer=schedule_free optimizer.schedule=constant',
        "training.phases.1.overrides=optimizer.lr=0.1: cannot change with optimizer=schedule_free",
    ),
    ('[{until_step: 4}, {overrides: ["training.seed=1"]}]', "training.phases.1.overrides=training.seed=1: cannot change during a run"),
    ('[{until_step: 4}, {overrides: ["optimizer.name=lion"]}]', "training.phases.1.overrides=optimizer.name=lion: cannot change"),
    ('[{until_step: 4}, {overrides: ["training.sequence_length=64"]}]', "is a key of a phase|set sequence_length of the phase"),
    ('[{until_step: 4}, {overrides: ["optimizer.lrr=1"]}]', "training.phases.1.overrides=optimizer.lrr=1: is no key"),
    ('[{until_step: 4}, {overrides: ["optimizer.lr=x"]}]', "training.phases.1.overrides=optimizer.lr=x"),
    ('[{until_step: 4}, {overrides: ["optimizer.lr"]}]', "training.phases.1.overrides=optimizer.lr: is not of the form key=value"),
    (
        "[{until_step: 4}, {sequence_length: 256}]",
        "training.sequence_length=256: must not exceed model.max_positions=128 (training.phases.1)",
    ),
    ("[{until_step: 4}, {global_batch_size: 6}]", "training.global_batch_size=6: must be a multiple of"),
    ("[{until_step: 4}, {sequence_length: 64}] data.packing=best_fit", "data.packing=best_fit: is not supported with phases"),
    ("[{until_step: 4}, {sequence_length: 64}] data.phases=[{weights: {web: 1}}]", "data.phases=1 phases: conflicts with training.phases"),
    ("[{until_step: 4}, {}] training.batch_rampup=[{until_step: 9, value: 4}]", "training.batch_rampup=9: must end within the first phase"),
    ("[{until_step: 4}, {sequence_length: 64}] model=bert-tiny", "sequence_length=64: is supported by decoders only"),
    ('[{until_step: 4}, {overrides: ["model.rope_theta=2"]}] model=gpt-tiny', "is no setting of rotary positions of GPTConfig"),
    (
        "[{until_step: 4}, {}] parallel.engine=deepspeed parallel.zero_stage=3",
        "parallel.zero_stage=3: is not supported with training.phases",
    ),
    ("[{until_step: 4}, {}] stage=finetune", "training.phases=2 phases: are not supported by stage=finetune"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=[words for words, _ in REFUSED])
def test_what_is_refused(two, words, said):
    listed, *others = [word.replace("~", " ") for word in words.replace(": ", ":~").replace(", ", ",~").split(" ")]
    with pytest.raises(UserError) as raised:
        resolved(two, f"training.phases={listed}", *others)
    for text in said.split("|"):
        assert text in str(raised.value)


def test_ranks_meet_again_in_a_phase_of_another_layout(two, tmp_path):
    """Two ranks started by torchrun, on the data axis and then on the tensor axis, equal one process."""
    words = [word for word in (*TINY, *LLAMA) if not word.startswith(("data.verify", "checkpoint."))]
    plan = "training.phases=[{until_step: 2}, {sequence_length: 64, overrides: [%s]}]"
    common = (*words, "model.kv_heads=2", f"data.tokens={two}", "training.steps=4", "training.micro_batch_size=2")
    pipeline(*common, plan % '"parallel.tensor=2"', f"run_dir={tmp_path}/ranks", prefix=torchrun(2))
    run("pretrain", tmp_path / "one", *common, plan % "")
    for step, line in numbers(tmp_path / "one").items():
        assert numbers(tmp_path / "ranks")[step] == pytest.approx(line, rel=1e-5)


def curriculum(chance: random.Random) -> tuple[str, int]:
    """Three to five phases of lengths, batches, corpora, positions, rates and layouts of two ranks; and the number of steps."""
    layouts = ["tensor=2", "context=2", "pipeline=2", "zero_stage=1", "zero_stage=3"]
    defaults = {"tensor": 1, "context": 1, "pipeline": 1, "zero_stage": 0}
    phases, step = [], 0
    for number in range(count := chance.randint(3, 5)):
        step += chance.randint(2, 4)
        name, _, value = chance.choice(layouts).partition("=")
        words = [f"parallel.{key}={value}" for key, value in (defaults | {name: value}).items()]
        words += [f"model.rope_theta={chance.choice([10000, 500000])}", f"optimizer.lr={chance.choice([0.01, 0.003])}"]
        weights = f"web: {chance.randint(0, 2)}, books: {chance.randint(1, 3)}"
        length = 32 * (chance.choice([1, 2, 4]) if number else 1)
        listed = ", ".join(f'"{word}"' for word in [*words, "training.micro_batch_size=1"])
        own = f"sequence_length: {length}, global_batch_size: {chance.choice([2, 4])}, weights: {{{weights}}}, overrides: [{listed}]"
        phases.append(f"{{until_step: {step}, {own}}}" if number < count - 1 else f"{{{own}}}")
    return f"training.phases=[{', '.join(phases)}]", step


@pytest.mark.long
@pytest.mark.world
@pytest.mark.parametrize("seed", range(3))
def test_two_ranks_that_are_killed_at_any_moments_read_a_random_curriculum_as_undisturbed_ones(two, tmp_path, seed):
    """Bit for bit: the losses, norms and rates; a fork of the run at a random checkpoint goes on as it did."""
    chance = random.Random(seed)
    plan, steps = curriculum(chance)
    words = [word for word in (*TINY, *LLAMA) if not word.startswith(("data.verify", "checkpoint.", "model.kv_heads", "model.layers"))]
    common = (*words, "model.layers=2", "model.kv_heads=2", f"data.tokens={two}", BLEND, plan, f"training.steps={steps}")
    common += ("checkpoint.every=1", "checkpoint.keep=99")
    run_ranks(2, *common, f"run_dir={tmp_path}/straight")
    metrics = tmp_path / "killed" / "metrics.jsonl"
    for _ in range(3):
        until = chance.uniform(0, steps)
        processes = start_ranks(2, *common, f"run_dir={tmp_path}/killed")
        while processes[0].poll() is None and (not metrics.is_file() or metrics.read_bytes().count(b"\n") < until):
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.3))
        for process in processes:
            process.kill()
    run_ranks(2, *common, f"run_dir={tmp_path}/killed")
    expected = numbers(tmp_path / "straight")
    assert list(expected) == list(range(1, steps + 1))
    assert numbers(tmp_path / "killed") == expected, plan
    begin = chance.randint(1, steps - 1)
    run_ranks(2, *common, f"run_dir={tmp_path}/fork", f"checkpoint.fork={tmp_path}/killed/step-{begin}")
    assert numbers(tmp_path / "fork") == {step: line for step, line in expected.items() if step > begin}, plan
