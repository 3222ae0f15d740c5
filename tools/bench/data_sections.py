"""The rows of tools/bench_data: what every contender runs, on which input, and how its time becomes a rate."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from tools.bench import data_text
from tools.bench.data_processes import WORKERS, Setting, run_job, run_stage
from tools.bench.data_text import Text

END = "<|endoftext|>"
VOCABULARY = 32_768
SPLIT_OFF = "data.validation_fraction=0"
UNTOUCHED = ("clean=none", "dedup=none", SPLIT_OFF)


@dataclass(frozen=True)
class Result:
    """One measurement: the rate in the section's unit, and what else is known."""

    rate: float
    seconds: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One contender. `measure` is given a new folder."""

    name: str
    measure: Callable[[Path], Result]


@dataclass(frozen=True)
class Section:
    """Rows that are compared. The first is ours."""

    title: str
    unit: str
    rows: list[Row]


# Inputs: made once, in a process of their own, outside of all timing


@cache
def documents(setting: Setting) -> list[str]:
    """What all texts are made of."""
    return data_text.source(setting.inputs)


@cache
def text(setting: Setting, megabytes: float) -> Text:
    """JSON lines of that size."""
    return data_text.write(documents(setting), round(megabytes * 1e6), setting.folder / f"text-{megabytes:g}")


def shard_megabytes(megabytes: float) -> str:
    """Eight shards and more, so that there is work for all ranks."""
    return f"data.shard_megabytes={min(32, megabytes / 8):g}"


@cache
def text_shards(setting: Setting, megabytes: float) -> Path:
    """The same documents, all of them, as text shards."""
    folder = setting.folder / f"shards-{megabytes:g}"
    run_shard(setting, megabytes, folder, *UNTOUCHED)
    return folder


@cache
def tokenizer(setting: Setting, megabytes: float) -> Path:
    """A byte-level BPE with GPT-2's split, learned from the text."""
    folder = setting.folder / f"tokenizer-{megabytes:g}"
    shards = text_shards(setting, megabytes)
    run_stage(
        setting, "train_tokenizer", f"data.shards={shards}", f"tokenizer.path={folder}", f"tokenizer.vocab_size={VOCABULARY}", ranks=1
    )
    return folder


def run_shard(setting: Setting, megabytes: float, output: Path, *settings: str) -> float:
    """Seconds of stage=shard from JSON lines."""
    read = f'data.input=["{text(setting, megabytes).folder}"]'
    return run_stage(setting, "shard", read, f"data.shards={output}", shard_megabytes(megabytes), *settings)


# Sections


def tokenize(setting: Setting, megabytes: float, smallest: float) -> Section:
    """Text to token files; the tokenizer is learned from the smallest text."""
    given, learned = text(setting, megabytes), tokenizer(setting, smallest)
    expected: dict[str, str] = {}  # "ids" -> the checksum of ours

    def check(peer: str, output: Path) -> str:
        """A note on the ids."""
        found = run_job(setting, peer, "ids", output=str(output))[1]
        if peer == "ours":
            expected["ids"] = found["digest"]
            return f"{found['tokens']:,} tokens"
        return "the same ids" if found["digest"] == expected.get("ids", found["digest"]) else "OTHER IDS"

    def ours(folder: Path, *, from_lines: bool) -> Result:
        shards, seconds, output = text_shards(setting, megabytes), 0.0, folder / "tokens"
        if from_lines:
            shards = folder / "shards"
            seconds += run_shard(setting, megabytes, shards, *UNTOUCHED)
        seconds += run_stage(setting, "tokenize", f"data.shards={shards}", f"data.tokens={output}", f"tokenizer.path={learned}")
        return Result(given.size / seconds / 1e6, seconds, check("ours", output))

    def peer(folder: Path, *, name: str) -> Result:
        job = {"input": str(given.folder), "output": str(folder), "tokenizer": f"{learned}/tokenizer.json", "end": END, "workers": WORKERS}
        seconds = run_job(setting, name, "tokenize", **job)[0]
        return Result(given.size / seconds / 1e6, seconds, check(name, folder))

    rows = [Row("ours, tokenize", partial(ours, from_lines=False)), Row("ours, shard and tokenize", partial(ours, from_lines=True))]
    rows += [Row(name, partial(peer, name=name)) for name in ("datatrove", "megatron-core", "mosaicml-streaming")]
    return Section(f"tokenize {describe(given)}, {WORKERS} processes", "MB/s", rows)


def shard(setting: Setting, megabytes: float) -> Section:
    """Read, clean, identify the language, drop exact and near duplicates, shuffle, write."""
    given = text(setting, megabytes)

    def ours(folder: Path) -> Result:
        seconds = run_shard(setting, megabytes, folder / "shards", "clean=default", "dedup=default", SPLIT_OFF)
        return per_core(given, seconds, kept(folder / "shards"))

    rows = [Row("ours", ours), Row("datatrove", partial(datatrove, setting, given, "shard"))]
    return Section(f"shard with default rules, {describe(given)}, {WORKERS} processes", "MB/s a core", rows)


def dedup(setting: Setting, megabytes: float) -> Section:
    """Near duplicates alone, from JSON lines to what is left of them."""
    given = text(setting, megabytes)

    def ours(folder: Path, *, near: bool) -> Result:
        settings = ("clean=none", "dedup=default", "dedup.exact=false", SPLIT_OFF) if near else UNTOUCHED
        seconds = run_shard(setting, megabytes, folder / "shards", *settings)
        return per_core(given, seconds, kept(folder / "shards"))

    rows = [
        Row("ours", partial(ours, near=True)),
        Row("ours, without dedup", partial(ours, near=False)),
        Row("datatrove", partial(datatrove, setting, given, "dedup")),
    ]
    return Section(f"near dedup alone, {describe(given)}, {WORKERS} processes", "MB/s a core", rows)


def datatrove(setting: Setting, given: Text, task: str, folder: Path) -> Result:
    """A row of datatrove's that drops documents."""
    seconds, done = run_job(setting, "datatrove", task, input=str(given.folder), output=str(folder), workers=WORKERS)
    return per_core(given, seconds, done["documents"])


def per_core(given: Text, seconds: float, left: int) -> Result:
    """Rate by the input's size, and how much of it was kept."""
    return Result(given.size / seconds / 1e6 / WORKERS, seconds, f"keeps {left:,} documents")


def kept(shards: Path) -> int:
    """Documents in text shards."""
    from pipeline import artifact

    return artifact.read(shards, key="data.shards", stage="shard").totals["train"]["documents"]


def loader(setting: Setting, tokens: int, sequence: int, seconds: float) -> Section:
    """Samples of a shuffled epoch, in one process on one core, without its imports and its first batch."""
    where = setting.folder / "loader"
    core = max(os.sched_getaffinity(0))

    @cache
    def stored() -> Path:
        for name in ("arrays", "ours"):
            (where / name).mkdir(parents=True)
        run_job(setting, "ours", "store", tokens=tokens, input=str(where / "arrays"), output=str(where / "ours"))
        return where / "arrays"

    @cache
    def prepared(peer: str) -> Path:
        arrays, output = stored(), where / peer
        if peer != "ours":
            output.mkdir(exist_ok=True)
            run_job(setting, peer, "prepare", input=str(arrays), output=str(output), sequence=sequence)
        return output

    def measure(_: Path, *, peer: str, variant: str) -> Result:
        job: dict[str, Any] = {"output": str(prepared(peer)), "sequence": sequence, "core": core, "seconds": seconds}
        made_with = {"vocab_size": VOCABULARY, "end_id": 0}  # as data_ours.MADE_WITH
        return Result(run_job(setting, peer, "loader", variant=variant, **job, **made_with)[1]["rate"])

    rows = {
        "ours, tokens": ("ours", "tokens"),
        "ours, as int64": ("ours", "wide"),
        "ours, document boundaries": ("ours", "boundaries"),
        "GPTDataset, its tokens": ("megatron-core", "tokens"),
        "GPTDataset": ("megatron-core", "samples"),
        "GPTDataset, resets": ("megatron-core", "boundaries"),
        "StreamingDataset": ("mosaicml-streaming", "samples"),
        "webdataset": ("webdataset", "samples"),
    }
    measures = [Row(name, partial(measure, peer=peer, variant=variant)) for name, (peer, variant) in rows.items()]
    return Section(f"loader, sequence {sequence:,}, {tokens / 1e6:,.0f} million tokens, one core", "samples/s", measures)


def first_batch(setting: Setting, sequence: int) -> Section:
    """From nothing but manifests to 1,024 samples of a blend of 10^12 tokens."""

    @cache
    def sparse() -> Path:
        folder = setting.folder / "trillion"
        folder.mkdir()
        run_job(setting, "ours", "trillion", input=str(folder))
        return folder

    def measure(_: Path) -> Result:
        done = run_job(setting, "ours", "first_batch", input=str(sparse()), sequence=sequence)[1]
        return Result(done["bytes"] / 1e6, done["seconds"])

    return Section("first batch of a blend of 10^12 tokens (sparse files): 1,024 samples", "MB", [Row("ours", measure)])


def describe(given: Text) -> str:
    """Size and number of documents."""
    return f"{given.size / 1e6:,.3g} MB in {given.documents:,} documents"


# Memory


def memory(setting: Setting, sizes: list[float]) -> dict[str, list[float]]:
    """The most memory in bytes that a rank of each stage takes, for texts of several sizes."""
    table: dict[str, list[float]] = {"shard": [], "train_tokenizer": [], "tokenize": []}
    bounded = ("data.shard_megabytes=4", "tokenizer.train_megabytes=10", f"tokenizer.vocab_size={VOCABULARY}")
    for size in sizes:
        folder = setting.folder / f"memory-{size:g}"
        paths = [f"data.shards={folder}/shards", f"tokenizer.path={folder}/tokenizer", f"data.tokens={folder}/tokens"]
        read = f'data.input=["{text(setting, size).folder}"]'
        for stage, peaks in table.items():
            noted = folder / f"peaks-{stage}"
            noted.mkdir(parents=True)
            prefix = (sys.executable, str(Path(__file__).with_name("data_ours.py")), "rank", str(noted))
            run_stage(setting, stage, read, *paths, *bounded, prefix=prefix, ranks=1 if stage == "train_tokenizer" else WORKERS)
            peaks.append(max(int(peak.read_text(encoding="ascii")) for peak in noted.iterdir()))
        shutil.rmtree(folder)
    return table
