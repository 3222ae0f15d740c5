"""The cleaning steps and their keys. The defaults are those of the papers cited in pipeline/data/clean/."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.common.knobs import knob

#: Step name -> short description.
STEPS = {
    "allow": "keep only documents with an allowed source and license",
    "repair": "fix wrongly decoded text and HTML entities",
    "normalise": "normalize to Unicode NFC and LF line endings, remove invisible characters",
    "boilerplate": "remove HTML tags, YAML front matter, and notices of web pages; before repair, which decodes entities",
    "personal": "mask e-mail and IP addresses, telephone numbers, IBANs, payment cards and national numbers",
    "length": "drop texts that are too short or too long",
    "language": "drop texts in languages not listed in clean.language.keep",
    "gopher": "drop texts that fail the quality rules of Gopher",
    "c4": "drop texts that fail the sentence rules of C4",
    "fineweb": "drop texts that fail the line rules of FineWeb, such as lists and menus",
    "repetition": "drop repetitive texts (rules of Gopher)",
    "score": "record a quality score by a fastText classifier, and drop texts with a low one",
    "fields": "drop documents whose fields do not meet a condition",
    "contamination": "drop texts that contain a part of a benchmark",
}

PERSONAL_KINDS = ("email", "ip", "iban", "card", "id", "phone")


@dataclass(frozen=True)
class AllowStep:
    """Filter by source, license and address."""

    sources: list[str] = knob([], "glob patterns of allowed sources; empty allows all")
    licences: list[str] = knob([], "glob patterns of allowed licenses; empty allows all")
    source_field: str = knob("source", "metadata field with the source; the file name if a document has no such field")
    licence_field: str = knob("license", "metadata field with the license; else the SPDX-License-Identifier that begins the text")
    blocked: list[str] = knob(
        [], "files with a domain or a URL in each line: drops documents from there, from subdomains, and whose URL goes on after /, ? or #"
    )
    url_field: str = knob("url", "metadata field with the URL; documents without it are from no blocked address")
    reserved: bool = knob(
        True,
        "keep documents with a metadata field `reserved`, as web pages have whose publisher reserves text and data mining "
        "(tdm-reservation: 1) or declines training (noai, train-ai=n)",
    )


@dataclass(frozen=True)
class RepairStep:
    """Encoding repair."""


@dataclass(frozen=True)
class NormaliseStep:
    """Unicode and whitespace normalization."""


@dataclass(frozen=True)
class BoilerplateStep:
    """Boilerplate of web pages."""

    phrases: list[str] = knob(
        [
            "privacy policy",
            "cookie policy",
            "terms of use",
            "site uses cookies",
            "we use cookies",
            "our use of cookies",
            "please enable javascript",
            "javascript is disabled",
            "nutzungsbedingungen",
            "datenschutzerklärung",
            "site verwendet cookies",
            "wir verwenden cookies",
            "verwendung von cookies",
            "javascript ist deaktiviert",
        ],
        "notices: lines outside code and wrapped paragraphs that contain one of these phrases are removed, ignoring case",
    )
    longest_line: int = knob(200, "longer lines are text, not notices, and are kept", unit="characters", at_least=0)


@dataclass(frozen=True)
class PersonalStep:
    """Personal data."""

    kinds: list[str] = knob(list(PERSONAL_KINDS), "kinds of personal data to mask: " + ", ".join(PERSONAL_KINDS))


@dataclass(frozen=True)
class LengthStep:
    """Filter by text length."""

    least: int = knob(200, "minimum text length", unit="characters", at_least=0)
    most: int = knob(100_000_000, "maximum text length", unit="characters", at_least=1)
    by_language: dict[str, dict[str, Any]] = knob({}, "values of other keys of this step for single languages, such as {ko: {least: 100}}")


@dataclass(frozen=True)
class LanguageStep:
    """Filter by language."""

    keep: list[str] = knob(
        [],
        "languages to keep (ISO 639 or BCP 47: en, deu, zh-Hant, ...; pipeline/common/languages.py lists them); empty keeps all; the "
        "language is recorded in any case",
    )
    share: float = knob(
        0.65, "minimum probability of the language, which in a text in two languages is about the share of each", at_least=0, at_most=1
    )
    model: str | None = knob(
        None, "a fastText classifier that identifies languages (.bin or .ftz: OpenLID, GlotLID, lid.176); null uses the built-in one"
    )


@dataclass(frozen=True)
class ScoreStep:
    """Quality by a classifier, or by a command."""

    model: str | None = knob(None, "fastText classifier (.bin or .ftz), such as that of DCLM or of tools/quality_model")
    label: str = knob("", "its label whose probability is the score, without __label__; documents have it in the field score")
    command: str | None = knob(
        None,
        'command in place of a classifier, without a shell: it reads {"text": ...} and writes out {"score": ...} at once, a line of JSON a '
        "document, in order",
    )
    least: float | None = knob(None, "minimum score; default: all documents are kept")


@dataclass(frozen=True)
class FieldsStep:
    """Filter by the fields of a document."""

    keep: str = knob(
        "",
        "condition that kept documents meet, in Python's syntax: int_score >= 3 and language in ['de', 'fr']. Fields are those of the "
        "record; corpus, and lang and score of earlier steps",
    )


@dataclass(frozen=True)
class GopherStep:
    """Quality rules of Gopher."""

    least_words: int = knob(50, "minimum number of words", at_least=0)
    most_words: int = knob(100_000, "maximum number of words", at_least=1)
    least_word_length: float = knob(3.0, "minimum mean word length", unit="characters", at_least=0)
    most_word_length: float = knob(10.0, "maximum mean word length", unit="characters", at_least=1)
    symbols: float = knob(0.1, "maximum ratio of # signs to words, and of ellipses to words", at_least=0)
    bullet_lines: float = knob(0.9, "maximum fraction of lines that begin with a bullet point", at_least=0, at_most=1)
    ellipsis_lines: float = knob(0.3, "maximum fraction of lines that end with an ellipsis", at_least=0, at_most=1)
    alphabetic: float = knob(0.8, "minimum fraction of whitespace-separated words that contain a letter", at_least=0, at_most=1)
    stop_words: int = knob(2, "minimum number of stop words of the language of the text", at_least=0)
    by_language: dict[str, dict[str, Any]] = knob(
        {
            # Hangul syllables are two to three letters each; Vietnamese writes syllables as words.
            "ko": {"least_word_length": 1.0},
            "vi": {"least_word_length": 2.0},
            # Dravidian languages and Sanskrit: long words, and vowel signs that count as characters. Greenlandic: sentences as words.
            **{code: {"most_word_length": 20.0} for code in ("kl", "kn", "ml", "sa", "ta", "te")},
        },
        "values of other keys of this step for single languages, such as {ko: {least_word_length: 1}}",
    )


@dataclass(frozen=True)
class C4Step:
    """Sentence rules of C4."""

    least_sentences: int = knob(5, "minimum number of sentences", at_least=0)
    no_curly_brackets: bool = knob(False, "drop texts with a curly bracket, the rule of C4 against source code")
    by_language: dict[str, dict[str, Any]] = knob(
        {**{code: {"least_sentences": 0} for code in ("lo", "th")}},
        "values of other keys of this step for single languages, such as {ko: {least_sentences: 3}}",
    )


@dataclass(frozen=True)
class FineWebStep:
    """Line rules of FineWeb."""

    closed_lines: float = knob(0.12, "minimum fraction of lines that end with punctuation", at_least=0, at_most=1)
    short_line: int = knob(30, "maximum length of a short line", unit="characters", at_least=0)
    short_lines: float = knob(0.67, "maximum fraction of short lines", at_least=0, at_most=1)
    duplicate_characters: float = knob(
        0.01, "maximum fraction of characters in duplicate lines (0.01 in FineWeb's code, 0.1 in the paper)", at_least=0, at_most=1
    )
    newlines: float = knob(0.3, "maximum ratio of lines to words", at_least=0)
    by_language: dict[str, dict[str, Any]] = knob(
        {**{code: {"closed_lines": 0.0} for code in ("lo", "th")}},
        "values of other keys of this step for single languages, such as {ko: {closed_lines: 0.1}}",
    )


@dataclass(frozen=True)
class RepetitionStep:
    """Repetition rules of Gopher, as fractions of the lines, paragraphs or characters of a text."""

    lines: float = knob(0.30, "maximum fraction of duplicate lines", at_least=0, at_most=1)
    line_characters: float = knob(0.20, "maximum fraction of characters in duplicate lines", at_least=0, at_most=1)
    paragraphs: float = knob(0.30, "maximum fraction of duplicate paragraphs", at_least=0, at_most=1)
    paragraph_characters: float = knob(0.20, "maximum fraction of characters in duplicate paragraphs", at_least=0, at_most=1)
    top_ngrams: list[float] = knob([0.20, 0.18, 0.16], "maximum fraction of characters in the most frequent 2-, 3- and 4-gram")
    long_ngrams: list[float] = knob([0.15, 0.14, 0.13, 0.12, 0.11, 0.10], "maximum fraction of characters in duplicate 5- to 10-grams")
    by_language: dict[str, dict[str, Any]] = knob({}, "values of other keys of this step for single languages, such as {ko: {lines: 0.4}}")


@dataclass(frozen=True)
class ContaminationStep:
    """Benchmark contamination."""

    files: list[str] = knob([], "files with the texts of the benchmarks, in any format of data.input")
    words: int = knob(13, "length of a shared n-gram that counts as contamination", unit="words", at_least=3)
    least_words: int = knob(
        8,
        "shorter texts of a benchmark are matched as a whole if they have as many; the report counts the others",
        unit="words",
        at_least=3,
    )


@dataclass(frozen=True)
class CleanConfig:
    """Cleaning before deduplication: `clean.steps` in order, each step with its own keys."""

    steps: list[str] = knob(
        ["boilerplate", "repair", "normalise", "personal", "length", "language", "gopher", "repetition"],
        "steps in order of application; available: " + ", ".join(STEPS),
    )
    mode: str = knob(
        "drop",
        "drop: steps drop documents; tag: the reasons for which they would are recorded in the field clean of the kept documents",
        choices=("drop", "tag"),
    )
    allow: AllowStep = field(default_factory=AllowStep)
    repair: RepairStep = field(default_factory=RepairStep)
    normalise: NormaliseStep = field(default_factory=NormaliseStep)
    boilerplate: BoilerplateStep = field(default_factory=BoilerplateStep)
    personal: PersonalStep = field(default_factory=PersonalStep)
    length: LengthStep = field(default_factory=LengthStep)
    language: LanguageStep = field(default_factory=LanguageStep)
    gopher: GopherStep = field(default_factory=GopherStep)
    c4: C4Step = field(default_factory=C4Step)
    fineweb: FineWebStep = field(default_factory=FineWebStep)
    repetition: RepetitionStep = field(default_factory=RepetitionStep)
    score: ScoreStep = field(default_factory=ScoreStep)
    fields: FieldsStep = field(default_factory=FieldsStep)
    contamination: ContaminationStep = field(default_factory=ContaminationStep)
