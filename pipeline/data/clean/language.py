"""Identification of languages by a classifier of fastText: the built-in one, which tools/language_model trains, or a file."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from pipeline.common import languages
from pipeline.common.errors import UserError
from pipeline.config.cleaning import STEPS, CleanConfig
from pipeline.data.clean import fasttext_model

Language = tuple[str, float]
"""A label as in common/languages.py, "und" if unknown, and its probability, 0 to 1, with that of languages as in CLOSE."""

UNKNOWN: Language = (languages.UNKNOWN, 0.0)

SAMPLE_CHARACTERS = (400, 10_000)
"""Sample sizes, taken from the middle of a text because its ends are often headings and imprints. The time grows with the length; the
larger sample is used only for the few texts, such as tables, where the language of the smaller one is less probable than CLEAR."""
CLEAR = 0.8
IDENTIFYING = frozenset({"language", "gopher", "c4", "fineweb"})
"""Steps that identify languages. With one of them, the language of what earlier steps drop is identified as well, for the counts."""

BUILT_IN = Path(__file__).with_name("languages.ftz")
"""Learned from messages and manuals of free software, all letters lower-case and the rest as spaces (`letters`)."""
FEW_LETTERS = 12
"""A text whose different words have fewer bytes together is in no language: a number with its unit, an abbreviation."""
LEAST_PROBABLE = 0.2
"""Below it a text is in no language. Lists of keywords are above it: the rule for stop words, which drops them, needs their language."""
CLOSE = "ast es gl pt, bh hi, bs hr sr, ca oc, cs sk, da nn no, de gsw, en sco, id ms, nso st tn, rn rw, ss xh zu, zh zh-Hant"
"""Languages of which one is often probable beside another: a good text is not dropped because its probability is divided among them."""
#: Frequent words of languages in CLOSE that the others of the group spell otherwise, or do not have.
DISTINCTIVE = {
    "ms": "kerana bahawa sahaja mahu mahupun cuba manakala selepas sebarang sesiapa sekiranya semasa mengikut peratus polis "
    "syarikat universiti isnin ogos julai disember mesyuarat pelbagai awam bandar hendak tiada antarabangsa pertubuhan "
    "perkhidmatan faedah tarikh percuma telefon nombor senarai sila kanak",
    "id": "karena bahwa bisa mau maupun coba sedangkan setelah siapapun ketika persen polisi perusahaan universitas senin agustus "
    "juli desember rapat berbagai uang pemerintah provinsi kantor internasional organisasi layanan manfaat tanggal gratis "
    "telepon nomor silakan",
    "hr": "tko netko nitko točno tijekom tjedan tjedna tisuća tisuće sustav sustava povijest povijesti europe europi europske "
    "europski siječnja veljače ožujka travnja svibnja lipnja srpnja kolovoza rujna listopada studenoga prosinca suradnja "
    "suradnje skupina skupine znanosti glazba tvrtka tvrtke sveučilišta unatoč uporabe obitelj obitelji osobno osobnosti "
    "poduzeće poduzeća sudjeluje obrana obrane uvjeti uvjeta računalo tisak kruh kemija",
    "bs sr": "ko neko niko tačno sedmica sedmice hiljada hiljade sistem sistema historije istorije evrope evropi evropske evropski "
    "januara februara marta aprila maja juna jula augusta avgusta septembra oktobra novembra decembra saradnja saradnje "
    "grupa grupe nauke muzika univerziteta uprkos upotrebe porodica porodice porodici lično ličnosti preduzeće preduzeća "
    "učestvuje odbrana odbrane uslovi uslova kompjuter štampa hljeb hemija",
    "bs hr": "vrijeme mjesto mjesta dijete djeca djece riječ riječi svijet svijeta svijetu prije poslije gdje uvijek zahtjev primjer "
    "sljedeći vjera vjere vjeru mjera mjere savjesti dijela cijeli lijepo smije vidjeti",
    "sr": "vreme mesto mesta dete deca dece reč reči svet svetu pre posle gde uvek zahtev primer sledeći vere veru mera mere savesti ceo "
    "lepo sme videti",
}
_DISTINCTIVE = {word: labels.split() for labels, words in DISTINCTIVE.items() for word in words.split()}
DISTINCT = 5.0
"""What each of these words multiplies the probability of its language by."""
_SPACES = bytes(byte if byte >= 128 or chr(byte).isalpha() else 32 for byte in range(256))
#: Signs beyond ASCII that stand beside words, among them the dots between words or syllables of Ethiopic and Tibetan.
_SIGNS = re.compile(
    "[\u00a0-\u00a9\u00ab-\u00b4\u00b6-\u00b9\u00bb-\u00bf\u0964\u0965\u0f0b-\u0f14\u1360-\u137c\u200b\u2010-\u206f\u20a0-\u20cf"
    "\u2100-\u2bff\u3000-\u3004\u3007-\u3020\uff00-\uff20\uff5b-\uff65]+"
)


def letters(text: str) -> str:
    """Return a text as the built-in classifier reads it: lower-case, and spaces for digits, punctuation, symbols and control characters."""
    spoken = text if text.isascii() else _SIGNS.sub(" ", text)
    return spoken.lower().encode("utf-8", "replace").translate(_SPACES).decode()


class Detector:
    """Finds the main language of texts by a classifier whose labels are codes of languages: `de`, `deu_Latn`.

    A code becomes the label of common/languages.py, unless that is another code of the classifier: `ckb` beside `ku`.

    Args:
        name: a file; None for the built-in one.

    Raises:
        UserError: the file is missing, is none of fastText, or has labels of something else, such as quality.
    """

    def __init__(self, name: str | None = None) -> None:
        self._built_in = name is None
        self._model = fasttext_model.load(name or str(BUILT_IN), "clean.language.model")
        names = self._model.labels
        # Codes of Wikipedia, which lid.176 has: als is Alemannic there, and Tosk Albanian in ISO 639-3.
        codes = ["gsw" if name == "als" and "sq" in names else name for name in names]
        if not any(map(languages.label, codes)):
            rule = f"names no language: its labels are {', '.join(codes[:5])}"
            raise UserError.of("clean.language.model", name, rule, "name a classifier of languages, or leave it out for the built-in one")
        labels = [languages.normalized(code) for code in codes]
        known = {_language(code) for code in codes}
        self._codes = [
            (code, code if label in known and _language(code) != label else label) for code, label in zip(codes, labels, strict=True)
        ]
        self._labels = sorted({label for _, label in self._codes})
        self._labels_of: dict[str, set[str]] = {}  # of each code, and of the language of codes with a script
        for name, label in self._codes:
            for code in (name.lower(), _language(name)):
                self._labels_of.setdefault(code, set()).add(label)
        columns = np.array([self._labels.index(label) for _, label in self._codes])
        self._order = np.argsort(columns, kind="stable")
        self._starts = np.searchsorted(columns[self._order], np.arange(len(self._labels)))
        close = [group.split() for group in CLOSE.split(",")] if self._built_in else []
        groups = [next((group for group in close if label in group), [label]) for label in self._labels]
        places = {label: place for place, label in enumerate(self._labels)}
        self._decided_by_words = np.isin(self._labels, " ".join(DISTINCTIVE).split()) & self._built_in
        #: The numbers of the labels of each one's group, -1 where there are less of them.
        self._close = np.array([([places.get(label, -1) for label in group] + [-1] * 4)[:4] for group in groups])

    def identify(self, texts: Sequence[str]) -> list[Language]:
        """Return the main language of every text."""
        detected = [UNKNOWN] * len(texts)
        unclear = list(range(len(texts)))
        for size in SAMPLE_CHARACTERS:
            starts = [max(0, (len(texts[number]) - size) // 2) for number in unclear]
            samples = [texts[number][start : start + size] for number, start in zip(unclear, starts, strict=True)]
            for number, language in zip(unclear, self._detect(samples), strict=True):
                detected[number] = language
            unclear = [number for number in unclear if detected[number][1] < CLEAR and len(texts[number]) > size]
        return detected

    def _detect(self, samples: Sequence[str]) -> list[Language]:
        """The most probable language of every sample; the probabilities of its scripts are added."""
        samples = [letters(sample) for sample in samples] if self._built_in else samples
        probabilities = self._model.probabilities(samples)
        summed = np.add.reduceat(probabilities[:, self._order], self._starts, axis=1)
        close = self._close[summed.argmax(axis=1)]
        of_group = np.where(close >= 0, np.take_along_axis(summed, close, axis=1), 0)
        shares = np.minimum(of_group.sum(axis=1), 1.0)
        for number in np.flatnonzero(self._decided_by_words[close].any(axis=1)).tolist():
            count = Counter(label for word in set(samples[number].split()) for label in _DISTINCTIVE.get(word, ()))
            of_group[number] *= [DISTINCT ** count[self._labels[label]] for label in close[number].tolist()]
        best = np.take_along_axis(close, of_group.argmax(axis=1)[:, None], axis=1)[:, 0]
        found = [(self._labels[label], share) for label, share in zip(best.tolist(), shares.tolist(), strict=True)]
        if self._built_in:
            found = [
                language if language[1] >= LEAST_PROBABLE and (_says_much(sample[:80]) or _says_much(sample)) else UNKNOWN
                for language, sample in zip(found, samples, strict=True)
            ]
        return [language if language[1] > 0 and language[0] != languages.UNKNOWN else UNKNOWN for language in found]

    def covered(self, code: str) -> tuple[str, ...]:
        """Return the labels that a code names, those of its own language first: of `ckb` not `ku`."""
        general = languages.covered(code)
        labels = set(general) if len(general) > 1 else self._labels_of.get(code.lower()) or set(general)
        return tuple(sorted(labels & set(self._labels)))

    def nearest(self, code: str) -> str:
        """Return codes that are meant most likely."""
        close = difflib.get_close_matches(code, [*self._labels, *(name for name, _ in self._codes)], cutoff=0)
        return f"it knows {', '.join(dict.fromkeys(close))} and {len(self._labels)} in all"


@cache
def built_in() -> Detector:
    """Return the detector of the built-in classifier, which a process reads once."""
    return Detector()


def detector(clean: CleanConfig) -> Detector:
    """Return the detector that a configuration chooses.

    Raises:
        UserError: its file cannot be read, or it does not know a language of the configuration.
    """
    if clean.language.model is None:
        return built_in()
    model = Detector(clean.language.model)
    codes = [("clean.language.keep", code) for code in clean.language.keep]
    for name in STEPS:  # a step may have values of languages that are in no text
        mine = getattr(getattr(clean, name), "by_language", {})
        codes += [(f"clean.{name}.by_language", code) for code in mine if not languages.covered(code)]
    for key, code in codes:
        if not model.covered(code):
            raise UserError.of(key, code, f"is no language of clean.language.model={clean.language.model}", model.nearest(code))
    return model


def _says_much(text: str) -> bool:
    """Whether its different words have enough bytes together."""
    return len("".join(set(text.split())).encode()) >= FEW_LETTERS


def _language(code: str) -> str:
    """The code of the language without that of a script."""
    return re.split("[-_]", code.lower())[0]
