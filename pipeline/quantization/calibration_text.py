"""Token sequences of given documents: what GPTQ calibrates with, and what perplexity is measured on."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipeline.common.errors import UserError
from pipeline.config.data import DataConfig
from pipeline.data.read import input_files, reader
from pipeline.data.read.documents import DEFAULT_CORPUS, Bad, Document, ReadOptions
from pipeline.data.read.suffixes import SEARCHED
from pipeline.data.tokenize.tokenizer import TextEncoder

log = logging.getLogger("pipeline")

#: Tokens of a sequence at most, for models of any context.
LENGTH = 2048
#: Unreadable records that the log names.
_NAMED = 5


def read_sequences(inputs: Sequence[str], key: str, data: DataConfig, encoder: TextEncoder, *, tokens: int, longest: int) -> Tensor:
    """Read documents, join their tokens with end-of-document tokens in between, and cut them into sequences.

    Args:
        inputs: files, folders, globs or URLs.
        key: configuration key of the inputs.
        data: options of reading.
        tokens: number of tokens to read at most.
        longest: tokens of a sequence at most.

    Returns:
        int64 (sequences, length + 1), neighbors sharing a token, as in pretraining. The length is that of all tokens if they are few.

    Raises:
        UserError: an input does not exist, or the documents hold no text.
    """
    ids: list[int] = []
    begin = [] if encoder.bos is None else [encoder.bos]
    for text in _texts(inputs, key, data):
        ids += [*begin, *encoder.encode([text])[0].tolist(), encoder.end_of_document]
        if len(ids) >= tokens:
            break
    ids = ids[:tokens]
    if len(ids) < 2:
        raise UserError.of(key, ", ".join(inputs), "holds no text", "set it to other documents")
    length = min(longest, LENGTH, len(ids) - 1)
    return torch.tensor(ids).unfold(0, length + 1, length)


def _texts(inputs: Sequence[str], key: str, data: DataConfig) -> Iterator[str]:
    """The texts of the documents; unreadable records are skipped with a warning."""
    try:
        known = [*data.suffixes, *SEARCHED] if data.suffixes else []  # also text shards, whatever the suffix of the training documents
        listing = input_files.find({DEFAULT_CORPUS: list(inputs)}, known, data.exclude)
    except UserError as error:
        raise UserError([replace(violation, key=key) for violation in error.violations]) from error
    documents = (document for source in listing.files for document in reader.read(input_files.Span(source), ReadOptions.of(data)))
    skipped = 0
    for document in itertools.chain(listing.bad, documents):
        if isinstance(document, Bad):
            skipped += 1
            if skipped <= _NAMED:
                log.warning("%s: skipped %s %s: %s", key, document.source, document.position, document.reason)
        elif isinstance(document, Document) and document.text:
            yield document.text
    if skipped > _NAMED:
        log.warning("%s: skipped %d records", key, skipped)
