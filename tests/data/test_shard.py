"""Text shards from documents, at the command line."""

import io
import json
import re
import tarfile
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.read import input_files, inventory
from pipeline.data.shard import shuffle, text_shards
from pipeline.data.shard.shuffle import Order, Tally
from tests.data.library import LIBRARY, here, samples
from tests.data.raw_files import json_line
from tests.helpers import RAW, ROOT, pipeline, prose, python, same_files, words, write_corpus


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def line_offsets(path: Path) -> list[int]:
    """The offset of every line of a file, in bytes."""
    lines = path.read_bytes().splitlines(keepends=True)
    return [sum(map(len, lines[:number])) for number in range(len(lines))]


def test_any_number_of_ranks_writes_the_same_bytes(library, cleaned, tmp_path):
    assert len(list(cleaned.glob("train-*.tar"))) >= 3
    pipeline(*LIBRARY, f"data.input=[{library}]", f"data.shards={tmp_path}/s", ranks=4)
    assert same_files(cleaned, tmp_path / "s")


@pytest.mark.long
@pytest.mark.parametrize("ranks", [3, 1])
def test_limits_of_memory_and_open_files_change_nothing(library, tmp_path, ranks):
    """Runs, pieces, batches, slices and messages of a few kilobytes, and two open files."""
    removed = ("dedup.paragraphs=true", "dedup.paragraph_characters=30", "dedup.spans=8", "dedup.span_megabytes=1")
    settings = (*LIBRARY, f"data.input=[{library}]", *removed, "data.save_dropped=true")
    here(*settings, f"data.shards={tmp_path}/one")
    code, printed = python(ROOT / "tests/data/small_limits.py", *settings, f"data.shards={tmp_path}/limited", ranks=ranks)
    assert code == 0, printed
    assert same_files(tmp_path / "one", tmp_path / "limited")


def test_cleaning_and_deduplication_keep_the_expected_documents(cleaned):
    texts = sorted(sample["txt"] for sample in samples(cleaned))
    expected = {prose(100 * part + n) for part in range(3) for n in range(60)} | {"Märchen. " + prose(900 + part) for part in range(3)}
    near = [text for text in texts if "Printed for the" in text]
    assert sorted(expected | set(near)) == texts
    assert sorted(text.split(" Printed")[0] for text in near) == sorted(prose(n, 40) for n in range(500, 503))
    totals = read_json(cleaned / "manifest.json")["totals"]
    assert (totals["exact_duplicates"], totals["near_duplicates"], totals["cleaned_documents"]) == (12, 6, 6)
    assert {sample["json"]["lang"] for sample in samples(cleaned)} == {"en"}


def test_the_report_accounts_for_every_document(library, cleaned):
    report = read_json(cleaned / "report.json")
    read = report["input"]["documents"]
    assert read == sum(path.read_text(encoding="utf-8").count("\n") for path in library.iterdir())
    left = read
    for step in report["steps"]:
        assert step["documents"] == left
        left -= sum(reason["documents"] for reason in step["dropped"].values())
    duplicates = report["duplicates"]
    assert left - duplicates["exact"] - duplicates["near"] == len(samples(cleaned))
    by_name = {step["step"]: step for step in report["steps"]}
    assert by_name["length"]["dropped"]["too short"]["documents"] == 3
    shown = by_name["length"]["examples"]["too short"]
    assert {(example["before"], example["after"], example["corpus"]) for example in shown} == {("too short", None, "default")}
    assert by_name["repair"]["examples"]["encoding or entities repaired"][0]["after"].startswith("Märchen.")
    assert {(cluster["kind"], cluster["documents"]) for cluster in duplicates["clusters"]} == {("exact", 3), ("near", 3)}
    assert report["output"]["languages"]["en"][0] == len(samples(cleaned)) == sum(report["output"]["lengths"].values())
    for corpus, (documents, _) in report["input"]["corpora"].items():
        assert documents == report["kept"][corpus][0] + sum(count for count, _ in report["lost"][corpus].values())
    assert by_name["repair"]["removed"] == {"encoding or entities repaired": 6}
    page = (cleaned / "report.html").read_text(encoding="utf-8")
    assert "<del>MÃ¤rchen</del><ins>Märchen</ins>" in page
    assert "of 210 documents kept" in page
    assert "http" not in page, "the page must not load anything"


def test_raw_documents_are_unchanged(corpus, shards):
    manifest = read_json(shards / "manifest.json")
    for split in ("train", "validation"):
        found = samples(shards, split)
        assert manifest["totals"][split]["documents"] == len(found) > 0
        assert manifest["totals"][split]["bytes"] == sum(len(sample["txt"].encode()) for sample in found)
        entries = [entry for entry in manifest["files"].values() if entry.get("split") == split]
        assert sum(entry["documents"] for entry in entries) == len(found)
        assert {entry["corpus"] for entry in entries} == {"default"}
    lines = [json.loads(line)["text"] for path in corpus.iterdir() for line in path.read_text(encoding="utf-8").splitlines()]
    assert sorted(sample["txt"] for sample in samples(shards)) == sorted(lines)
    # Shuffled: the documents are not in the order of the files.
    order = [sample["json"]["id"] for sample in samples(shards, "train")]
    assert order != sorted(order)


def test_shards_have_the_configured_size_after_cleaning(cleaned, shards):
    for folder in (cleaned, shards):
        files = read_json(folder / "manifest.json")["files"]
        sizes = [entry["text_bytes"] for name, entry in files.items() if name.startswith("train-")]
        assert all(35_000 < size < 65_000 for size in sizes), sizes


def test_shards_are_the_ustar_files_that_tarfile_writes(shards):
    for path in shards.glob("*.tar"):
        again = io.BytesIO()
        with tarfile.open(path) as archive, tarfile.open(fileobj=again, mode="w", format=tarfile.USTAR_FORMAT) as rewritten:
            for member in archive:
                plain = tarfile.TarInfo(member.name)  # owner, group, time: all zero
                plain.size = member.size
                rewritten.addfile(plain, archive.extractfile(member))
        expected = again.getvalue()
        assert expected.startswith(path.read_bytes())
        assert not expected[path.stat().st_size :].strip(b"\0")  # tarfile pads to records of 10 kB


def test_many_documents_can_share_a_member(library, cleaned, tmp_path):
    here(*LIBRARY, f"data.input=[{library}]", f"data.shards={tmp_path}/s", "data.documents_per_member=10")
    packed = [document for path in sorted((tmp_path / "s").glob("train-*.tar")) for document in text_shards.documents(path)]
    single = [document for path in sorted(cleaned.glob("train-*.tar")) for document in text_shards.documents(path)]
    assert packed == single
    read = [json.loads(line)["text"] for sample in samples(tmp_path / "s", "train") for line in sample["jsonl"].splitlines()]
    assert read == [text.decode() for text, _ in single]
    assert (tmp_path / "s" / "train-00000.tar").stat().st_size < (cleaned / "train-00000.tar").stat().st_size


def test_corpora_keep_their_names_and_are_deduplicated_together(library, tmp_path):
    files = {name: f'["{library}/part {part}.jsonl"]' for part, name in enumerate(("books", "web"))}
    settings = [f"data.corpora={{{','.join(f'{name}: {paths}' for name, paths in files.items())}}}"]
    here(*LIBRARY, *settings, f"data.shards={tmp_path}/s")
    manifest = read_json(tmp_path / "s" / "manifest.json")
    assert set(manifest["totals"]["corpora"]) == {"books", "web"}
    for corpus in ("books", "web"):
        paths = [tmp_path / "s" / name for name, entry in manifest["files"].items() if entry.get("corpus") == corpus]
        assert all(path.name.startswith((f"train-{corpus}-", f"validation-{corpus}-")) for path in paths)
        about = [about for path in paths for _, about in text_shards.documents(path)]
        assert {entry["corpus"] for entry in about} == {corpus}
        counted = manifest["totals"]["corpora"][corpus]
        assert len(about) == sum(counted[split]["documents"] for split in ("train", "validation"))
    assert manifest["totals"]["exact_duplicates"] == 6


def test_urls_lines_and_spans_are_deduplicated_in_a_corpus_and_against_another(tmp_path):
    line = "Subscribe to our letter from the harbour, and read of it first."
    passage, longer = " ".join(words(1, 40).split()), prose(30, 40) + " And a longer text, which is the better one."

    def text(n: int, more: str = "") -> str:
        return f"{prose(n, 20)}{more} {n}. {prose(n + 100)}"

    pages = [json_line(f"{text(n, f' {passage}' * (n in (3, 7)))}\n{line}", url=f"https://example.org/{n}/") for n in range(10)]
    pages += [json_line(longer, url="http://www.example.org/5"), json_line(passage)]
    (tmp_path / "pages.jsonl").write_text("".join(pages))
    settings = ("stage=shard", "clean=none", "dedup.spans=25", "dedup.save_signatures=true")
    first = (f"data.input=[{tmp_path}/pages.jsonl]", "dedup.url=true", "dedup.paragraphs=true")
    here(*settings, *first, f"data.shards={tmp_path}/s0")
    pipeline(*settings, *first, f"data.shards={tmp_path}/s2", ranks=2)
    assert same_files(tmp_path / "s0", tmp_path / "s2")
    kept = [f"{text(0)}\n{line}", text(3, f" {passage}"), longer, *map(text, (1, 2, 4, 6, 7, 8, 9))]
    assert sorted(sample["txt"] for sample in samples(tmp_path / "s0")) == sorted(kept)
    cut = {"documents": 2, "spans": 2, "words": 2 * len(passage.split())}
    assert read_json(tmp_path / "s0/manifest.json")["totals"]["repeated_spans"] == cut
    lost = read_json(tmp_path / "s0/report.json")["lost"]["default"]
    assert lost == {"dedup: same URL": [1, len(text(5).encode()) + 1 + len(line)], "dedup: all text repeated": [1, len(passage.encode())]}
    assert f"cut from 2 documents: 2 with {cut['words']} words" in (tmp_path / "s0/report.html").read_text()

    (tmp_path / "more.jsonl").write_text("".join(map(json_line, (f"{prose(50)} {passage}", prose(3, 20), f"{text(4)} Fin."))))
    against = (f"data.input=[{tmp_path}/more.jsonl]", f"dedup.against=[{tmp_path}/s0]", f"data.shards={tmp_path}/more")
    pipeline(*settings, *against, ranks=2)
    assert [sample["txt"] for sample in samples(tmp_path / "more")] == [prose(50)]
    assert set(read_json(tmp_path / "more/report.json")["lost"]["default"]) == {"dedup: near duplicate", "dedup: all text repeated"}


def test_another_seed_changes_the_order_and_the_split(corpus, shards, tmp_path):
    settings = ("stage=shard", *RAW, f"data.input=[{corpus}]", "data.validation_fraction=0.1", "data.seed=1")
    here(*settings, f"data.shards={tmp_path}/s")
    first, second = ({s["json"]["id"] for s in samples(folder, "validation")} for folder in (shards, tmp_path / "s"))
    assert first != second


def test_a_sample_of_the_documents_is_compared_with_the_same_sample_made_with_other_settings(library, cleaned, tmp_path):
    settings = (*LIBRARY, f"data.input=[{library}]", "data.sample=0.5")
    for name, more in {"raw": RAW, "parts": (*RAW, "data.part_megabytes=1"), "cleaned": [f"data.compare={tmp_path}/raw"]}.items():
        here(*settings, *more, f"data.shards={tmp_path}/{name}")
    raw, parts, chosen, whole = (
        {s["json"]["id"] for s in samples(f)} for f in (*(tmp_path / n for n in ("raw", "parts", "cleaned")), cleaned)
    )
    read = json.loads((cleaned / "report.json").read_text())["input"]["documents"]
    assert raw == parts
    assert 0.35 * read < len(raw) < 0.65 * read
    assert len(chosen & whole) > 0.9 * len(chosen) > 0, "copies are dropped for another one"
    page = (tmp_path / "cleaned" / "report.html").read_text()
    assert "documents of a sample of 50.0 % kept" in page
    rows = [[unescape(re.sub("<[^>]+>", "", cell)) for cell in re.findall(r"<td.*?</td>", row)] for row in page.split("<tr>")]
    kept = f"{100 * len(chosen) / len(raw):.1f} %"
    assert ["default: kept", str(len(chosen)), kept, str(len(raw)), "100.0 %"] in rows
    assert ["dedup.exact", "true", "false"] in rows
    assert any(row[:1] == ["default: dedup: exact duplicate"] and row[3] == "0" for row in rows), rows
    assert "data.compare" in here(*settings, "data.compare=nowhere", f"data.shards={tmp_path}/none", expect=2)


def test_documents_keep_their_split_when_the_corpus_grows(corpus, shards, tmp_path):
    write_corpus(tmp_path / "more", documents=20)
    (tmp_path / "more" / "part-0.jsonl").rename(tmp_path / "more" / "other.jsonl")
    (tmp_path / "more" / "part-1.jsonl").unlink()
    settings = ("stage=shard", *RAW, f"data.input=[{corpus},{tmp_path}/more]", "data.validation_fraction=0.1")
    here(*settings, f"data.shards={tmp_path}/s")
    before, after = ({s["json"]["id"] for s in samples(folder, "validation")} for folder in (shards, tmp_path / "s"))
    assert before <= after


@pytest.mark.parametrize("documents", [1, 2])
def test_few_documents_fill_both_splits(tmp_path, documents):
    for number in range(documents):
        (tmp_path / f"{number}.txt").write_text(f"document {number}")
    for fraction, validation in ((0.001, min(1, documents - 1)), (0, 0), (1, documents - 1)):
        folder = tmp_path / f"shards-{fraction}"
        here("stage=shard", *RAW, f"data.input=[{tmp_path}/*.txt]", f"data.shards={folder}", f"data.validation_fraction={fraction}")
        assert len(samples(folder, "validation")) == validation
        assert len(samples(folder, "train")) == documents - validation


GROUP = st.dictionaries(st.integers(0, (1 << 12) - 1), st.integers(1, 5000), max_size=30)


@given(st.lists(st.tuples(GROUP, GROUP), min_size=1, max_size=3), st.booleans(), st.floats(0.001, 1.0))
def test_a_plan_writes_every_document_once(corpora, validation_wanted, megabytes):
    """Plan groups of documents with a shuffle key and a size, then select documents as the shard writer does."""
    names = tuple(f"c{number}" for number in range(len(corpora)))
    order = Order(names, seed=0, validation_fraction=0.1 * validation_wanted, bins=1 << 12)
    groups = [group if split == 0 or validation_wanted else {} for pair in corpora for split, group in enumerate(pair)]
    documents, tallies = {}, []
    for number, group in enumerate(groups):
        sizes = np.zeros(order.bins, dtype=np.int64)
        numbers = {bin_: len(documents) + i for i, bin_ in enumerate(sorted(group))}
        documents.update({numbers[bin_]: (order.first_key(number, bin_) + 5, group[bin_]) for bin_ in group})
        np.add.at(sizes, list(group), list(group.values()))
        first = min(((documents[n][0], n) for n in numbers.values()), default=None)
        tallies.append(Tally(len(group), sizes, first))
    plan = shuffle.plan_shards(order, tallies, megabytes)
    written = [
        number
        for shard in plan
        for number, (key, _) in documents.items()
        if shard.first <= key < shard.stop and number != shard.without and shard.only in (None, number)
    ]
    assert sorted(written) == sorted(documents)
    for corpus, (train, validation) in zip(names, zip(tallies[::2], tallies[1::2], strict=True), strict=True):
        total = train.documents + validation.documents
        splits = {shard.split for shard in plan if shard.corpus == corpus}
        assert ("train" in splits) == (total >= 1)
        assert ("validation" in splits) == (validation_wanted and total >= 2)


def test_the_division_into_parts_changes_nothing(library, tmp_path):
    """Which of equal documents and lines is kept, which near duplicates are found, and all bytes of shards and report."""
    for megabytes in (0.01, 100):
        parts = (f"data.part_megabytes={megabytes}", "dedup.paragraphs=true", "dedup.paragraph_characters=30", "dedup.spans=9")
        here("stage=shard", LIBRARY[2], LIBRARY[3], *parts, f"data.input=[{library}]", f"data.shards={tmp_path}/{megabytes}")
    assert same_files(tmp_path / "0.01", tmp_path / "100")
    kept = {sample["txt"]: sample["json"]["source"] for sample in samples(tmp_path / "100")}
    assert {kept[prose(n)] for n in range(0, 60, 10)} == {"part 0.jsonl"}, "of equal documents, the first is kept"


def test_text_shards_in_the_input_are_named(cleaned, library, caplog):
    """Their held-out documents would be training documents without a word."""
    for folder in (library, cleaned):
        inventory.report_listing(input_files.find({"default": [str(folder)]}, [], []), [])
    (warning,) = (record.getMessage() for record in caplog.records if "validation split" in record.getMessage())
    assert f"{cleaned} has text shards" in warning


def test_dropped_documents_are_saved_with_the_reason_and_can_be_read_again(library, cleaned, tmp_path):
    here(*LIBRARY, "data.save_dropped=true", f"data.input=[{library}]", f"data.shards={tmp_path}/s")
    with zstandard.open(tmp_path / "s" / "dropped.jsonl.zst", "rt", encoding="utf-8") as handle:
        dropped = [json.loads(line) for line in handle]
    kept = {sample["json"]["id"]: sample["txt"] for sample in samples(cleaned)}
    read = {f"{path.name}:{offset}" for path in library.iterdir() for offset in line_offsets(path)}
    assert sorted([*kept, *(entry["id"] for entry in dropped)]) == sorted(read), "every document is kept or listed"
    assert {"step": "length", "reason": "too short", "text": "too short"}.items() <= next(e for e in dropped if len(e["text"]) < 20).items()
    assert sum(entry["step"] == "dedup" for entry in dropped) == 18
    for entry in dropped:
        kind, _, of = entry["reason"].partition(" duplicate of ")
        if of:
            assert (kept[of] == entry["text"]) == (kind == "exact")
    here("stage=shard", *RAW, f"data.input=[{tmp_path}/s/dropped.jsonl.zst]", f"data.shards={tmp_path}/again")
    assert sorted(sample["txt"] for sample in samples(tmp_path / "again")) == sorted(entry["text"] for entry in dropped)
