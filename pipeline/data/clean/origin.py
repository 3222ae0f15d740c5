"""Steps that filter by source and license, and by overlap with benchmarks."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from pipeline.common.errors import UserError
from pipeline.config.cleaning import AllowStep, ContaminationStep
from pipeline.data.clean.document_batch import DocumentBatch, Step, Verdict, drop
from pipeline.data.read.documents import Bad, Document, ReadOptions
from pipeline.data.read.input_files import InputFile, Span
from pipeline.data.read.reader import read
from pipeline.data.words import Lookup, Words, ngrams


def allow(knobs: AllowStep) -> Step:
    """Drop documents whose source or license matches no pattern of its list; an empty list allows all."""

    def matches(value: object, patterns: list[str]) -> bool:
        return not patterns or any(fnmatch.fnmatchcase(str(value).lower(), pattern.lower()) for pattern in patterns)

    def source(document: Document) -> object:
        return document.meta.get(knobs.source_field, document.source)

    def step(batch: DocumentBatch) -> Iterable[Verdict]:
        sources = np.array([not matches(source(document), knobs.sources) for document in batch.documents])
        licences = np.array([not matches(document.meta.get(knobs.licence_field, ""), knobs.licences) for document in batch.documents])
        return drop(batch, [(sources, "source not allowed"), (licences, "license not allowed")])

    return step


def contamination(knobs: ContaminationStep) -> Step:
    """Drop documents that share `words` consecutive words with a benchmark (13 in Brown et al. 2020, appendix C)."""
    benchmarks = [_word_ngrams(Words([text]), knobs.words)[0] for text in _benchmark_texts(knobs.files)]
    known = Lookup(np.concatenate(benchmarks) if benchmarks else np.zeros(0, dtype=np.uint64))
    if not len(known.known):
        rule = f"contain no text of {knobs.words} words"
        fix = "specify the benchmark files, or remove the step from clean.steps"
        raise UserError.of("clean.contamination.files", knobs.files, rule, fix)

    def step(batch: DocumentBatch) -> Iterable[Verdict]:
        hashes, starts = _word_ngrams(batch.words, knobs.words)
        hits = starts[known.find(hashes)[0]]
        return drop(batch, [(np.bincount(batch.words.spans.texts[hits], minlength=len(batch.texts)) > 0, "overlaps a benchmark")])

    return step


def _word_ngrams(words: Words, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (hash, first word) of every n-gram of words within a text."""
    hashes = ngrams(words.hashes, length)
    starts = np.arange(len(hashes))
    texts = words.spans.texts
    inside = texts[: len(hashes)] == texts[length - 1 :][: len(hashes)]
    return hashes[inside], starts[inside]


def _benchmark_texts(files: list[str]) -> Iterable[str]:
    for name in files:
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError.of("clean.contamination.files", name, "no such file", "correct the path, or remove it")
        source = InputFile(str(path), path.name, path.stat().st_size)
        for document in read(Span(source), ReadOptions()):
            if isinstance(document, Bad):
                raise UserError.of("clean.contamination.files", path, f"{document.position}: {document.reason}", "repair the file")
            if isinstance(document, Document):
                yield document.text
