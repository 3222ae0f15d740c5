"""The sections of tools/bench_data: the command of every row, its input, and the conversion of its time to a rate."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from tools.bench import data_text
from tools.bench.data_processes import WORKERS, Setting, run_job, run_stage
from tools.bench.data_text import Text

END = "<|endoftext|>"
VOCABULARY = 32_768
NO_VALIDATION = "data.validation_fraction=0"
DEDUP_TOLERANCE = 0.01
"""Share of documents by which the results of two near deduplications may differ: one estimates the Jaccard index, the other computes it."""

KEEP_ALL = ("clean=none", "dedup=none", NO_VALIDATION)


@dataclass(frozen=True)
class Result:
    """One measurement.

    Attributes:
        rate: in the unit of the section.
        seconds: wall-clock time.
        note: a remark for the table.
        unequal: how the work differs from that of ours; empty if it is the same, or if the section does not require it.
    """

    rate: float
    seconds: float | None = None
    note: str = ""
    unequal: str = ""


@dataclass(frozen=True)
class Row:
    """One implementation. `measure` receives an empty folder for its output."""

    name: str
    measure: Callable[[Path], Result]


@dataclass(frozen=True)
class Section:
    """Rows that are compared with each other. The first row is ours."""

    title: str
    unit: str
    rows: list[Row]


# Inputs: written once, outside of all measurements


@cache
def documents(setting: Setting) -> list[str]:
    """Return the documents that all texts are sampled from."""
    return data_text.source(setting.inputs)


@cache
def text(setting: Setting, megabytes: float) -> Text:
    """Write JSON lines of about this size, once per size."""
    return data_text.write(documents(setting), round(megabytes * 1e6), setting.folder / f"text-{megabytes:g}")


def shard_megabytes(megabytes: float) -> str:
    """Return a setting that leads to at least eight shards, so that all ranks have work."""
    return f"data.shard_megabytes={min(32, megabytes / 8):g}"


@cache
def text_shards(setting: Setting, megabytes: float) -> Path:
    """Write all of the same documents as text shards."""
    folder = setting.folder / f"shards-{megabytes:g}"
    run_shard(setting, megabytes, folder, *KEEP_ALL)
    return folder


@cache
def tokenizer(setting: Setting, megabytes: float) -> Path:
    """Train a byte-level BPE with the split of GPT-2 on the text."""
    folder = setting.folder / f"tokenizer-{megabytes:g}"
    shards = text_shards(setting, megabytes)
    run_stage(
        setting, "train_tokenizer", f"data.shards={shards}", f"tokenizer.path={folder}", f"tokenizer.vocab_size={VOCABULARY}", ranks=1
    )
    return folder


def run_shard(setting: Setting, megabytes: float, output: Path, *settings: str) -> float:
    """Run stage=shard on JSON lines; returns its seconds."""
    inputs = f'data.input=["{text(setting, megabytes).folder}"]'
    return run_stage(setting, "shard", inputs, f"data.shards={output}", shard_megabytes(megabytes), *settings)


# Sections


def tokenize(setting: Setting, megabytes: float, smallest: float) -> Section:
    """Text to token files. The tokenizer is trained on the smallest text."""
    source, vocabulary = text(setting, megabytes), tokenizer(setting, smallest)
    expected: dict[str, str] = {}  # "ids" -> the checksum of ours

    def checked(peer: str, seconds: float, output: Path) -> Result:
        """The result of a row; compares the ids with those of ours."""
        found = run_job(setting, peer, "ids", output=str(output))[1]
        same = expected.setdefault("ids", found["digest"]) == found["digest"]
        note = f"{found['tokens']:,} tokens" if peer == "ours" else "the same ids"
        return Result(source.size / seconds / 1e6, seconds, note * same, "" if same else "other ids than those of ours")

    def ours(folder: Path, *, from_lines: bool) -> Result:
        shards, seconds, output = text_shards(setting, megabytes), 0.0, folder / "tokens"
        if from_lines:
            shards = folder / "shards"
            seconds += run_shard(setting, megabytes, shards, *KEEP_ALL)
        seconds += run_stage(setting, "tokenize", f"data.shards={shards}", f"data.tokens={output}", f"tokenizer.path={vocabulary}")
        return checked("ours", seconds, output)

    def peer(folder: Path, *, name: str) -> Result:
        job = {
            "input": str(source.folder),
            "output": str(folder),
            "tokenizer": f"{vocabulary}/tokenizer.json",
            "end": END,
            "workers": WORKERS,
        }
        seconds = run_job(setting, name, "tokenize", **job)[0]
        return checked(name, seconds, folder)

    rows = [Row("ours, tokenize", partial(ours, from_lines=False)), Row("ours, shard and tokenize", partial(ours, from_lines=True))]
    rows += [Row(name, partial(peer, name=name)) for name in ("datatrove", "megatron-core", "mosaicml-streaming")]
    return Section(f"tokenize {describe(source)}, {WORKERS} processes", "MB/s", rows)


def shard(setting: Setting, megabytes: float) -> Section:
    """Reading, cleaning, language identification, exact and near deduplication, shuffle, writing."""
    source = text(setting, megabytes)

    def ours(folder: Path) -> Result:
        seconds = run_shard(setting, megabytes, folder / "shards", "clean=default", "dedup=default", NO_VALIDATION)
        return per_core(source, seconds, kept(folder / "shards"))

    def peer(folder: Path) -> Result:
        seconds, outcome = run_job(setting, "datatrove", "shard", input=str(source.folder), output=str(folder), workers=WORKERS)
        return per_core(source, seconds, outcome["documents"])

    rows = [Row("ours", ours), Row("datatrove", peer)]
    return Section(f"shard with default rules, {describe(source)}, {WORKERS} processes", "MB/s per core", rows)


def clean(setting: Setting) -> Section:
    """Cleaning and signatures of documents in memory, one process: user CPU time, for all of the text and for each file of --input."""

    def ours(folder: Path, *, files: tuple[Path, ...]) -> Result:
        texts = folder / "documents.jsonl"
        with texts.open("w", encoding="utf-8") as handle:
            handle.writelines(json.dumps({"text": each}, ensure_ascii=False) + "\n" for each in data_text.source(files))
        outcome = run_job(setting, "ours", "clean", input=str(texts))[1]
        return Result(outcome["bytes"] / outcome["seconds"] / 1e6, outcome["seconds"], f"{outcome['bytes'] / 1e6:.1f} MB")

    rows = [Row("ours", partial(ours, files=setting.inputs))]
    rows += [Row(f"ours, {file.stem}", partial(ours, files=(file,))) for file in setting.inputs]
    return Section("cleaning and signatures with default rules, one process", "MB/CPU s", rows)


def dedup(setting: Setting, megabytes: float) -> Section:
    """Near deduplication only, from JSON lines to the kept documents. All implementations must keep about the same number of them."""
    source = text(setting, megabytes)
    expected: dict[str, int] = {}  # "documents" -> the number that ours keeps

    def ours(folder: Path, *more: str, near: bool) -> Result:
        settings = ("clean=none", "dedup=default", "dedup.exact=false", NO_VALIDATION) if near else KEEP_ALL
        seconds = run_shard(setting, megabytes, folder / "shards", *settings, *more)
        documents = kept(folder / "shards")
        if near:
            expected["documents"] = documents
        return per_core(source, seconds, documents)

    def peer(folder: Path) -> Result:
        seconds, outcome = run_job(setting, "datatrove", "dedup", input=str(source.folder), output=str(folder), workers=WORKERS)
        documents, ours_keeps = outcome["documents"], expected.get("documents", outcome["documents"])
        result = per_core(source, seconds, documents)
        differs = abs(documents - ours_keeps) > DEDUP_TOLERANCE * ours_keeps
        return replace(result, unequal=f"keeps {documents:,} documents, ours {ours_keeps:,}" if differs else "")

    rows = [
        Row("ours", partial(ours, near=True)),
        Row("ours, without dedup", partial(ours, near=False)),
        Row("ours, spans only", lambda folder: ours(folder, "dedup.spans=50", near=False)),
        Row("datatrove", peer),
    ]
    return Section(f"near deduplication only, {describe(source)}, {WORKERS} processes", "MB/s per core", rows)


def per_core(source: Text, seconds: float, documents: int) -> Result:
    """Return the rate in MB of input per second and core, with the number of kept documents as note."""
    return Result(source.size / seconds / 1e6 / WORKERS, seconds, f"keeps {documents:,} documents")


def kept(shards: Path) -> int:
    """Return the number of training documents in text shards."""
    from pipeline.common import artifact

    return artifact.read(shards, key="data.shards", stage="shard").totals["train"]["documents"]


def loader(setting: Setting, tokens: int, sequence: int, seconds: float) -> Section:
    """Samples of a shuffled epoch, one process on one core, without imports and the first batch."""
    folder = setting.folder / "loader"
    core = max(os.sched_getaffinity(0))

    @cache
    def stored() -> Path:
        for name in ("arrays", "ours"):
            (folder / name).mkdir(parents=True)
        run_job(setting, "ours", "store", tokens=tokens, input=str(folder / "arrays"), output=str(folder / "ours"))
        return folder / "arrays"

    @cache
    def prepared(peer: str) -> Path:
        arrays, output = stored(), folder / peer
        if peer != "ours":
            output.mkdir(exist_ok=True)
            run_job(setting, peer, "prepare", input=str(arrays), output=str(output), sequence=sequence)
        return output

    def measure(_: Path, *, peer: str, variant: str) -> Result:
        job: dict[str, Any] = {"output": str(prepared(peer)), "sequence": sequence, "core": core, "seconds": seconds}
        tokenizer_totals = {"vocab_size": VOCABULARY, "end_id": 0}  # as data_ours.TOKENIZER_TOTALS
        return Result(run_job(setting, peer, "loader", variant=variant, **job, **tokenizer_totals)[1]["rate"])

    rows = {
        "ours, tokens": ("ours", "tokens"),
        "ours, as int64": ("ours", "wide"),
        "ours, document boundaries": ("ours", "boundaries"),
        "GPTDataset, token lookup": ("megatron-core", "tokens"),
        "GPTDataset": ("megatron-core", "samples"),
        "GPTDataset, resets": ("megatron-core", "boundaries"),
        "StreamingDataset": ("mosaicml-streaming", "samples"),
        "webdataset": ("webdataset", "samples"),
    }
    measures = [Row(name, partial(measure, peer=peer, variant=variant)) for name, (peer, variant) in rows.items()]
    return Section(f"loader, sequence {sequence:,}, {tokens / 1e6:,.0f} million tokens, one core", "samples/s", measures)


def first_batch(setting: Setting, sequence: int) -> Section:
    """Opening manifests and reading 1,024 samples of a blend of 10^12 tokens."""

    @cache
    def sparse() -> Path:
        folder = setting.folder / "trillion"
        folder.mkdir()
        run_job(setting, "ours", "trillion", input=str(folder))
        return folder

    def measure(_: Path) -> Result:
        outcome = run_job(setting, "ours", "first_batch", input=str(sparse()), sequence=sequence)[1]
        return Result(outcome["bytes"] / 1e6, outcome["seconds"])

    return Section("first batch of a blend of 10^12 tokens (sparse files): 1,024 samples", "MB", [Row("ours", measure)])


def describe(source: Text) -> str:
    return f"{source.size / 1e6:,.3g} MB in {source.documents:,} documents"


# Memory


def memory(setting: Setting, sizes: list[float]) -> dict[str, list[float]]:
    """Return stage -> peak memory of a rank in bytes, one value per text size in MB."""
    table: dict[str, list[float]] = {"shard": [], "train_tokenizer": [], "tokenize": []}
    bounded = ("data.shard_megabytes=4", "tokenizer.train_megabytes=10", f"tokenizer.vocab_size={VOCABULARY}")
    for size in sizes:
        folder = setting.folder / f"memory-{size:g}"
        paths = [f"data.shards={folder}/shards", f"tokenizer.path={folder}/tokenizer", f"data.tokens={folder}/tokens"]
        inputs = f'data.input=["{text(setting, size).folder}"]'
        for stage, peaks in table.items():
            records = folder / f"peaks-{stage}"
            records.mkdir(parents=True)
            prefix = (sys.executable, str(Path(__file__).with_name("data_ours.py")), "rank", str(records))
            run_stage(setting, stage, inputs, *paths, *bounded, prefix=prefix, ranks=1 if stage == "train_tokenizer" else WORKERS)
            peaks.append(max(int(peak.read_text(encoding="ascii")) for peak in records.iterdir()))
        shutil.rmtree(folder)
    return table
