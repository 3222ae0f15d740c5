"""Documents that leave a run: what is read in their place, what stays, who remembers it, and what the certificate states."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import DatasetCard
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint import checked_json, native
from pipeline.checkpoint.reader import Checkpoint
from pipeline.common.errors import UserError
from pipeline.config.rules import check
from pipeline.config.run_tokenizer import IMPORTED
from pipeline.conversion import merge
from pipeline.data.load import blend
from pipeline.data.load.ledger import DocumentLedger
from pipeline.data.load.objectives.causal import Causal
from pipeline.data.load.objectives.objective import IGNORE
from pipeline.data.load.removal import FILE, Removal
from pipeline.data.load.shard_checksums import Shard
from pipeline.report import training_content
from pipeline.training import lineage
from pipeline.training.content import Content
from tests.training.one_rank import TINY, lines, run
from tests.world import configured


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=9), st.data())
def test_ranges_are_read_without_removed_documents(documents, data):
    removed = np.concatenate([np.full(tokens, out) for out, tokens in documents])
    stream = np.arange(1, len(removed) + 1, dtype="<u2")
    ends = np.cumsum([tokens for _, tokens in documents])
    chosen = np.array([out for out, _ in documents])
    removal = Removal((ends - [tokens for _, tokens in documents])[chosen], ends[chosen], np.zeros(1, "<u2").tobytes())
    starts = data.draw(st.lists(st.integers(0, len(stream) - 1), min_size=1, max_size=5))
    stops = [data.draw(st.integers(start, len(stream))) for start in starts]
    ranges = [stream[start:stop].tobytes() for start, stop in zip(starts, stops, strict=True)]
    removal.apply(ranges, np.array(starts), np.array(stops) - starts)
    for content, start, stop in zip(ranges, starts, stops, strict=True):
        assert np.frombuffer(content, "<u2").tolist() == np.where(removed, 0, stream)[start:stop].tolist()


def test_shards_with_the_same_content_lose_a_document_together():
    shards = [Shard(Path(content), {"xxh3": content, "tokens": 10}) for content in ("same", "other", "same")]
    removal = Removal.of([{"content": "same", "document": 1, "start": 2, "tokens": 3}], shards, b"")
    assert (removal.starts.tolist(), removal.ends.tolist()) == ([2, 22], [5, 25])


def written(ledger: DocumentLedger, path: Path, chosen: list[tuple[int, int]]) -> Path:
    path.write_text("".join(json.dumps(ledger.place(*document)) + "\n" for document in chosen))
    return path


@pytest.mark.parametrize("packing", ["windows", "best_fit"])
def test_every_other_token_and_target_stays(two, tmp_path, packing):
    """The blanks are the removed documents, found by a loop over the tokens of each sample; where nothing was removed, nothing changes."""
    words = ("stage=pretrain", *TINY, f"data.tokens={two}", "++data.blend={web: {}, books: {}}", f"data.packing={packing}")
    before = configured(*words)
    samples = blend.open_training(before)
    ledger, rows = DocumentLedger(samples, []), np.arange(400)
    chosen = [(shard, document) for shard in range(len(ledger.shards)) for document in range(1, len(ledger.tokens(shard)), 5)]
    after = configured(*words, f"data.remove={written(ledger, tmp_path / 'out', chosen)}")
    check.check(after, 1)
    old, new = Causal.open_training(before).arrays(rows), Causal.open_training(after).arrays(rows)
    end, owners = samples.end_of_document, [[] for _ in rows]
    for row, shard, document, tokens in ledger.documents(rows).T.tolist():
        owners[row] += [(shard, document)] * tokens
    changed = 0
    for row in rows.tolist():
        for place, owner in enumerate(owners[row][: old["tokens"].shape[1]]):
            if owner in set(chosen):
                changed += 1
                assert new["tokens"][row, place] == end
                assert new["targets"][row, place] in (IGNORE, *([new["targets"][row, place]] if old["tokens"][row, place] == end else []))
            else:
                assert new["tokens"][row, place] == old["tokens"][row, place]
    assert changed > 100
    inner = (new["tokens"] == end) & (np.roll(new["tokens"], -1, axis=1) == end)
    assert (new["targets"][:, :-1][inner[:, :-1]] == IGNORE).all()
    same = (new["tokens"] == old["tokens"]) & (new["targets"] != IGNORE)
    assert (new["targets"][same] == old["targets"][same]).all()


@pytest.fixture(scope="module")
def removed(tokens, shards, tmp_path_factory) -> dict[str, Path]:
    """A run of three steps; the documents of step 2 and of step 4 leave it before step 4; a fork of its step 5."""
    folder, data = tmp_path_factory.mktemp("removed"), (f"data.tokens={tokens}", f"data.shards={shards}", "optimizer.schedule=constant")
    trunk = folder / "run"
    run("pretrain", trunk, *data, "training.steps=5")
    undisturbed = lines(trunk)
    for step in (4, 5):
        shutil.rmtree(native.find_start(f"{trunk}/step-{step}", "k", ""))
    for step in (2, 4):
        run("ledger", trunk, f"stage.step={step}", f"stage.out={folder}/{step}.jsonl")
    (folder / "asked.jsonl").write_text((folder / "2.jsonl").read_text() + (folder / "4.jsonl").read_text())
    run("pretrain", trunk, *data, "training.steps=5", f"data.remove={folder}/asked.jsonl")
    run("pretrain", trunk, *data, "training.steps=6")
    run("pretrain", folder / "fork", *data, f"checkpoint.fork={trunk}/step-5", "training.steps=7")
    return {"run": trunk, "fork": folder / "fork", "asked": folder / "asked.jsonl", "undisturbed": undisturbed}


def test_a_run_remembers_what_was_removed(removed):
    found = lines(removed["run"])
    count = len((removed["run"] / FILE).read_text().splitlines())
    assert [found[step].get("removed", 0) for step in range(1, 7)] == [0, 0, 0, count, count, count]
    assert [found[step]["samples"] for step in range(1, 6)] == [removed["undisturbed"][step]["samples"] for step in range(1, 6)]
    assert found[3]["loss"] == removed["undisturbed"][3]["loss"]
    assert lines(removed["fork"])[7]["removed"] == count
    assert (removed["fork"] / FILE).read_text() == (removed["run"] / FILE).read_text()


def test_the_ledger_and_the_certificate_tell_reads_before_and_after(removed, tmp_path, capsys):
    run("ledger", removed["run"], "stage.step=4", f"stage.out={tmp_path}/4.jsonl")
    assert (tmp_path / "4.jsonl").read_text() == ""  # all documents of the step are left out
    run("ledger", removed["fork"], f"stage.certificate={tmp_path}/certificate.json", f"stage.out={tmp_path}/all.jsonl")
    assert "a removal does not undo" in " ".join(capsys.readouterr().out.split()).replace("which a removal", "a removal")
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert max(step for row in rows for step in row["steps"]) <= 3
    assert {4} <= {step for row in rows for step in row["left_out"]}
    certificate = checked_json.read(tmp_path / "certificate.json")
    assert certificate["checkpoint"]["step"] == 7
    assert certificate["totals"]["tokens_read_since_removal"] == 0
    assert certificate["totals"]["documents"] == len((removed["run"] / FILE).read_text().splitlines())
    assert 0 < certificate["totals"]["read_before_removal"] < certificate["totals"]["documents"]
    assert [of_run["run_dir"] for of_run in certificate["runs"]] == [str(removed["run"]), str(removed["fork"])]


def test_what_nobody_knows_is_not_certified(removed, tmp_path, capsys):
    """The trunk is gone; the weights began as those of an imported model."""
    run("ledger", removed["fork"], f"stage.certificate={tmp_path}/c")
    assert checked_json.read(tmp_path / "c")["not_known"] == []
    (removed["fork"] / IMPORTED).mkdir()
    moved = removed["run"].rename(tmp_path / "moved")
    try:
        run("ledger", removed["fork"], f"stage.certificate={tmp_path}/c")
        run("ledger", removed["fork"], f"stage.summary={tmp_path}/summary")
    finally:
        moved.rename(removed["run"])
        (removed["fork"] / IMPORTED).rmdir()
    gaps = [f"the model that was imported into {removed['fork']}", f"{removed['run']} up to step 5"]
    assert checked_json.read(tmp_path / "c")["not_known"] == gaps
    said = capsys.readouterr().out
    assert f"have also learned from what is not known: {'; '.join(gaps)}." in said
    assert "have not learned from them" not in said
    assert f"{gaps[1]}, of which nothing is counted here" in (tmp_path / "summary" / "training-content.md").read_text()


@pytest.mark.long
def test_a_merge_remembers_and_its_ledger_goes_on(removed, tokens, shards, tmp_path):
    """Trained on itself, as the trunk of a fork, and as the weights of another run; the newest member is named first."""
    merged, data = tmp_path / "merged", (f"data.tokens={tokens}", f"data.shards={shards}", "optimizer.schedule=constant")
    sources = [merge.MergeMember(Checkpoint(native.folder_of(removed["run"], step)), 0.5) for step in (6, 5)]
    merge.merge(sources, merged)
    content = (removed["run"] / FILE).read_text()
    run("pretrain", tmp_path / "fork", *data, f"checkpoint.fork={merged}/step-6", "training.steps=7")
    run("pretrain", tmp_path / "other", *data, f"checkpoint.initialize_from={merged}", "training.steps=1")
    run("pretrain", merged, *data, "training.steps=8")
    for begun in ("fork", "other", "merged"):
        assert (tmp_path / begun / FILE).read_text() == content
    for begun, last in (("fork", 7), ("merged", 8)):
        *members, own = lineage.read(tmp_path / begun)
        assert (own.before, own.last, own.samples[0]) == (6, last, members[0].samples[-1])
        run("ledger", tmp_path / begun, f"stage.step={last}", f"stage.out={tmp_path}/step.jsonl")
        rows = [json.loads(line) for line in (tmp_path / "step.jsonl").read_text().splitlines()]
        assert {row["sample"] for row in rows} <= set(range(int(own.samples[-2]), int(own.samples[-1])))


def test_what_is_refused(removed, tokens, tmp_path):
    with pytest.raises(UserError, match="is no checkpoint of"):
        run("ledger", removed["run"], f"stage.certificate={tmp_path}/c", "stage.step=9")
    with pytest.raises(UserError, match="documents were read, and step 6"):
        run("ledger", removed["run"], f"stage.certificate={tmp_path}/c", "stage.where={id: '*'}")
    assert not (tmp_path / "c").exists()
    (tmp_path / "other").write_text('{"content": "x", "document": 1, "start": 0, "tokens": 3}\n')
    with pytest.raises(UserError, match="1 of 1 documents are in no token shard of this run"):
        run("pretrain", tmp_path / "run", f"data.tokens={tokens}", "training.steps=1", f"data.remove={tmp_path}/other")
    (tmp_path / "other").write_text("")
    with pytest.raises(UserError, match="has no documents"):
        run("pretrain", tmp_path / "run", f"data.tokens={tokens}", "training.steps=1", f"data.remove={tmp_path}/other")
    (tmp_path / "other").write_text('{"url": "x"}\n')
    with pytest.raises(UserError, match="line 1 is no document"):
        run("pretrain", tmp_path / "run", f"data.tokens={tokens}", "training.steps=1", f"data.remove={tmp_path}/other")
    with pytest.raises(UserError, match=r"data\.remove=/absent: is no file"):
        check.check(configured("stage=pretrain", *TINY, f"data.tokens={tokens}", "data.remove=/absent"), 1)
    with pytest.raises(UserError, match=r"data\.remove.* has no effect with the objective masked"):
        check.check(configured("stage=pretrain", "model=bert-tiny", f"data.remove={tmp_path}/other"), 1)


@pytest.mark.long
def test_the_summary_counts_what_was_read(removed, tmp_path, capsys):
    run("ledger", removed["fork"], f"stage.summary={tmp_path}/summary")
    run("ledger", removed["fork"], "stage.where={id: '*'}", f"stage.out={tmp_path}/all.jsonl")
    read = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    read = [row for row in read if row["steps"]]
    distinct = {(row["content"], row["document"]): row["tokens"] for row in read}
    written = json.loads((tmp_path / "summary" / "training-content.json").read_text())
    assert written["counts"]["total"]["documents"] == len(distinct)
    assert written["counts"]["total"]["tokens"] == sum(distinct.values())
    count = 0
    for step in range(1, 8):
        run("ledger", removed["fork"], f"stage.step={step}", f"stage.out={tmp_path}/step.jsonl")
        count += sum(json.loads(line)["read"] for line in (tmp_path / "step.jsonl").read_text().splitlines())
    assert written["counts"]["total"]["read"] == count
    assert f"{len(distinct):,} documents" in capsys.readouterr().out
    for counts in written["counts"]["by"].values():
        assert sum(value["documents"] for value in counts.values()) == len(distinct)
    numbers = [section["number"] for section in written["sections"]]
    assert numbers == sorted(numbers)
    answers = {entry["key"]: entry["answer"] for section in written["sections"] for entry in section["questions"]}
    assert answers["provider"] is None
    assert "were removed from the run" in answers["removed"][0]
    text = (tmp_path / "summary" / "training-content.md").read_text()
    assert text.count(training_content.BLANK) == sum(answer is None for answer in answers.values())
    card = DatasetCard.load(tmp_path / "summary" / "README.md")
    assert card.data.pretty_name == f"Training content of {removed['fork'].name}"
    assert card.text.strip() == text.strip()


def test_domains_dates_and_licenses():
    content = Content()
    for number in range(30):
        fields = {
            "url": f"https://www.site{number}.example.org:80/a",
            "date": f"2024-{number % 12 + 1:02d}-03",
            "licence": "cc0",
            "lang": "de",
        }
        content.add(b"x" * (number + 1), fields, 2, 4)
    content.add(b"y", {"url": "not one", "date": "soon", "lang": "und"}, 1, 1)
    assert [name for name, _ in content.relevant_domains()] == [f"site{number}.example.org" for number in (29, 28, 27)]
    assert content.months == ((2024, 1), (2024, 12))
    assert content.dated == 30
    assert {name: counts.documents for name, counts in content.by["license"].items()} == {"cc0": 30, "": 1}
    assert {name: counts.documents for name, counts in content.by["language"].items()} == {"de": 30, "": 1}
    assert [training_content.size_range(tokens)[:6] for tokens in (1, 10**9, 10**13)] == ["less t", "1 bill", "more t"]


def test_a_document_that_came_back_has_no_certificate(removed, tmp_path):
    """Step 4 reads what step 3 left out, as if removed.jsonl had been deleted for a while."""
    shutil.copytree(removed["run"], tmp_path / "run")
    path, count = tmp_path / "run" / "metrics.jsonl", len((removed["run"] / FILE).read_text().splitlines())
    found = [json.loads(line) for line in path.read_text().splitlines()]
    changed = [line | ({"removed": {3: count, 4: 0}[line["step"]]} if line["step"] in (3, 4) else {}) for line in found]
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    with pytest.raises(UserError, match="was removed from step 3 on, and read at step 4"):
        run("ledger", tmp_path / "run", f"stage.certificate={tmp_path}/c")
