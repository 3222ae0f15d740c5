"""Blends by configuration: which samples come, what is refused, what identifies them, and how batches and warm-ups share them out."""

import json
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common import artifact
from pipeline.common.artifact import MANIFEST
from pipeline.common.errors import UserError
from pipeline.config import warmup
from pipeline.config.layout import Layout
from pipeline.config.rules import check
from pipeline.data.load import blend
from pipeline.data.load.blend_schedule import BlendSchedule, Phase
from pipeline.data.load.corpus import Corpus, Windows
from pipeline.data.load.objectives.causal import Causal, Sliding
from pipeline.data.load.objectives.objective import IGNORE
from pipeline.data.load.samples import Samples
from pipeline.data.load.token_stream import TokenStream
from pipeline.parallel.mesh import Mesh
from pipeline.planner import rank_report
from pipeline.training.batch_loader import BatchLoader
from tests.helpers import pipeline, with_manifest
from tests.world import configured
from tools.bench.token_dataset import TokenDataset

LENGTH = 32


@pytest.fixture(scope="module")
def corpora(tokens, tmp_path_factory):
    """The token shards as two corpora, and a second folder with a third one."""
    folder = tmp_path_factory.mktemp("corpora")
    for name, changes in (("both", {"train-00001.tar": "de", "train-00002.tar": "de"}), ("more", {"train-00000.tar": "code"})):

        def rename(manifest, changes=changes):
            for shard, entry in manifest["files"].items():
                entry["corpus"] = changes.get(shard, "en")

        with_manifest(tokens, folder / name, rename)
    return folder


def config_of(folder, *overrides):
    """A configuration on the corpora, refused here if it breaks a rule."""
    config = configured(
        "stage=pretrain",
        f"data.tokens={folder}/both",
        f"training.sequence_length={LENGTH}",
        "training.global_batch_size=8",
        "training.micro_batch_size=1",
        "training.steps=20",
        "optimizer.warmup_steps=1",
        *overrides,
    )
    check.check(config, 1)
    return config


@pytest.mark.parametrize("stride", [1, 12, LENGTH])
def test_overlapping_windows_predict_every_token_once(corpora, stride):
    config = configured("stage=evaluate", f"data.tokens={corpora}/both", f"training.sequence_length={LENGTH}", f"stage.stride={stride}")
    data, plain = Sliding.open_validation(config), Causal.open_validation(config)
    assert data is not None
    assert plain is not None
    rows = data.arrays(np.arange(data.samples.counts[0]))
    text = plain.samples.samples(np.arange(plain.samples.counts[0]))
    text = np.concatenate([text[:, :-1].ravel(), text[-1:, -1]])
    predicted = rows["targets"][rows["targets"] != IGNORE]
    assert len(predicted) > len(text) - LENGTH
    shared = min(len(predicted), len(text) - 1)
    assert (predicted[:shared] == text[1 : 1 + shared]).all()
    assert ((rows["targets"] != IGNORE)[1:].sum(axis=1) == stride).all()
    assert (rows["targets"][:, -1] != IGNORE).all()


def test_overlapping_windows_are_those_of_causal_models_and_shorter_than_a_sequence():
    rules = {
        "model=bert-tiny": "requires a causal",
        "training.sequence_length=64": "must not exceed",
        "stage.tasks=[a]": "without stage.tasks",
    }
    for setting, rule in rules.items():
        config = configured("stage=evaluate", "stage.stride=128", "stage.task_folder=.", setting)
        violations = [*check.violations(config, 1), *([] if config.stage.tasks else check.evaluation_violations(config, 1))]
        found = [violation.rule for violation in violations if violation.key == "stage.stride"]
        assert len(found) == 1
        assert rule in found[0]


TWO = "++data.blend={en:{weight:3},de:{weight:1}}"


def alone(folder, name, corpus):
    """One corpus by itself, in the order that it has in every blend."""
    manifest = artifact.read(folder, key="data.tokens", stage="tokenize")
    parts = [Corpus.of(folder, manifest, "train", name=name, corpus=corpus)]
    stream = TokenStream(parts[0].shards)
    return Samples(parts, stream, Windows(stream, parts, LENGTH), 0)


def test_a_blend_deals_out_the_samples_of_its_corpora(corpora):
    more = f"++data.blend={{en:{{weight:5}},de:{{weight:3}},x:{{weight:2,tokens:{corpora}/more,corpus:code}}}}"
    samples = blend.open_training(config_of(corpora, more))
    chosen, numbers = BlendSchedule([Phase([3, 5, 2])]).locate(np.arange(6000))  # in the order of their names
    parts = [alone(corpora / "both", "de", "de"), alone(corpora / "both", "en", "en"), alone(corpora / "more", "x", "code")]
    assert (np.bincount(chosen) > np.array([part.counts[0] for part in parts])).any(), "epochs end within the test"
    found = samples.samples(np.arange(6000))
    for corpus, part in enumerate(parts):
        assert np.array_equal(found[chosen == corpus], part.samples(numbers[chosen == corpus]))
    assert not np.array_equal(np.argsort(parts[0].samples(np.arange(9))[:, 0]), np.argsort(parts[1].samples(np.arange(9))[:, 0]))


def test_without_a_blend_every_window_of_the_folder_comes_once_an_epoch(corpora, tokens):
    ours, plain = blend.open_training(config_of(corpora)), TokenDataset(tokens, "train", LENGTH, 0)
    assert np.array_equal(ours.samples(np.arange(plain.windows)), plain.samples(np.arange(plain.windows)))


def test_phases_begin_at_their_tokens_and_keep_what_came_before(corpora):
    phases = "data.phases=[{until_tokens:%d,weights:{en:1}},{weights:{de:1,en:1}}]"
    names = "++data.blend={en:{},de:{}}"
    first = blend.open_training(config_of(corpora, names, phases % (100 * LENGTH)))
    corpus, _ = first.schedule.locate(np.arange(200))
    assert (corpus[:100] == 1).all(), "only en, the second by name"
    assert abs((corpus[100:] == 0).sum() - 50) <= 1
    longer = blend.open_training(config_of(corpora, names, phases % (150 * LENGTH)))
    numbers = np.arange(100)
    assert np.array_equal(first.samples(numbers), longer.samples(numbers))
    assert not np.array_equal(first.samples(numbers + 100), longer.samples(numbers + 100))


def test_weights_may_compare_epochs(corpora):
    samples = blend.open_training(config_of(corpora, "++data.blend={en:{weight:1},de:{weight:3}}", "data.blend_weights=epochs"))
    de, en = samples.schedule.counts(2000) / samples.counts
    assert de == pytest.approx(3 * en, rel=0.01)


def test_validation_takes_every_corpus_straight_through(corpora, tokens):
    plain = TokenDataset(tokens, "validation", LENGTH, 0)
    ours = blend.open_validation(config_of(corpora, f"++data.blend={{en:{{}},more:{{tokens:{corpora}/more,corpus:en}}}}"))
    numbers = np.arange(plain.windows)
    assert np.array_equal(ours.samples(numbers), plain.samples(numbers))
    assert ours.counts[0] in (2 * plain.windows, 2 * plain.windows + 1)
    totals = json.loads((tokens / MANIFEST).read_text())["totals"]["validation"]
    assert ours.bytes_per_token(numbers) == pytest.approx(totals["bytes"] / totals["tokens"])
    assert [name for name, _ in ours.parts] == ["en", "more"]


REFUSED = [
    (["++data.blend={en:{},fr:{}}"], ["data.blend.fr.corpus=fr", "choose one of de, en"]),
    (["++data.blend={en:{},x:{tokens:/nowhere}}"], ["data.blend.x.tokens=/nowhere", "stage=tokenize"]),
    (["++data.blend={en:{weight:0},de:{weight:0}}"], ["data.blend=", "no corpus a weight above 0"]),
    (["++data.blend={en:{weight:-1},de:{}}"], ["data.blend.en.weight=-1", "at least 0"]),
    (["++data.blend={en:{weight:nan},de:{}}"], ["data.blend.en.weight=nan", "finite"]),
    (["data.phases=[{weights:{en:1}}]"], ["data.phases=1 phases", "data.blend, which is empty"]),
    ([TWO, "data.phases=[{weights:{en:1}}]"], ["data.blend.en.weight=3", "conflicts with data.phases"]),
    (["++data.blend={en:{}}", "data.phases=[{weights:{fr:1}}]"], ["data.phases.0.weights.fr=1", "choose among en"]),
    (["++data.blend={en:{}}", "data.phases=[{weights:{en:1},until_tokens:64}]"], ["data.phases.0.until_tokens=64", "no end"]),
    (
        ["++data.blend={en:{}}", "data.phases=[{weights:{en:1},until_tokens:64},{weights:{en:1},until_tokens:64},{weights:{en:1}}]"],
        ["data.phases.1.until_tokens=64", "start of the phase at 64 tokens"],
    ),
    (["++data.blend={en:{max_epochs:0.001},de:{}}"], ["data.blend.en.max_epochs=0.001", "160 samples use 80 of it", "raise max_epochs to"]),
    (["training.batch_rampup=[{until_step:5,value:8},{until_step:5,value:4}]"], ["training.batch_rampup.1.until_step=5", "after step 5"]),
    (
        ["training.micro_batch_size=4", "training.batch_rampup=[{until_step:5,value:6}]"],
        ["training.batch_rampup.0.value=6", "multiple of 4"],
    ),
    (["training.sequence_warmup=[{until_step:5,value:5}]"], ["training.sequence_warmup.0.value=5", "divide training.sequence_length=32"]),
    (["data.infill.rate=0.5"], ["tokenizer.path=", "point tokenizer.path"]),
    (["data.prefetch=0"], ["data.prefetch=0", "at least 1"]),
]


@pytest.mark.parametrize("overrides, said", REFUSED, ids=lambda value: value[0] if isinstance(value, list) else None)
def test_refused_before_work(corpora, overrides, said):
    def start():
        config = config_of(corpora, *overrides)
        blend.check_epochs(config.data, config.training, blend.open_training(config))

    with pytest.raises(UserError) as refused:
        start()
    for text in said:
        assert text in str(refused.value)


@pytest.mark.parametrize("name, value", [("tokenizer", "other"), ("bos", 7)])
def test_another_tokenizer_is_refused(corpora, tmp_path, name, value):
    with_manifest(corpora / "more", tmp_path / "more", lambda manifest: manifest["totals"].update({name: value}))
    with pytest.raises(UserError, match=r"data\.blend\.x=.*\n?.*another tokenizer or tokenizer.bos than en"):
        blend.open_training(config_of(corpora, f"++data.blend={{en:{{}},x:{{tokens:{tmp_path}/more,corpus:code}}}}"))


def test_sentinels_must_be_special_tokens_of_the_tokenizer(corpora, tokenizer):
    overrides = ("data.infill.rate=1", f"tokenizer.path={tokenizer}", 'data.infill.prefix="<|endoftext|>"')
    with pytest.raises(UserError, match=r"data\.infill\.middle=<\|fim_middle\|>: is not a special token"):
        blend.open_training(config_of(corpora, *overrides))
    marks = [f'data.infill.{name}="<|endoftext|>"' for name in ("prefix", "middle", "suffix")]
    samples = blend.open_training(config_of(corpora, *overrides, *marks))
    rows = samples.samples(np.arange(50))
    assert (rows == samples.end_of_document).sum() >= 3 * 50


def test_what_was_seen_is_known_by_its_content_alone(corpora):
    def seen(consumed, *overrides):
        config = config_of(corpora, *overrides)
        return Causal.of(config, blend.open_training(config)).fingerprint(config, consumed)

    phases = "data.phases=[{until_tokens:%d,weights:{en:1}},{weights:{%s}}]"
    names, three = "++data.blend={en:{},de:{}}", f"++data.blend={{en:{{}},de:{{}},x:{{tokens:{corpora}/more,corpus:code}}}}"
    before = seen(60, names, phases % (100 * LENGTH, "de:1,en:1"))
    assert seen(60, names, phases % (80 * LENGTH, "de:1")) == before, "a later phase may be moved and changed"
    assert seen(60, three, phases % (100 * LENGTH, "x:1")) == before, "and may bring a corpus"
    assert seen(60, "++data.blend={en:{max_epochs:9}}") == before, "a limit changes no sample"
    assert seen(60, names, phases % (50 * LENGTH, "de:1")) != before, "an earlier one may not"
    after = seen(160, names, phases % (100 * LENGTH, "de:1,en:1"))
    assert seen(160, three, phases % (100 * LENGTH, "de:1,en:1")) == after
    assert seen(160, names, phases % (100 * LENGTH, "de:1,en:2")) != after
    assert seen(160, names, phases % (101 * LENGTH, "de:1,en:1")) != after
    plain = artifact.fingerprint(artifact.read(corpora / "both", key="data.tokens", stage="tokenize"))
    assert seen(160) == plain, "without a blend the shards themselves, as earlier versions noted it"
    assert len({seen(0), seen(0, "data.packing=best_fit"), seen(0, TWO)}) == 3


def batches(config, samples, ranks, rank):
    """The batches of one data rank among several, without a process group."""
    layout = Layout(pipeline=1, data=ranks, tensor=1)
    return BatchLoader(
        Causal.of(config, samples), config.training, Mesh(layout, rank, torch.device("cpu"), *7 * [None]), config.data.prefetch
    )


steps = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), max_size=3)


@settings(max_examples=15)
@given(sizes=steps, lengths=steps, start=st.integers(0, 12), ranks=st.sampled_from([1, 2, 4]), prefetch=st.integers(1, 5))
def test_batches_do_not_depend_on_ranks_threads_or_where_a_run_began(corpora, sizes, lengths, start, ranks, prefetch):
    def ramp(entries, value):
        ends = np.cumsum([length for length, _ in entries]).tolist()
        return "[" + ",".join(f"{{until_step:{end},value:{value(v)}}}" for end, (_, v) in zip(ends, entries, strict=True)) + "]"

    config = config_of(
        corpora,
        TWO,
        "training.document_mask=true",
        f"data.prefetch={prefetch}",
        f"training.batch_rampup={ramp(sizes, lambda v: 4 * v)}",
        f"training.sequence_warmup={ramp(lengths, lambda v: LENGTH >> v)}",
    )
    training = config.training
    samples = blend.open_training(config)
    consumed = [warmup.samples(training, step) for step in range(14)]
    assert [b - a for a, b in pairwise(consumed)] == [warmup.batch_size(training, step) for step in range(13)]
    parts = [list(batches(config, samples, ranks, rank).training(consumed[start], range(start, 13))) for rank in range(ranks)]
    for step in range(start, 13):
        length = warmup.sequence_length(training, step)
        rows = samples.samples(np.arange(consumed[step], consumed[step + 1])).astype(np.int64)
        tokens = torch.cat([part[step - start][0] for part in parts])
        targets, documents = (torch.cat([part[step - start][1][name] for part in parts]) for name in ("targets", "documents"))
        assert tokens.dtype == targets.dtype == torch.int64
        assert tokens.shape[1] == length
        assert np.array_equal(tokens.reshape(-1, LENGTH), rows[:, :-1]), "every token is seen once"
        assert np.array_equal(targets.reshape(-1, LENGTH), rows[:, 1:])
        ended = tokens[:, :-1] == samples.end_of_document
        assert torch.equal(documents.diff(dim=1), ended.to(torch.int32)), "the end token closes its document"


class Gated:
    """Samples that come when the gate is open, and count the batches that were made."""

    def __init__(self, samples):
        self._samples, self.gate, self.made = samples, threading.Event(), 0

    def samples(self, indices):
        assert self.gate.wait(60)
        self.made += 1
        return self._samples.samples(indices)


def test_a_batch_that_is_not_ready_is_a_stall(corpora):
    config = config_of(corpora, "data.prefetch=1")
    slow = Gated(blend.open_training(config))
    source = batches(config, slow, 1, 0)
    run = source.training(0, range(4))
    opener = threading.Timer(0.2, slow.gate.set)
    opener.start()
    next(run)
    assert source.stalls == 1
    while slow.made < 2:  # the second is made while the first is used
        time.sleep(0.01)
    time.sleep(0.2)
    next(run)
    assert source.stalls == 1
    slow.gate.clear()
    threading.Timer(0.2, slow.gate.set).start()
    next(run)
    next(run)
    assert source.stalls >= 2


def test_the_command_line_takes_a_blend_and_names_its_mistakes(corpora, tmp_path):
    common = ("stage=pretrain", f"data.tokens={corpora}/both", f"run_dir={tmp_path}/run", "model.vocab_size=320", "tracking=disabled")
    said = pipeline(*common, "data.blend={en:{weight:1},fr:{weight:2}}", expect=2)
    assert "data.blend.fr.corpus=fr" in said
    assert "Traceback" not in said
    assert "sets wieght: no such key" in pipeline(*common, "data.blend={en:{wieght:1}}", expect=2)
    assert not (tmp_path / "run").exists()


def test_more_than_four_epochs_are_warned_of_and_planned(corpora, caplog):
    config = config_of(corpora, "++data.blend={en:{},de:{weight:9}}", "training.steps=2000")
    caplog.set_level("INFO", "pipeline")
    samples = blend.open_training(config)
    blend.check_epochs(config.data, config.training, samples)
    above = {record.args[0] for record in caplog.records if record.levelname == "WARNING"}
    taken = dict(zip(("de", "en"), samples.schedule.counts(2000 * config.training.global_batch_size).tolist(), strict=True))
    counts = dict(zip(("de", "en"), samples.counts.tolist(), strict=True))
    assert above == {name for name in taken if taken[name] > 4 * counts[name]}
    assert above
    text = "\n".join(rank_report.batch_lines(config, Layout.of(config, 1)))
    assert text.count("above 4, repeated text is worth ever less than new text") == len(above)
    assert f"epochs of {blend.training_tokens(config.data)['de']:,}" in text
