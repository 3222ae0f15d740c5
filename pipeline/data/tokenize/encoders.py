"""Tokenization engines, and the verification of a fast engine against the reference.

Hugging Face `tokenizers` is the reference (TextEncoder). fastokens is about forty times as fast on one core and supports fewer tokenizers.
A wrong token id would degrade a training run without any error, so every rank of every job compares the ids of the two engines: at the
start, on a sample of its own text and on texts that are hard to split; then on an excerpt after every CHECK_EVERY characters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pipeline.common.errors import UserError
from pipeline.data.tokenize.tokenizer import Encoded, TextEncoder

log = logging.getLogger("pipeline")

EXCERPT = 4096
"""Maximum number of characters of a document that are compared."""

CHECK_EVERY = 8 << 20
"""Characters of text between two comparisons. The comparisons take about a fiftieth of the engine's time."""

_RUNS = [char * length for char in "a é\n\t0漢🎄-\0" for length in (2, 3, 17, 1000)]
HARD_TEXTS = [
    "",
    " ",
    "I'll we'VE don't it's o'clock 'tis ''s",
    "1234567890 3.14159 1,000,000 ١٢٣ ½ Ⅷ x²",
    "  leading, trailing  \r\n\r\n\tif x:\n\t\treturn  0\n\n\n \u00a0\u2003\u200b\ufeff",
    "Tännschen, Straße, naïve, Å versus A\u030a, ﬁ, ŉ, İstanbul, ΣΑΣ σας",
    "漢字仮名交じり文。한국어 텍스트 ไทย हिन्दी العربية עברית \u202eRTL\u202c",
    "🎄👩‍👩‍👧‍👦🇩🇪👍🏽❤️\u200d🔥 x🎄x",
    "\0\x01\x07\x1b[0m\x7f\x80\x9f\ue000\uffff\U0010ffff\ufffd",
    "https://example.org/a?b=c&d=%20#e foo_bar->baz(); {\"k\": [1,2]} <a href='x'>y</a>",
    *_RUNS,
]
"""Texts that are likely to reveal errors in the split into words or bytes."""


class Fastokens:
    """The engine of the fastokens package.

    Raises:
        Exception: fastokens does not support the tokenizer; it raises no more specific type.
    """

    name = "fastokens"

    def __init__(self, path: Path) -> None:
        from fastokens import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: Sequence[str]) -> Encoded:
        """The ids of each text. Text that spells a special token is encoded as ordinary text."""
        ids, offsets = self._tokenizer.encode_batch_flat(list(texts), split_special_tokens=True)
        return np.frombuffer(ids, np.uint32), np.diff(np.frombuffer(offsets, np.int64))


class VerifiedEncoder:
    """An engine whose ids are compared with the reference's on an excerpt after every CHECK_EVERY characters."""

    def __init__(self, engine: Fastokens, reference: TextEncoder) -> None:
        self.name = engine.name
        self._engine, self._reference, self._unchecked = engine, reference, 0

    def encode(self, texts: Sequence[str]) -> Encoded:
        """The ids of each text.

        Raises:
            UserError: the ids of an excerpt differ from the reference's.
        """
        self._unchecked += sum(map(len, texts))
        if self._unchecked >= CHECK_EVERY:
            self._unchecked = 0
            excerpt = texts[len(texts) // 2][:EXCERPT]
            if first_mismatch(self._engine, self._reference, [excerpt]) is not None:
                raise _mismatch_error(self.name, excerpt)
        return self._engine.encode(texts)


BatchEncoder = TextEncoder | Fastokens | VerifiedEncoder


def choose(wanted: str, reference: TextEncoder, sample: Callable[[], list[str]]) -> BatchEncoder:
    """Choose the engine.

    Args:
        wanted: auto, fastokens or huggingface: the value of `tokenizer.engine`.
        sample: returns excerpts of the text to tokenize; called only if fastokens supports the tokenizer.

    Raises:
        UserError: fastokens is requested, but does not support the tokenizer or returns different ids than the reference.
    """
    if wanted == "huggingface":
        return reference
    try:
        engine = Fastokens(reference.path)
    except Exception as error:  # fastokens raises no more specific type
        if wanted == "fastokens":
            fix = "set tokenizer.engine=auto or huggingface"
            raise UserError.of("tokenizer.engine", wanted, f"does not support {reference.path}: {error}", fix) from error
        log.info("tokenize: fastokens does not support this tokenizer (%s); using Hugging Face tokenizers, which is slower", error)
        return reference
    tokens = reference.special_tokens[:16]  # alone, within words, repeated, truncated, and between whitespace
    spelled = [form for token in tokens for form in (token, f"a {token}b", token + token, token[:-1], f" {token}\n")]
    mismatch = first_mismatch(engine, reference, [*HARD_TEXTS, *spelled, *sample()])
    if mismatch is None:
        return VerifiedEncoder(engine, reference)
    if wanted == "fastokens":
        raise _mismatch_error(wanted, mismatch)
    log.warning(
        "tokenize: fastokens returns different ids than Hugging Face tokenizers for %s; using the latter, which is slower",
        _excerpt(mismatch),
    )
    return reference


def first_mismatch(engine: BatchEncoder, reference: BatchEncoder, texts: list[str]) -> str | None:
    """The first text for which the two engines return different ids; None if all ids are equal."""
    (ids, lengths), (expected, expected_lengths) = engine.encode(texts), reference.encode(texts)
    if np.array_equal(lengths, expected_lengths) and np.array_equal(ids, expected):
        return None
    ours, theirs = np.split(ids, np.cumsum(lengths)[:-1]), np.split(expected, np.cumsum(expected_lengths)[:-1])
    return next(text for text, left, right in zip(texts, ours, theirs, strict=True) if not np.array_equal(left, right))


def _mismatch_error(name: str, text: str) -> UserError:
    rule = f"returns different ids than Hugging Face tokenizers for {_excerpt(text)}"
    fix = "set tokenizer.engine=huggingface, and report the text to the authors of the engine"
    return UserError.of("tokenizer.engine", name, rule, fix)


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}...")
