"""The sequences of fine-tuning: examples of prompts and chats (prompts_and_answers.py), packed.

`open_folder` opens shards that stage=tokenize wrote, of which a process keeps an index in memory. `open_files` tokenizes small files on
every rank, and keeps all tokens in memory: three bytes for each of a vocabulary below 65,536, else five. Both have the same sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pipeline.common import artifact
from pipeline.common.errors import UserError, Violation
from pipeline.config.schema import RunConfig
from pipeline.data.load import example_parts, example_shards
from pipeline.data.load.corpus import Corpus
from pipeline.data.load.example_shards import ExamplesInMemory, ExamplesInShards
from pipeline.data.load.permutation import permute
from pipeline.data.load.prompts_and_answers import Example, ExampleReader
from pipeline.data.load.samples import Dataset
from pipeline.data.tokenize import chat_template
from pipeline.data.tokenize.tokenizer import TextEncoder

log = logging.getLogger("pipeline")

#: Bytes of files above which every rank takes minutes and gigabytes to tokenize them.
_LARGE = 1 << 30


class Instructions(Dataset):
    """The sequences of a run: packed examples. Training visits those of an epoch in the order of a permutation of (seed, epoch).

    Attributes:
        examples: number of usable lines.
        answers: fraction of their tokens that are answers.
        padding: fraction of the tokens of all sequences that is padding.
        stream: of the tokens in shards; None in memory.
    """

    def __init__(self, store: ExamplesInMemory | ExamplesInShards, corpus: Corpus, length: int, seed: int | None) -> None:
        """Use packed examples.

        Args:
            corpus: what they are, for fingerprints and messages.
            length: tokens per sequence. An example takes one token less than it has: its last token is only a target.
            seed: of the order; None reads the sequences in order.
        """
        self._store, self._seed = store, None if seed is None else corpus.permutation_seed(seed)
        count, tokens = len(store.index), int(store.index.starts[-1])
        self.examples, self.answers = store.index.examples, store.answers / tokens
        self.padding = 1 - (tokens - self.examples) / (count * length)
        self.corpora, self.counts, self.schedule = [corpus], np.array([count], dtype=np.int64), None
        self.end_of_document, self.vocab_size = int(corpus.totals["end_of_document"]), int(corpus.totals["vocab_size"])
        self.stream = getattr(store, "stream", None)

    def places(self, indices: np.ndarray) -> np.ndarray:
        """Return which sequences samples are; numbers beyond an epoch continue with the next epoch. (n,) int64 each."""
        count = int(self.counts[0])
        epochs, places = np.divmod(np.asarray(indices, dtype=np.int64), count)
        return places if self._seed is None else permute(places, count, self._seed, epochs)

    def sequences(self, indices: np.ndarray) -> Iterator[list[Example]]:
        """Yield the examples of sequences by sample number.

        Raises:
            UserError: a shard is missing, truncated or corrupt; the message names it.
        """
        places = self.places(indices)
        for place, (tokens, is_answer) in zip(places.tolist(), self._store.read(places), strict=True):
            ends = np.cumsum(self._store.index.lengths(place), dtype=np.int64)
            cuts = ends[:-1]
            parts = zip(np.split(tokens.astype(np.int64), cuts), np.split(is_answer, cuts), strict=True)
            yield [Example(*part) for part in parts]

    def describe(self, key: str, kind: str) -> None:
        """Log the number of sequences, padding and answers."""
        text = "%s: %s %s in %s sequences, %.1f %% padding; %.1f %% of the tokens are targets"
        log.info(text, key, f"{self.examples:,}", kind, f"{self.counts[0]:,}", 100 * self.padding, 100 * self.answers)


def open_files(
    paths: Sequence[str],
    reader: ExampleReader,
    encoder: TextEncoder,
    *,
    key: str,
    length: int,
    pack: bool,
    seed: int | None,
    limit: float,
    megabytes: float = 128.0,
    report: Path | None = None,
) -> Instructions:
    """Read, tokenize and pack files.

    Args:
        length: tokens per sequence.
        pack: put several examples into a sequence.
        seed: of the order; None reads in order.
        limit: maximum fraction of the lines that are unusable (data.quarantine_limit).
        megabytes: data.shard_megabytes; what is packed together.
        report: run directory that gets the list of all unusable lines; what was read is logged. None: neither.

    Raises:
        UserError: a file is missing or has no example, or too many lines are unusable; the message names lines with reasons.
    """
    files = example_parts.sources(paths, key)
    if report is not None and (size := sum(file.size for file in files)) > _LARGE:
        text = "%s: every rank tokenizes %.1f GB and keeps the tokens in memory; stage=tokenize with data.instructions.tokens does it once"
        log.warning(text, key, size / 1e9)
    parts = [example_parts.pack_part(part, reader, length, encoder.dtype, pack=pack) for part in example_parts.parts(files, megabytes)]
    notes, tokens = [part.notes for part in parts], sum(len(part.tokens) for part in parts)
    example_shards.check(notes, type(reader), key=key, limit=limit, length=length, tokens=tokens, folder=report)
    corpus = Corpus("", [], encoder.totals, content([part.fingerprint for part in parts]))
    opened = Instructions(ExamplesInMemory(parts), corpus, length, seed)
    if report is not None:
        opened.describe(key, reader.kind)
    return opened


def open_folder(config: RunConfig, split: str, share: tuple[int, int], seed: int | None) -> Instructions | None:
    """Open the shards of data.instructions.tokens.

    Args:
        share: (rank, ranks), as in TokenStream; rank 0 logs.
        seed: of the order; None reads in order.

    Raises:
        UserError: the folder is not finished, or was written with settings that the run has otherwise; a shard is missing or damaged.
    """
    folder, key = Path(config.data.instructions.tokens or ""), "data.instructions.tokens"
    manifest = artifact.read(folder, key=key, stage="tokenize")
    _check_settings(config, manifest)
    corpus = Corpus.of(folder, manifest, split)
    if not corpus.shards:
        return None
    verify = config.data.verify
    store = ExamplesInShards(corpus.shards, lazy_checks=verify == "lazy", share=share)
    corpus = Corpus("", corpus.shards, manifest.totals, content([shard.entry["content"] for shard in corpus.shards]))
    if share[0] == 0:
        store.stream.check_sizes()
    if verify == "all":
        store.stream.verify()
    opened = Instructions(store, corpus, config.training.sequence_length, seed)
    if share[0] == 0:
        opened.describe(f"{key}={folder}, {split}", "examples")
    return opened


def made_with(config: RunConfig, encoder: TextEncoder) -> dict[str, Any]:
    """Return the settings of packed examples that a run must share.

    Raises:
        UserError: the chat template cannot be compiled.
    """
    chosen, template = config.data.instructions, chat_template.of(config.tokenizer)
    return {
        **encoder.settings,
        "tokenizer.end_of_document": config.tokenizer.end_of_document,
        "tokenizer.chat_template": template and xxhash.xxh3_64_hexdigest(template.text.encode()),
        "training.objective": config.objective,
        "training.sequence_length": config.training.sequence_length,
        "data.instructions.pack": chosen.pack,
        "data.instructions.too_long": chosen.too_long,
        **({"data.instructions.repair": True} if chosen.repair else {}),
    }


def content(parts: Sequence[str]) -> str:
    """Return the fingerprint of a split from those of its parts: the same in memory and in shards."""
    return xxhash.xxh3_64_hexdigest("\n".join(parts).encode())


#: Settings that manifests have only if they differ from what was done before there was a choice.
_NEWER = {"tokenizer.bos", "tokenizer.spelled", "data.instructions.repair"}


def _check_settings(config: RunConfig, manifest: artifact.Manifest) -> None:
    """Refuse shards of pretraining, and those that were packed with other settings.

    Raises:
        UserError: with every difference.
    """
    folder, written = config.data.instructions.tokens, manifest.settings
    if "training.objective" not in written:
        fix = "name a folder that stage=tokenize wrote from data.instructions.train"
        raise UserError.of("data.instructions.tokens", folder, "contains token shards of text, which have no answers", fix)
    wanted = made_with(config, TextEncoder.of(config.tokenizer))
    fix = "use that setting, or run stage=tokenize into another folder"
    problems = [
        Violation(name, wanted.get(name), f"{folder} was written with {name}={written.get(name)}", fix)
        for name in dict.fromkeys([*wanted, *written.keys() & _NEWER])
        if written.get(name) != wanted.get(name)
    ]
    UserError.raise_for(problems)
