"""The cleaning steps and their knobs. The defaults are those of the papers named beside the steps in pipeline/data/clean/."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.knobs import knob

#: Every step: what it does in a few words.
STEPS = {
    "allow": "keep allowed sources and licences only",
    "repair": "mend broken encodings and HTML entities",
    "normalise": "composed Unicode, plain newlines, no invisible characters",
    "boilerplate": "remove HTML tags, YAML heads, lines with phrases of web pages",
    "personal": "mask e-mail and IP addresses, telephone numbers, IBANs",
    "length": "drop too short and too long texts",
    "language": "drop other languages than the wanted ones",
    "gopher": "drop what is no running text (Gopher)",
    "c4": "drop pages without sentences (C4)",
    "fineweb": "drop lists and menus (FineWeb)",
    "repetition": "drop texts that repeat themselves (Gopher)",
    "contamination": "drop texts that hold a part of a benchmark",
}

PERSONAL_KINDS = ("email", "ip", "iban", "phone")


@dataclass
class AllowStep:
    """Where documents may come from."""

    sources: list[str] = knob([], "patterns (globs) of allowed sources; none allows all")
    licences: list[str] = knob([], "patterns (globs) of allowed licences; none allows all")
    source_field: str = knob("source", "metadata field of the source; the file's name when a document has none")
    licence_field: str = knob("license", "metadata field of the licence")


@dataclass
class RepairStep:
    """Broken encodings."""


@dataclass
class NormaliseStep:
    """Characters and space."""


@dataclass
class BoilerplateStep:
    """Remains of web pages."""

    phrases: list[str] = knob(
        [
            "javascript",
            "terms of use",
            "privacy policy",
            "cookie policy",
            "uses cookies",
            "use of cookies",
            "use cookies",
            "nutzungsbedingungen",
            "datenschutzerklärung",
            "cookies verwenden",
            "verwendet cookies",
            "verwendung von cookies",
        ],
        "a line with one of them is removed, whatever the case",
    )


@dataclass
class PersonalStep:
    """Personal data."""

    kinds: list[str] = knob(list(PERSONAL_KINDS), "what is masked: " + ", ".join(PERSONAL_KINDS))


@dataclass
class LengthStep:
    """Length of a text."""

    least: int = knob(200, "shortest text", unit="characters", at_least=0)
    most: int = knob(100_000_000, "longest text", unit="characters", at_least=1)


@dataclass
class LanguageStep:
    """Language."""

    keep: list[str] = knob([], "languages to keep (ISO 639-1: en, de, ...); none keeps all, and the language is noted in any case")
    share: float = knob(0.65, "least part of the text in that language", at_least=0, at_most=1)


@dataclass
class GopherStep:
    """Running text."""

    least_words: int = knob(50, "fewest words", at_least=0)
    most_words: int = knob(100_000, "most words", at_least=1)
    least_word_length: float = knob(3.0, "smallest mean length of a word", unit="characters", at_least=0)
    most_word_length: float = knob(10.0, "largest mean length of a word", unit="characters", at_least=1)
    symbols: float = knob(0.1, "most # or ellipses a word", at_least=0)
    bullet_lines: float = knob(0.9, "largest share of lines that begin with a bullet point", at_least=0, at_most=1)
    ellipsis_lines: float = knob(0.3, "largest share of lines that end in an ellipsis", at_least=0, at_most=1)
    alphabetic: float = knob(0.8, "least share of the pieces between spaces that hold a letter", at_least=0, at_most=1)
    stop_words: int = knob(2, "fewest stop words of the text's language", at_least=0)


@dataclass
class C4Step:
    """Sentences."""

    least_sentences: int = knob(5, "fewest sentences", at_least=0)
    no_curly_brackets: bool = knob(False, "drop texts with a curly bracket, as C4 did against source code")


@dataclass
class FineWebStep:
    """Lines."""

    closed_lines: float = knob(0.12, "least share of lines that end in punctuation", at_least=0, at_most=1)
    short_line: int = knob(30, "a line of so many characters is short", unit="characters", at_least=0)
    short_lines: float = knob(0.67, "largest share of short lines", at_least=0, at_most=1)
    newlines: float = knob(0.3, "most lines a word", at_least=0)


@dataclass
class RepetitionStep:
    """Repetition within a text; shares of its lines, paragraphs or characters."""

    lines: float = knob(0.30, "largest share of lines that stood before", at_least=0, at_most=1)
    line_characters: float = knob(0.20, "largest share of characters in such lines", at_least=0, at_most=1)
    paragraphs: float = knob(0.30, "largest share of paragraphs that stood before", at_least=0, at_most=1)
    paragraph_characters: float = knob(0.20, "largest share of characters in such paragraphs", at_least=0, at_most=1)
    top_ngrams: list[float] = knob([0.20, 0.18, 0.16], "largest share of characters in the most frequent 2-, 3- and 4-gram")
    long_ngrams: list[float] = knob([0.15, 0.14, 0.13, 0.12, 0.11, 0.10], "largest share in 5- to 10-grams that stood before")


@dataclass
class ContaminationStep:
    """Benchmarks."""

    files: list[str] = knob([], "files with the benchmarks' texts, in any format that data.input reads")
    words: int = knob(13, "a shared run of so many words is a part of the benchmark", unit="words", at_least=3)


@dataclass
class CleanConfig:
    """What happens to documents before deduplication: `clean.steps` in their order, each with its own knobs."""

    steps: list[str] = knob(
        ["repair", "normalise", "boilerplate", "personal", "length", "language", "gopher", "repetition"],
        "steps in their order, of " + ", ".join(STEPS),
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
    contamination: ContaminationStep = field(default_factory=ContaminationStep)
