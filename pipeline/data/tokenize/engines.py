"""The fast way from text to ids, and the check that its ids are those of the reference.

Hugging Face `tokenizers` is the reference (TextEncoder). fastokens is some forty times as fast on one core and knows fewer kinds of
tokenizers. A token that is off by one would spoil a training run without any error, so every rank of every job compares the two: before the
work on a sample of its own text and on strings that are hard to split, and during the work on an excerpt now and then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from pipeline.data.tokenize.tokenizer import Encoded, TextEncoder
from pipeline.errors import UserError

log = logging.getLogger("pipeline")

EXCERPT = 4096
"""Characters of a document that are compared."""

CHECK_EVERY = 8 << 20
"""Characters of text between two comparisons during the work. The reference takes about a fiftieth of the engine's time for them."""

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
"""Texts on which splitting into words or bytes goes wrong where it goes wrong at all."""


class Engine(Protocol):
    """Text to ids."""

    name: str

    def encode(self, texts: Sequence[str]) -> Encoded:
        """The ids of each text, without any token that the tokenizer would add around it."""


class Fastokens:
    """The engine of the package fastokens.

    Args:
        path: tokenizer.json.

    Raises:
        Exception: of no precise type, when it cannot do what the tokenizer asks for.
    """

    name = "fastokens"

    def __init__(self, path: Path) -> None:
        from fastokens import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: Sequence[str]) -> Encoded:
        """The ids of each text; text that spells a special token stays text."""
        ids, offsets = self._tokenizer.encode_batch_flat(list(texts), split_special_tokens=True)
        return np.frombuffer(ids, np.uint32), np.diff(np.frombuffer(offsets, np.int64))


class Watched:
    """An engine that is held against the reference again and again while it works."""

    def __init__(self, engine: Engine, reference: TextEncoder) -> None:
        self.name = engine.name
        self._engine, self._reference, self._unchecked = engine, reference, 0

    def encode(self, texts: Sequence[str]) -> Encoded:
        """The engine's ids.

        Raises:
            UserError: they are not the reference's.
        """
        self._unchecked += sum(map(len, texts))
        if self._unchecked >= CHECK_EVERY:
            self._unchecked = 0
            excerpt = texts[len(texts) // 2][:EXCERPT]
            if difference(self._engine, self._reference, [excerpt]) is not None:
                raise _other_ids(self.name, excerpt)
        return self._engine.encode(texts)


def choose(wanted: str, reference: TextEncoder, sample: Callable[[], list[str]]) -> Engine:
    """The engine to work with.

    Args:
        wanted: auto, fastokens or huggingface, as `tokenizer.engine` says.
        sample: gives excerpts of the text to come; called when there is something to compare.

    Raises:
        UserError: fastokens was asked for and refuses the tokenizer, or has other ids than the reference.
    """
    if wanted == "huggingface":
        return reference
    try:
        engine = Fastokens(reference.path)
    except Exception as error:  # fastokens raises nothing more precise
        if wanted == "fastokens":
            fix = "set tokenizer.engine=auto or huggingface"
            raise UserError.of("tokenizer.engine", wanted, f"does not support {reference.path}: {error}", fix) from error
        log.info("tokenize: fastokens does not support this tokenizer (%s); Hugging Face tokenizers, which are slower, do", error)
        return reference
    different = difference(engine, reference, [*HARD_TEXTS, *_spelled(reference.special_tokens), *sample()])
    if different is None:
        return Watched(engine, reference)
    if wanted == "fastokens":
        raise _other_ids(wanted, different)
    log.warning("tokenize: fastokens has other ids than Hugging Face tokenizers, which are slower and used now, for %s", _shown(different))
    return reference


def difference(engine: Engine, reference: Engine, texts: list[str]) -> str | None:
    """The first text that the engines turn into different ids."""
    (ids, lengths), (expected, expected_lengths) = engine.encode(texts), reference.encode(texts)
    if np.array_equal(lengths, expected_lengths) and np.array_equal(ids, expected):
        return None
    ends, expected_ends = np.cumsum(lengths), np.cumsum(expected_lengths)
    for text, end, length, expected_end, expected_length in zip(texts, ends, lengths, expected_ends, expected_lengths, strict=True):
        if not np.array_equal(ids[end - length : end], expected[expected_end - expected_length : expected_end]):
            return text
    raise AssertionError("different arrays differ somewhere")


def _spelled(special_tokens: list[str]) -> list[str]:
    """Text that spells special tokens: alone, within words, twice, in part."""
    return [form for token in special_tokens[:16] for form in (token, f"a {token}b", token + token, token[:-1], f" {token}\n")]


def _other_ids(name: str, text: str) -> UserError:
    rule = f"gives other ids than Hugging Face tokenizers for {_shown(text)}"
    return UserError.of("tokenizer.engine", name, rule, "set tokenizer.engine=huggingface, and tell the authors of the engine")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}...")
