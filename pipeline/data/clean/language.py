"""Identification of languages: by CLD2 (https://github.com/CLD2Owners/cld2), whose package has its tables, or by a fastText file."""

from __future__ import annotations

import difflib
import importlib.util
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from pipeline.common import languages
from pipeline.common.errors import UserError
from pipeline.config.cleaning import STEPS, CleanConfig
from pipeline.data.clean import fasttext_model

Language = tuple[str, float]
"""A label as in common/languages.py, "und" if unknown, and the share of a text in that language, or its probability, 0 to 1."""

UNKNOWN: Language = (languages.UNKNOWN, 0.0)

SAMPLE_CHARACTERS = (600, 10_000)
"""Sample sizes, taken from the middle of a text because its ends are often headings and imprints. The time grows with the length; the
larger sample is used only for the few texts, such as tables, where less than CLEAR of the smaller sample is in one language."""
CLEAR = 0.8
IDENTIFYING = frozenset({"language", "gopher", "c4", "fineweb"})
"""Steps that identify languages. With one of them, the language of what earlier steps drop is identified as well, for the counts."""
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")  # CLD2 refuses them


class Detector(ABC):
    """Finds the main language of texts."""

    def identify(self, texts: Sequence[str]) -> list[Language]:
        """Return the main language of every text."""
        detected = [UNKNOWN] * len(texts)
        unclear = list(range(len(texts)))
        for size in SAMPLE_CHARACTERS:
            starts = [max(0, (len(texts[number]) - size) // 2) for number in unclear]
            samples = [texts[number][start : start + size] for number, start in zip(unclear, starts, strict=True)]
            for number, language in zip(unclear, self.detect(samples), strict=True):
                detected[number] = language
            unclear = [number for number in unclear if detected[number][1] < CLEAR and len(texts[number]) > size]
        return detected

    @abstractmethod
    def detect(self, samples: Sequence[str]) -> list[Language]:
        """Return the main language of every sample, from all of its characters."""

    @abstractmethod
    def covered(self, code: str) -> tuple[str, ...]:
        """Return the labels that a code names."""


class Cld2(Detector):
    """The built-in one, by pycld2, for which not every machine has a wheel."""

    def detect(self, samples: Sequence[str]) -> list[Language]:
        """See Detector."""
        import pycld2

        detected = []
        for sample in samples:
            try:
                try:
                    _, _, results = pycld2.detect(sample)
                except pycld2.error:
                    _, _, results = pycld2.detect(_UNPRINTABLE.sub(" ", sample))
                _, code, percent, _ = results[0]
                detected.append((languages.normalized(code), percent / 100))
            except pycld2.error:  # characters outside the planes that CLD2 supports
                detected.append(UNKNOWN)
        return detected

    def covered(self, code: str) -> tuple[str, ...]:
        """See Detector."""
        return languages.covered(code)


class FastTextDetector(Detector):
    """A classifier of fastText whose labels are codes of languages: `de`, `deu_Latn`.

    A code becomes the label of common/languages.py, unless that is another code of the classifier: `ckb` beside `ku`.

    Raises:
        UserError: the file is missing, or is none of fastText.
    """

    def __init__(self, name: str) -> None:
        self._model = fasttext_model.load(name, "clean.language.model")
        names = self._model.labels
        # Codes of Wikipedia, which lid.176 has: als is Alemannic there, and Tosk Albanian in ISO 639-3.
        codes = ["gsw" if name == "als" and "sq" in names else name for name in names]
        labels = [languages.normalized(code) for code in codes]
        known = {_language(code) for code in codes}
        self._codes = [
            (code, code if label in known and _language(code) != label else label) for code, label in zip(codes, labels, strict=True)
        ]
        self._labels = sorted({label for _, label in self._codes})
        columns = np.array([self._labels.index(label) for _, label in self._codes])
        self._order = np.argsort(columns, kind="stable")
        self._starts = np.searchsorted(columns[self._order], np.arange(len(self._labels)))

    def detect(self, samples: Sequence[str]) -> list[Language]:
        """Return the most probable language of every sample; the probabilities of its scripts are added."""
        probabilities = self._model.probabilities(samples)
        summed = np.add.reduceat(probabilities[:, self._order], self._starts, axis=1)
        best = summed.argmax(axis=1)
        return [
            (self._labels[label], min(1.0, float(row[label]))) if row[label] > 0 else UNKNOWN
            for row, label in zip(summed, best.tolist(), strict=True)
        ]

    def covered(self, code: str) -> tuple[str, ...]:
        """Return the labels that a code names, those of its own language first: of `ckb` not `ku`."""
        general = languages.covered(code)
        named = {label for name, label in self._codes if code.lower() in (name.lower(), _language(name))}
        labels = set(general) if len(general) > 1 else named or set(general)
        return tuple(sorted(labels & set(self._labels)))

    def nearest(self, code: str) -> str:
        """Return codes that are meant most likely."""
        close = difflib.get_close_matches(code, [*self._labels, *(name for name, _ in self._codes)], cutoff=0)
        return f"it knows {', '.join(dict.fromkeys(close))} and {len(self._labels)} in all"


def detector(clean: CleanConfig) -> Detector:
    """Return the detector that a configuration chooses.

    Raises:
        UserError: its file cannot be read, or it does not know a language of the configuration; CLD2 is required and not installed.
    """
    if clean.language.model is None:
        identifying = [step for step in clean.steps if step in IDENTIFYING or getattr(getattr(clean, step), "by_language", {})]
        if identifying and importlib.util.find_spec("pycld2") is None:
            rule = f"CLD2 (pycld2), by which {', '.join(identifying)} of clean.steps identify languages, is not installed"
            fix = "name a file (OpenLID, GlotLID, lid.176), or compile it, which requires a C++ compiler: pip install pycld2"
            raise UserError.of("clean.language.model", "null", rule, fix)
        return Cld2()
    model = FastTextDetector(clean.language.model)
    codes = [("clean.language.keep", code) for code in clean.language.keep]
    for name in STEPS:  # a step may have values of languages that are in no text
        mine = getattr(getattr(clean, name), "by_language", {})
        codes += [(f"clean.{name}.by_language", code) for code in mine if not languages.covered(code)]
    for key, code in codes:
        if not model.covered(code):
            raise UserError.of(key, code, f"is no language of clean.language.model={clean.language.model}", model.nearest(code))
    return model


def _language(code: str) -> str:
    """The code of the language without that of a script."""
    return re.split("[-_]", code.lower())[0]
