"""The ledger: documents of samples and samples of documents against a log of every token, and stage=ledger over a run and its trunk."""

import json
import shutil
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.common import events
from pipeline.common.errors import UserError
from pipeline.config.rules import check
from pipeline.data.load import blend
from pipeline.data.load.blend_schedule import BlendSchedule, Phase
from pipeline.data.load.ledger import DocumentLedger, DocumentQuery
from pipeline.data.load.permutation import permute, unpermute
from pipeline.data.tokenize import token_shards
from pipeline.training import lineage
from pipeline.training.lineage import Stretch
from pipeline.training.skipped_samples import Rewind, SkippedSamples
from tests.helpers import one_in
from tests.training.one_rank import TINY, newest, run
from tests.world import configured

PHASED = (
    "++data.blend={web: {}, books: {}}",
    "training.phases=[{until_step: 9, weights: {web: 1}}, {until_step: 400, sequence_length: 128, weights: {web: 1, books: 3}}, "
    "{sequence_length: 64, weights: {web: 2, books: 1}}]",
)


@given(st.integers(1, 5000), st.integers(0, 2**63), st.integers(0, 9))
def test_unpermute_is_the_inverse_of_permute(size, seed, epoch):
    values = np.arange(min(size, 300))
    assert unpermute(permute(values, size, seed, epoch), size, seed, epoch).tolist() == values.tolist()


plans = st.lists(
    st.tuples(st.integers(1, 60), st.sampled_from([1, 2, 4, 8]), st.lists(st.integers(0, 3), min_size=3, max_size=3).filter(any)),
    min_size=1,
)


@given(plans)
def test_the_numbers_of_a_schedule_are_the_inverse_of_its_places(plan):
    ends = [*np.cumsum([count for count, *_ in plan]).tolist()[:-1], None]
    schedule = BlendSchedule([Phase(weights, end, run) for end, (_, run, weights) in zip(ends, plan, strict=True)])
    samples = np.arange(sum(count for count, *_ in plan) + 40)
    corpora, ordinals = schedule.locate(samples)
    for corpus in range(3):
        own = corpora == corpus
        assert schedule.numbers(corpus, ordinals[own]).tolist() == samples[own].tolist()
        after = int(schedule.numbers(corpus, np.array([own.sum()]))[0])
        assert after >= len(samples) or (after == -1 and plan[-1][2][corpus] == 0)


def logged(ledger: DocumentLedger, samples, count: int) -> dict[int, Counter]:
    """Tokens of every (shard, document) in every sample, by a loop over positions; a document is found in a list of the tokens' owners."""
    owners = []
    for shard, of_shard in enumerate(ledger.shards):
        for document, tokens in enumerate(token_shards.lengths(of_shard.path, of_shard.entry).tolist()):
            owners += [(shard, document)] * tokens
    stream = samples.stream.read(np.array([0]), samples.stream.tokens)[0]
    found = {}
    for sample in range(count):
        found[sample] = Counter()
        for _, start, length in samples.ranges(np.array([sample])).T.tolist():
            found[sample].update(owners[start : start + length])
    texts = samples.samples(np.arange(count))
    for sample in range(0, count, 7):  # the ranges are where the tokens are
        joined = np.concatenate([stream[start : start + length] for _, start, length in samples.ranges(np.array([sample])).T.tolist()])
        assert joined[: texts.shape[1] - 1].tolist() == texts[sample][: min(len(joined), texts.shape[1] - 1)].tolist()
    return found


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((), id="windows", marks=pytest.mark.long),
        pytest.param(PHASED, id="phases"),
        pytest.param(("data.packing=best_fit",), id="packed"),
        pytest.param(("training.sequence_length=16",), id="short", marks=pytest.mark.long),
    ],
)
def test_both_directions_equal_a_log_of_every_token(two, settings):
    config = configured(
        "stage=pretrain",
        *TINY,
        *(("model=llama-tiny", "model.kv_heads=2", "model.max_positions=128") if settings == PHASED else ()),
        f"data.tokens={two}",
        *settings,
    )
    check.check(config, 1)
    samples = blend.open_training(config)
    count = min(int(samples.counts.sum()) * 5 // 4, 5000)  # beyond an epoch
    ledger = DocumentLedger(samples, [])
    log = logged(ledger, samples, count)
    rows, shards, documents, tokens = ledger.documents(np.arange(count))
    assert (np.diff(rows) >= 0).all()
    found = defaultdict(Counter)
    for row, shard, document, number in zip(rows.tolist(), shards.tolist(), documents.tolist(), tokens.tolist(), strict=True):
        found[row][shard, document] += number
    assert dict(found) == log
    backward = defaultdict(Counter)
    for shard in range(len(ledger.shards)):
        chosen = np.arange(len(ledger.tokens(shard)))
        for document, sample, number in ledger.samples_of(shard, chosen, count).T.tolist():
            backward[sample][shard, document] += number
    assert dict(backward) == log


def test_steps_without_skipped_samples():
    skipped = SkippedSamples([Rewind(5, 6, "", 14, 18)])
    stretch = Stretch(Path(), None, 4, np.array([10, 14, 22, 30]), skipped, [], np.zeros(3, dtype=np.int64))
    assert [stretch.numbers(step).tolist() for step in (5, 6, 7)] == [[10, 11, 12, 13], [18, 19, 20, 21], list(range(22, 30))]
    assert stretch.steps(np.array([9, 10, 13, 14, 17, 18, 22, 29, 30])).tolist() == [0, 5, 5, 0, 0, 6, 7, 7, 0]


def test_a_selection_is_of_fields_ids_and_text():
    fields = {"id": "a/1", "url": "https://x.example.org/p", "license": "cc0"}
    for selection, matches in (
        (DocumentQuery({"url": "*.example.org/*", "license": "cc*"}), True),
        (DocumentQuery({"url": "*.example.com/*"}), False),
        (DocumentQuery({"author": "*"}), False),
        (DocumentQuery({}, frozenset({"a/1"})), True),
        (DocumentQuery({}, frozenset({"a/2"})), False),
        (DocumentQuery({}, None, "so"), True),
        (DocumentQuery({"url": "*"}, None, "not there"), False),
    ):
        assert selection.matches(b"some text", fields) == matches
    chosen = DocumentQuery({"lisense": "*"}, frozenset({"shards/7", "https://x", "5", "gone"}))
    for fields in ({"id": 5}, {"id": "mine", "shard_id": "shards/7"}, {"id": "b", "url": "https://x"}, {"id": "c", "url": ["https://x"]}):
        chosen.matches(b"", fields)
    assert chosen.missing_ids == {"gone"}
    assert chosen.missing_fields == {"lisense"}


@pytest.mark.long
def test_metadata_does_not_replace_what_the_ledger_says(forked, shards, tmp_path, monkeypatch):
    own, named = (
        DocumentLedger.metadata,
        {"steps": [77], "times": 5.0, "document": 0, "shard": "x", "tokens": 999, "run": "y", "read": 1, "license": "z"},
    )
    ask = ("ledger", forked / "run", f"stage.out={tmp_path}/out.jsonl", f"stage.shards=[{shards}]")
    rows = []
    for _ in range(2):
        for question in (("stage.where={id: '*'}",), ("stage.step=4",)):
            run(*ask, *question)
            rows.append([{name: value for name, value in row.items() if name != "license"} for row in answers(tmp_path / "out.jsonl")])
        monkeypatch.setattr(DocumentLedger, "metadata", lambda *of: ((text, fields | named) for text, fields in own(*of)))
    ours = ("run", "shard", "content", "document", "start", "tokens", "times", "steps")
    assert [[row[name] for name in ours] for row in rows[0]] == [[row[name] for name in ours] for row in rows[2]]
    assert [(row["sample"], row["document"], row["read"]) for row in rows[1]] == [(r["sample"], r["document"], r["read"]) for r in rows[3]]


@pytest.fixture(scope="module")
def forked(tokens, shards, tmp_path_factory) -> Path:
    """A trunk of three steps, and a fork of its second one up to step 5."""
    folder, data = tmp_path_factory.mktemp("forked"), (f"data.tokens={tokens}", f"data.shards={shards}")
    run("pretrain", folder / "trunk", *data, "training.steps=3")
    run("pretrain", folder / "run", *data, f"checkpoint.fork={folder}/trunk/step-2", "training.steps=5", "training.global_batch_size=8")
    return folder


def answers(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_the_stage_names_documents_of_steps_and_steps_of_documents(forked, shards, capsys, tmp_path):
    assert [(stretch.before, stretch.last) for stretch in lineage.read(forked / "run")] == [(0, 2), (2, 5)]
    assert newest(forked / "run").train_state.samples == 32
    ask = ("ledger", forked / "run", f"stage.out={tmp_path}/out.jsonl", f"stage.shards=[{shards}]")
    read = {}
    for step, samples in ((1, range(4)), (2, range(4, 8)), (4, range(16, 24))):
        run(*ask, f"stage.step={step}")
        read[step] = answers(tmp_path / "out.jsonl")
        assert sorted({row["sample"] for row in read[step]}) == list(samples)
        assert sum(row["read"] for row in read[step]) == 32 * len(samples)
    assert "step 4 of" in capsys.readouterr().out
    row = read[4][0]
    run(*ask, f"stage.where={{id: '{row['id']}'}}")
    (found,) = [answer for answer in answers(tmp_path / "out.jsonl") if 4 in answer["steps"]]
    assert (found["shard"], found["document"]) == (row["shard"], row["document"])
    assert "checkpoints without them" in capsys.readouterr().out
    (tmp_path / "ids").write_text(f"{row['id']}\nabsent\n")
    run(*ask, f"stage.ids={tmp_path}/ids")
    assert {answer["document"] for answer in answers(tmp_path / "out.jsonl")} == {row["document"]}
    run(*ask, f"stage.ids={tmp_path}/ids", "stage.contains=zzzzzz")
    assert answers(tmp_path / "out.jsonl") == []
    run(*ask, "stage.step=4", "stage.rank=0", "stage.micro_batch=1")
    assert {row["sample"] for row in answers(tmp_path / "out.jsonl")} == {20, 21, 22, 23}
    shutil.copytree(forked / "run", tmp_path / "run")
    events.record(tmp_path / "run", "run_start", step=5, ranks=2, layout="data 2")  # of the steps after it
    run("ledger", tmp_path / "run", *ask[2:], "stage.step=5", "stage.rank=0")
    assert {row["sample"] for row in answers(tmp_path / "out.jsonl")} == set(range(24, 32))


@pytest.mark.parametrize(
    ("words", "said"),
    one_in(
        3,
        [
            ((), "stage.step=None: is not set, and no documents are chosen"),
            (("stage.step=6",), "stage.step=6: was not made: the steps of {run} are 1 to 5"),
            (("stage.step=4", "stage.rank=1"), "stage.rank=1: is no rank of the job that made step 4, which had 1"),
            (("stage.step=4", "stage.rank=0", "stage.micro_batch=2"), "stage.micro_batch=2: is not one of the 2 of a rank"),
            (("stage.contains=a", "stage.shards=[]", "data.shards=x"), "stage.shards=none: has no folder from which"),
            (("stage.where={lisense: '*'}",), "stage.where=lisense: is a field of no training document"),
            (("stage.ids=/absent",), "stage.ids=/absent: cannot be read"),
            (("stage.ids=/dev/null",), "stage.ids=/dev/null: has no id"),
            (("stage.step=4", "stage.contains=a"), "stage.contains=a: has no effect with stage.step=4"),
            (("stage.summary=x", "stage.contains=a"), "stage.contains=a: has no effect with stage.summary"),
            (("stage.step=4", "stage.micro_batch=0"), "stage.micro_batch=0: is one of a rank"),
        ],
    ),
)
def test_what_the_stage_refuses(forked, tmp_path, words, said):
    folder = forked / "run"
    if "data.shards=x" in words:
        shutil.copytree(forked / "run", folder := tmp_path / "run")
        (folder / "config.yaml").write_text((folder / "config.yaml").read_text().replace("shards: /", "shards: /no/"))
    with pytest.raises(UserError) as raised:
        run("ledger", folder, *words)
    assert said.format(run=folder) in str(raised.value)


def test_a_run_whose_trunk_is_gone_says_what_is_not_known(forked, tmp_path, caplog):
    shutil.copytree(forked / "run", tmp_path / "run")
    moved = forked / "trunk"
    moved.rename(forked / "gone")
    try:
        assert [(stretch.before, stretch.samples[0]) for stretch in lineage.read(tmp_path / "run")] == [(2, 8)]
    finally:
        (forked / "gone").rename(moved)
    assert "what was read up to step 2 of" in caplog.text
