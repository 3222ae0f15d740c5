"""Inputs, settings and folders that stage=shard refuses."""

import gzip
import json
import os
import re
import shutil

from tests.data.library import LIBRARY, here, samples
from tests.data.raw_files import json_line
from tests.helpers import RAW, pipeline, words


def test_a_finished_stage_does_nothing_and_other_settings_are_refused(corpus, shards):
    settings = [
        "stage=shard",
        *RAW,
        f"data.input=[{corpus}]",
        f"data.shards={shards}",
        "data.part_megabytes=0.1",
        "data.shard_megabytes=0.05",
    ]
    before = {path: path.stat().st_mtime_ns for path in shards.iterdir()}
    assert "nothing to do" in here(*settings, "data.validation_fraction=0.1")
    refused = here(*settings, "data.validation_fraction=0.2", "clean.steps=[length]", "clean.length.least=3", expect=2)
    assert "data.validation_fraction=0.2" in refused
    assert "was created with data.validation_fraction=0.1" in refused
    assert "clean.length.least=3" in refused
    assert {path: path.stat().st_mtime_ns for path in shards.iterdir()} == before


def test_an_invalid_input_or_output_is_explained(tmp_path):
    assert "data.input=[x.jsonl]" in pipeline("stage=shard", "data.input=x.jsonl", expect=2)
    assert "names no documents" in here("stage=shard", f"data.shards={tmp_path}/s", expect=2)
    assert not (tmp_path / "s").exists()
    (tmp_path / "short.txt").write_text("short")
    below_a_file = here("stage=shard", f"data.input=[{tmp_path}]", f"data.shards={tmp_path}/short.txt/s", expect=2)
    assert "which is a file" in below_a_file
    printed = here("stage=shard", f"data.input=[{tmp_path}/short.txt]", f"data.shards={tmp_path}/s", expect=2)
    assert "cleaning and deduplication dropped all 1 non-empty documents" in printed


def test_a_run_that_needs_more_files_or_memory_than_there_are_is_refused_before_it_works(tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json_line(words(n, 9)) for n in range(5000)))
    settings = ("stage=shard", *RAW, f"data.input=[{tmp_path}/x.jsonl]", f"data.shards={tmp_path}/s")
    refused = pipeline(*settings, ranks=2, env={"SLURM_MEM_PER_NODE": "200"}, expect=2)
    assert "ranks=2: needs 0.1" in refused
    assert "GB of memory a rank" in refused
    assert "0.10 GB are available" in refused
    assert "start at most 1 ranks on a node" in refused
    if os.statvfs(tmp_path).f_files:
        refused = here(*settings, "data.shard_megabytes=1e-10", expect=2)
        assert re.search(rf"data.shards={tmp_path}/s: needs [\d,]+ files, of which the file system has [\d,]+ left", refused), refused
        smallest = float(re.search(r"set data.part_megabytes=1 and data.shard_megabytes=(\S+), in an empty data.shards", refused)[1])
        assert 1e-10 < smallest < 1
    assert not (tmp_path / "s" / ".unfinished").exists()
    here(*settings)


def test_few_bad_documents_are_quarantined_and_many_end_the_job(tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json_line(words(n, 9)) for n in range(99)) + "{}\n")
    settings = ("stage=shard", *RAW, f"data.input=[{tmp_path}/x.jsonl]")
    assert "1 unreadable documents" in here(*settings, f"data.shards={tmp_path}/s")
    (bad,) = [json.loads(line) for line in (tmp_path / "s" / "quarantine.jsonl").read_text().splitlines()]
    assert (bad["file"], bad["position"]) == ("x.jsonl", "line 100")
    assert "text" in bad["reason"]
    assert len(samples(tmp_path / "s")) == 99
    with open(tmp_path / "x.jsonl", "a") as handle:
        handle.write("{}\n")
    refused = pipeline(*settings, f"data.shards={tmp_path}/t", ranks=2, expect=2)
    assert "data.quarantine_limit=0.01: 2 of 101 documents could not be read: x.jsonl line 100" in refused
    assert not list((tmp_path / "t").glob("*.tar"))
    assert "2 unreadable documents" in here(*settings, f"data.shards={tmp_path}/t", "data.quarantine_limit=0.02")


def test_a_truncated_file_weighs_as_the_bytes_that_are_lost(tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json_line(words(n, 9)) for n in range(1000)))
    with gzip.open(tmp_path / "y.jsonl.gz", "wt") as handle:
        handle.writelines(json_line(words(n, 9)) for n in range(1000))
    whole = (tmp_path / "y.jsonl.gz").read_bytes()
    (tmp_path / "y.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    settings = ("stage=shard", *RAW, f"data.input=[{tmp_path}]", f"data.shards={tmp_path}/s")
    size = (tmp_path / "x.jsonl").stat().st_size + len(whole) // 2
    refused = here(*settings, expect=2)
    assert f"about {len(whole) // 2:,} of {size:,} bytes, in damaged files, could not be read: y.jsonl.gz byte" in refused
    assert "1 unreadable documents" in here(*settings, "data.quarantine_limit=0.2")


def test_a_changed_input_file_is_noticed_on_resume_and_a_copied_one_is_not(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    text = "".join(json_line(words(n, 9)) for n in range(50)) + "{}\n"
    for name in ("x.jsonl", "y.jsonl"):
        (folder / name).write_text(text)
    settings = ("stage=shard", *RAW, f"data.shards={tmp_path}/s")
    assert "data.quarantine_limit" in here(*settings, f"data.input=[{folder}]", expect=2)
    (folder / "y.jsonl").write_text(text.replace("Wald", "Feld", 1))
    refused = here(*settings, f"data.input=[{folder}]", "data.quarantine_limit=1", expect=2)
    assert "data.input/y.jsonl=" in refused
    assert "data.input/x.jsonl=" not in refused
    shutil.rmtree(tmp_path / "s")
    here(*settings, f"data.input=[{folder}]", "data.quarantine_limit=1")
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    assert "nothing to do" in here(*settings, f"data.input=[{tmp_path}/copy]")
    (tmp_path / "copy" / "x.jsonl").write_text(text.replace("Wald", "Feld", 1))
    assert "was created with data.input=2 files" in here(*settings, f"data.input=[{tmp_path}/copy]", expect=2)


def test_a_world_that_mpi_does_not_see_is_refused(tmp_path):
    """As under a launcher with a mismatched PMI: every process would see a world of one rank."""
    (tmp_path / "x.txt").write_text("x")
    place = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    printed = pipeline("stage=shard", f"data.input=[{tmp_path}]", f"data.shards={tmp_path}/s", expect=2, env=place)
    assert "started 4 ranks, MPI sees 1" in printed
    assert not (tmp_path / "s").exists()


def test_files_of_another_program_are_neither_overwritten_nor_removed(library, tmp_path):
    folder = tmp_path / "s"
    folder.mkdir()
    mine = [folder / name for name in (".x.7.partial", "report.html", *(f"train-0000{number}.tar" for number in range(7)))]
    for path in mine:
        path.write_text("mine")
    printed = here(*LIBRARY, f"data.input=[{library}]", f"data.shards={folder}", expect=2)
    named = re.escape(f"data.shards={folder}: contains files of another run or program: report.html, train-00000.tar, ")
    assert re.search(named + r".*, \.\.\.\n", printed)
    assert sorted(folder.iterdir()) == sorted(mine)
    assert {path.read_text() for path in mine} == {"mine"}
    (folder / "manifest.json").write_text('{"name": "of another program"}')
    assert "manifest.json that no stage wrote" in here(*LIBRARY, f"data.input=[{library}]", f"data.shards={folder}", expect=2)


def test_an_unfinished_run_is_not_discarded_by_other_settings(tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json_line(words(n, 9)) for n in range(50)) + "{}\n")
    settings = ("stage=shard", *RAW, f"data.input=[{tmp_path}/x.jsonl]", f"data.shards={tmp_path}/s")
    assert "data.quarantine_limit" in here(*settings, expect=2)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("s/.unfinished/*")}
    refused = here(*settings, "data.seed=3", "data.quarantine_limit=1", expect=2)
    assert f"data.seed=3: {tmp_path}/s holds an unfinished run with data.seed=0" in refused
    assert "1 problem" in refused
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("s/.unfinished/*")} == before
    here(*settings, "data.quarantine_limit=1")
    assert len(samples(tmp_path / "s")) == 50
