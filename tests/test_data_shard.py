"""Documents to text shards, at the command line."""

import gzip
import io
import json
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import webdataset
import zstandard
from helpers import ROOT, pipeline, same_files, words, write_corpus
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data import shuffle
from pipeline.data.shuffle import Buckets


def samples(folder: Path, split: str = "*") -> list[dict]:
    """Every document of the shards, as webdataset reads them."""
    paths = [str(path) for path in sorted(folder.glob(f"{split}-*.tar"))]
    return list(webdataset.WebDataset(paths, shardshuffle=False, empty_check=False).decode()) if paths else []


def json_line(text: str, **more: object) -> str:
    return json.dumps({"text": text, **more}, ensure_ascii=False) + "\n"


def test_every_form_of_input_is_read_whole(tmp_path):
    root = tmp_path / "Köche & Bücher"
    (root / "tief er").mkdir(parents=True)
    (root / ".hidden").mkdir()
    texts = {name: [words(100 * i + n, 20) for n in range(3)] for i, name in enumerate(["plain", "gzip", "zstd"])}
    lines = {name: "".join(json_line(t, lang="de", number=n) for n, t in enumerate(part)) for name, part in texts.items()}
    (root / "plain ü.jsonl").write_bytes(b"\xef\xbb\xbf" + lines["plain"].replace("\n", "\r\n\n", 1).encode())
    (root / "gzip.jsonl.gz").write_bytes(gzip.compress(lines["gzip"].encode()))
    frames = [zstandard.ZstdCompressor().compress(part.encode()) for part in lines["zstd"].splitlines(keepends=True)]
    (root / "zstd.jsonl.zst").write_bytes(b"".join(frames))
    (root / "tief er" / "größe.txt").write_text("Ein Dokument\r\nin zwei Zeilen\u2028oder drei", encoding="utf-8", newline="")
    (root / "empty.txt").write_text("")
    (root / "notes.md").write_text("not asked for")
    (root / ".hidden" / "x.txt").write_text("not asked for")
    printed = pipeline("stage=shard", f'data.input=["{root}"]', f"data.shards={tmp_path}/shards", "data.validation_fraction=0.3")

    found = samples(tmp_path / "shards")
    expected = [*texts["plain"], *texts["gzip"], *texts["zstd"], "Ein Dokument\r\nin zwei Zeilen\u2028oder drei"]
    assert sorted(sample["txt"] for sample in found) == sorted(expected)
    assert len({sample["json"]["id"] for sample in found}) == len(expected)
    described = {sample["txt"]: sample["json"] for sample in found}
    assert described[texts["zstd"][2]]["meta"] == {"lang": "de", "number": 2}
    assert described[expected[-1]]["source"] == "tief er/größe.txt"
    assert "1 empty documents left out" in printed

    globbed = tmp_path / "globbed"
    pipeline("stage=shard", f'data.input=["{root}/**/*.txt","{root}/gzip*"]', f"data.shards={globbed}")
    assert sorted(sample["txt"] for sample in samples(globbed)) == sorted([*texts["gzip"], expected[-1]])


def test_any_number_of_ranks_writes_the_same_bytes(corpus, shards, tmp_path):
    settings = ("stage=shard", f"data.input=[{corpus}]", "data.shard_megabytes=0.05", "data.validation_fraction=0.1")
    assert len(list(shards.glob("train-*.tar"))) >= 3
    for ranks in (1, 2, 4):
        pipeline(*settings, f"data.shards={tmp_path}/{ranks}", ranks=ranks)
        assert same_files(shards, tmp_path / str(ranks)), ranks


def test_shards_are_the_ustar_files_that_tarfile_writes(shards):
    for path in shards.glob("*.tar"):
        again = io.BytesIO()
        with tarfile.open(path) as archive, tarfile.open(fileobj=again, mode="w", format=tarfile.USTAR_FORMAT) as rewritten:
            for member in archive:
                plain = tarfile.TarInfo(member.name)  # owner, group, time: all zero
                plain.size = member.size
                rewritten.addfile(plain, archive.extractfile(member))
        whole = again.getvalue()
        assert whole.startswith(path.read_bytes())
        assert not whole[path.stat().st_size :].strip(b"\0")  # tarfile pads to records of 10 kB


def test_manifest_counts_what_the_shards_hold(corpus, shards):
    manifest = json.loads((shards / "manifest.json").read_text())
    for split in ("train", "validation"):
        found = samples(shards, split)
        assert manifest["totals"][split]["documents"] == len(found) > 0
        assert manifest["totals"][split]["bytes"] == sum(len(sample["txt"].encode()) for sample in found)
    lines = [json.loads(line)["text"] for path in corpus.iterdir() for line in path.read_text(encoding="utf-8").splitlines()]
    assert sorted(sample["txt"] for sample in samples(shards)) == sorted(lines)
    # Shuffled: neither the order of the files nor their lengths survive.
    order = [sample["json"]["id"] for sample in samples(shards, "train")]
    assert order != sorted(order)


def test_another_seed_is_another_order_and_another_split(corpus, shards, tmp_path):
    pipeline("stage=shard", f"data.input=[{corpus}]", f"data.shards={tmp_path}/s", "data.validation_fraction=0.1", "data.seed=1")
    first, second = ({s["json"]["id"] for s in samples(folder, "validation")} for folder in (shards, tmp_path / "s"))
    assert first != second


def test_documents_keep_their_split_when_the_corpus_grows(corpus, shards, tmp_path):
    write_corpus(tmp_path / "more", documents=20)
    (tmp_path / "more" / "part-0.jsonl").rename(tmp_path / "more" / "other.jsonl")
    (tmp_path / "more" / "part-1.jsonl").unlink()
    pipeline("stage=shard", f"data.input=[{corpus},{tmp_path}/more]", f"data.shards={tmp_path}/s", "data.validation_fraction=0.1")
    before, after = ({s["json"]["id"] for s in samples(folder, "validation")} for folder in (shards, tmp_path / "s"))
    assert before <= after


@pytest.mark.parametrize("documents", [1, 2, 3])
def test_few_documents_still_make_both_splits(tmp_path, documents):
    for number in range(documents):
        (tmp_path / f"{number}.txt").write_text(f"document {number}")
    for fraction, validation in ((0.001, min(1, documents - 1)), (0, 0)):
        folder = tmp_path / f"shards-{fraction}"
        pipeline("stage=shard", f"data.input=[{tmp_path}/*.txt]", f"data.shards={folder}", f"data.validation_fraction={fraction}")
        assert len(samples(folder, "validation")) == validation
        assert len(samples(folder, "train")) == documents - validation


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.lists(st.integers(0, 3), min_size=1, max_size=3), st.booleans())
def test_plan_writes_every_document_once(train, validation, wanted):
    if not wanted:
        validation = [0] * len(validation)
    counts = train + validation
    plan = shuffle.plan_shards(Buckets(len(train), len(validation), seed=0, validation_fraction=0.1 * wanted), counts)
    written = sorted((shard.bucket, i) for shard in plan for i in range(shard.first, shard.stop))
    assert written == [(bucket, i) for bucket, count in enumerate(counts) for i in range(count)]
    assert all(shard.first < shard.stop for shard in plan)
    for split, least in (("train", sum(counts) >= 1), ("validation", wanted and sum(counts) >= 2)):
        names = [shard.name for shard in plan if shard.name.startswith(split)]
        assert len(names) >= least
        assert names == [f"{split}-{number:05d}.tar" for number in range(len(names))]


def test_a_finished_stage_does_nothing_and_other_settings_are_refused(corpus, shards):
    settings = ["stage=shard", f"data.input=[{corpus}]", f"data.shards={shards}", "data.shard_megabytes=0.05"]
    before = {path: path.stat().st_mtime_ns for path in shards.iterdir()}
    assert "nothing to do" in pipeline(*settings, "data.validation_fraction=0.1")
    refused = pipeline(*settings, "data.validation_fraction=0.2", "data.seed=3", expect=2)
    assert "data.validation_fraction=0.2" in refused
    assert "was made with data.validation_fraction=0.1" in refused
    assert "data.seed=3" in refused
    assert {path: path.stat().st_mtime_ns for path in shards.iterdir()} == before


def test_an_input_or_output_that_cannot_be_is_explained(tmp_path):
    assert "data.input=[x.jsonl]" in pipeline("stage=shard", "data.input=x.jsonl", expect=2)
    assert "names no documents" in pipeline("stage=shard", f"data.shards={tmp_path}/s", expect=2)
    (tmp_path / "empty.txt").write_text("")
    below_a_file = pipeline("stage=shard", f"data.input=[{tmp_path}]", f"data.shards={tmp_path}/empty.txt/s", expect=2)
    assert "cannot be written: Not a directory" in below_a_file
    printed = pipeline("stage=shard", f"data.input=[{tmp_path}/empty.txt]", f"data.shards={tmp_path}/s", expect=2)
    assert "no document with any text" in printed


def test_a_world_that_mpi_does_not_see_is_refused(tmp_path):
    """As under a launcher whose PMI does not fit: every process would think that it is alone."""
    (tmp_path / "x.txt").write_text("x")
    place = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    printed = pipeline("stage=shard", f"data.input=[{tmp_path}]", f"data.shards={tmp_path}/s", expect=2, env=place)
    assert "started 4 ranks, MPI sees 1" in printed
    assert not (tmp_path / "s").exists()


def test_a_full_disk_ends_clearly_and_the_rerun_completes(tmp_path):
    """A file-size limit stands for the full disk: it fails the same writes, and needs no root."""
    (tmp_path / "x.jsonl").write_text("".join(json_line(words(n, 40)) for n in range(400)))
    settings = ("stage=shard", f"data.input=[{tmp_path}/x.jsonl]")
    pipeline(*settings, f"data.shards={tmp_path}/whole")
    folder = tmp_path / "limited"
    for kilobytes in (50, 200):  # too little for the spill; enough for it, but not for the shard
        limited = ("bash", "-c", f'trap "" XFSZ; ulimit -f {kilobytes}; exec "$@"', "limited")
        printed = pipeline(*settings, f"data.shards={folder}", expect=2, prefix=limited)
        assert f"{folder}: cannot be written" in printed
        assert "Traceback" not in printed
        assert [path.name for path in folder.iterdir()] == [".unfinished"]
    pipeline(*settings, f"data.shards={folder}")
    assert same_files(tmp_path / "whole", folder)


def test_a_killed_run_leaves_nothing_final_and_its_rerun_equals_an_undisturbed_one(tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json_line(words(n, 400)) for n in range(3000)))
    settings = ["stage=shard", f"data.input=[{tmp_path}/x.jsonl]", "data.shard_megabytes=0.3"]
    pipeline(*settings, f"data.shards={tmp_path}/whole")
    folder = tmp_path / "killed"
    for mark in ("*.spill", "plan.json", "train-00008.tar.json"):  # reading, about to write, writing
        command = [sys.executable, "-m", "pipeline", *settings, f"data.shards={folder}"]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        while process.poll() is None and not list((folder / ".unfinished").glob(mark)):
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
        assert not (folder / "manifest.json").exists()
    done = {path.name: path.stat().st_ino for path in folder.glob("*.tar")}
    assert done
    pipeline(*settings, f"data.shards={folder}", ranks=2)
    assert same_files(tmp_path / "whole", folder)
    assert all((folder / name).stat().st_ino == inode for name, inode in done.items()), "finished shards were written again"


def test_shards_of_an_earlier_run_do_not_survive_beside_new_ones(tmp_path):
    write_corpus(tmp_path / "c")
    folder = tmp_path / "s"
    pipeline("stage=shard", f"data.input=[{tmp_path}/c]", f"data.shards={folder}", "data.shard_megabytes=0.05")
    (folder / "manifest.json").unlink()
    pipeline("stage=shard", f"data.input=[{tmp_path}/c]", f"data.shards={folder}")
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "train-00000.tar", "validation-00000.tar"]
