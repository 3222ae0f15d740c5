"""stage=tokenize of fine-tuning data: files of examples -> shards of packed examples, byte-identical for any number of ranks."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.common import artifact
from pipeline.common.artifact import Manifest
from pipeline.common.errors import UserError
from pipeline.common.mpi import Comm
from pipeline.common.progress import SharedProgress
from pipeline.common.unfinished import Unfinished, work
from pipeline.config.schema import RunConfig
from pipeline.data.load import example_parts, example_shards, instructions
from pipeline.data.load.example_parts import PartNotes
from pipeline.data.load.objectives.registry import objective_of
from pipeline.data.load.objectives.supervised import Supervised
from pipeline.data.load.prompts_and_answers import ExampleReader
from pipeline.data.read import input_files
from pipeline.data.read.input_files import InputFile
from pipeline.data.shard.text_shards import SPLITS
from pipeline.data.tokenize import token_shards
from pipeline.data.tokenize.tokenizer import TextEncoder

log = logging.getLogger("pipeline")

_KEYS = {"train": "data.instructions.train", "validation": "data.instructions.validation"}


def run(config: RunConfig, comm: Comm) -> None:
    """Write the folder data.instructions.tokens from the files of data.instructions.train and .validation. Collective.

    Raises:
        UserError: a file is missing, has no example or too many unusable lines; the folder holds something else, or another job writes it.
    """
    folder, objective = Path(config.data.instructions.tokens or ""), config.training.objective
    config = replace(config, training=replace(config.training, objective="supervised" if objective == "auto" else objective))
    with suppress(UserError):  # all ranks load the tokenizer in parallel; on failure, rank 0 reports the error
        _opened(config)
    files, _ = comm.bcast((_files(config), _opened(config) and None) if comm.rank == 0 else None)
    encoder, reader = _opened(config)
    settings = {
        **instructions.made_with(config, encoder),
        **{key: input_files.content(comm, files[split]) for split, key in _KEYS.items()},
        "data.shard_megabytes": config.data.shard_megabytes,
    }
    parts = {
        f"{split}-{part.number:05}.tar": part for split in _KEYS for part in example_parts.parts(files[split], config.data.shard_megabytes)
    }
    key = "data.instructions.tokens"
    with work(comm, folder, (key, "tokenize"), settings, _summary, ["train-?????.tar", "validation-?????.tar"]) as unfinished:
        if not unfinished:
            return
        share = token_shards.share({name: part.cost for name, part in parts.items()}, comm.rank, comm.size)
        mine = [name for name in share if unfinished.note(name) is None]
        total = sum(comm.allgather(sum(parts[name].size for name in mine)))
        with SharedProgress(comm, total, "tokenize", "B") as progress:
            for name in mine:
                length, pack = config.training.sequence_length, config.data.instructions.pack
                packed = example_parts.pack_part(parts[name], reader, length, encoder.dtype, pack=pack, progress=progress.advance)
                unfinished.write(name, example_shards.write(folder / name, packed, encoder, name.partition("-")[0]))
        comm.barrier()
        if comm.rank == 0:
            _publish(config, settings, encoder, {name: unfinished.note(name) for name in parts}, unfinished)


def _opened(config: RunConfig) -> tuple[TextEncoder, ExampleReader]:
    """The tokenizer, and the reader of lines of the objective."""
    objective = objective_of(config)
    assert issubclass(objective, Supervised)
    return objective.tokenizer_of(config)


def _files(config: RunConfig) -> dict[str, list[InputFile]]:
    """The files of each split; raises UserError if some are missing."""
    chosen = config.data.instructions
    return {split: example_parts.sources(getattr(chosen, split), key) for split, key in _KEYS.items()}


def _publish(
    config: RunConfig, settings: dict[str, Any], encoder: TextEncoder, files: dict[str, dict[str, Any]], unfinished: Unfinished
) -> None:
    """Check what all ranks have found, and write the manifest."""
    notes = {name: PartNotes(**entry.pop("notes")) for name, entry in files.items()}
    reader, length = type(_opened(config)[1]), config.training.sequence_length
    totals: dict[str, Any] = {**encoder.totals, "dtype": encoder.dtype.name, **token_shards.totals(files)}
    for split, key in _KEYS.items():
        entries = {name: entry for name, entry in files.items() if entry["split"] == split}
        if not entries:
            continue
        tokens = sum(entry["tokens"] for entry in entries.values())
        split_notes = [notes[name] for name in entries]
        limit = config.data.quarantine_limit
        example_shards.check(split_notes, reader, key=key, limit=limit, length=length, tokens=tokens, folder=unfinished.output)
        sequences = sum(entry["sequences"] for entry in entries.values())
        inputs = tokens - sum(entry["documents"] for entry in entries.values())  # the last token of an example is only a target
        totals[split] |= {"sequences": sequences, "padding": 1 - inputs / (sequences * length)}
    artifact.write(unfinished.output, Manifest("tokenize", settings, files, totals))
    unfinished.clear()
    log.info("tokenize: wrote %s (%s)", unfinished.output, _summary(totals))


def _summary(totals: dict[str, Any]) -> str:
    """Format the totals for the log."""
    counts = [(split, totals[split]) for split in SPLITS if "sequences" in totals[split]]
    return "; ".join(
        f"{split} {count['tokens']:,} tokens of {count['documents']:,} examples in {count['sequences']:,} sequences, "
        f"{100 * count['padding']:.2f} % padding"
        for split, count in counts
    )
