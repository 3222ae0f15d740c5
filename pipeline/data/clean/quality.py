"""Steps that drop documents other than running text: the rules of Gopher, C4 and FineWeb, and limits on the length.

Gopher: Rae et al. 2021, arXiv:2112.11446, appendix A.1. C4: Raffel et al. 2020, section 2.2. FineWeb: Penedo et al. 2024, section 3.6.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterable

import numpy as np
import orjson

from pipeline.common.errors import UserError
from pipeline.config.cleaning import C4Step, FineWebStep, GopherStep, LanguageStep, LengthStep, ScoreStep
from pipeline.data.clean import counts, fasttext_model
from pipeline.data.clean.document_batch import DocumentBatch, Step, StepLimits, Verdict, drop

log = logging.getLogger("pipeline")

#: Time without an answer of a command after which the log says so, and after which the stage fails.
WARN_SECONDS, LAST_SECONDS = 60.0, 1800.0
#: Time in which a line more than the command has read would appear.
MORE_SECONDS = 0.02


def length(knobs: LengthStep) -> Step:
    """Drop texts that are too short or too long, in characters."""

    def step(batch: DocumentBatch) -> Iterable[Verdict]:
        characters, limits = batch.characters, StepLimits(knobs, batch)
        return drop(batch, [(characters < limits["least"], "too short"), (characters > limits["most"], "too long")])

    return step


class Score:
    """Record a score: of a command, or the probability of a label of a classifier (DCLM, Li et al. 2024, arXiv:2406.11794); drop low ones.

    Raises:
        UserError: the classifier cannot be read, or does not have the label; the command cannot be started, ends, or writes something else.
    """

    def __init__(self, knobs: ScoreStep) -> None:
        self._least = -np.inf if knobs.least is None else knobs.least
        self._scores = _classifier(knobs.model, knobs.label) if knobs.command is None else _Command(knobs.command)

    def __call__(self, batch: DocumentBatch) -> Iterable[Verdict]:
        """Yield the verdicts on a batch."""
        alive = np.flatnonzero(batch.alive)
        batch.scores[alive] = self._scores([batch.texts[index] for index in alive.tolist()])
        return drop(batch, [(batch.scores < self._least, "low score")])


def _classifier(path: str | None, label: str) -> Callable[[list[str]], np.ndarray]:
    """The probabilities of a label."""
    model = fasttext_model.load(path, "clean.score.model")
    if label not in model.labels:
        known = ", ".join(model.labels[:20])
        raise UserError.of("clean.score.label", repr(label), f"is no label of {path}", f"choose one of {known}")
    column = model.labels.index(label)
    return lambda texts: model.probabilities(texts)[:, column]


class _Command:
    """The scores of a program of the user's, of which every rank starts one; what it writes to standard error is part of the log."""

    def __init__(self, command: str) -> None:
        self._command, self._answers = command, b""
        try:
            self._process = subprocess.Popen(shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            fix = "name a program and files that exist; no shell runs it: \"bash -c '...'\" is one"
            raise UserError.of("clean.score.command", command, f"cannot be started: {error}", fix) from error

    def __call__(self, texts: list[str]) -> list[float]:
        requests = self._process.stdin
        assert requests is not None
        self._refuse_more(0.0)

        def send() -> None:
            with contextlib.suppress(OSError):  # it has ended, which is found below
                requests.writelines(orjson.dumps({"text": text}) + b"\n" for text in texts)
                requests.flush()

        sender = threading.Thread(target=send, daemon=True)  # a command may answer before it has read all of them
        sender.start()
        scores = []
        for _ in texts:
            line = self._line()
            try:
                score = orjson.loads(line)["score"]
                scores.append(math.nan if isinstance(score, bool) else float(score))
            except (ValueError, TypeError, KeyError):
                scores.append(math.nan)
            if math.isnan(scores[-1]):
                raise self._error(f"wrote a line without a score: {line[:80]!r}")
        sender.join()
        self._refuse_more(MORE_SECONDS)
        return scores

    def _line(self) -> bytes:
        """The next line of the command."""
        waited = 0.0
        while b"\n" not in self._answers:
            if self._readable(WARN_SECONDS):
                if not (read := os.read(self._output(), 1 << 16)):
                    raise self._error(f"ended with exit code {self._process.wait()} before it had answered")
                self._answers, waited = self._answers + read, 0.0
                continue
            waited += WARN_SECONDS
            if waited >= LAST_SECONDS:
                self._process.kill()
                raise self._error(f"has not answered for {waited:.0f} s")
            log.warning("clean.score.command=%s has not answered for %.0f s: it has to write out each line at once", self._command, waited)
        line, _, self._answers = self._answers.partition(b"\n")
        return line

    def _refuse_more(self, seconds: float) -> None:
        """Refuse lines that answer nothing: all later scores would be those of other documents."""
        if self._answers or (self._readable(seconds) and os.read(self._output(), 1)):
            raise self._error("writes more lines than it reads")

    def _readable(self, seconds: float) -> bool:
        waiting = select.poll()
        waiting.register(self._output(), select.POLLIN)
        return bool(waiting.poll(seconds * 1000))

    def _output(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def _error(self, rule: str) -> UserError:
        fix = 'it reads lines such as {"text": "..."}, and writes a line such as {"score": 0.5} for each of them at once (flush)'
        return UserError.of("clean.score.command", self._command, rule, fix)


def gopher(knobs: GopherStep) -> Step:
    """Gopher's quality rules. Stop words are those of the text's language; languages without a list skip that rule."""

    def step(batch: DocumentBatch) -> Iterable[Verdict]:
        limits = StepLimits(knobs, batch)
        stats = counts.gopher(batch)
        count = stats["words"]
        divisor, line_count = np.maximum(count, 1), np.maximum(stats["lines"], 1)
        mean_length = stats["spaced_characters"] / np.maximum(stats["spaced"], 1)
        spaced = 2 * stats["spaced"] >= count  # whether spaces separate at least half of the words
        bullets, open_lines = stats["bullets"] / line_count, stats["open_lines"] / line_count
        hashes, dots = stats["hashes"] / divisor, stats["ellipses"] / divisor
        # A token of a script without spaces is a sentence.
        alphabetic, tokens = np.where(spaced, (stats["lettered_tokens"], stats["tokens"]), (stats["lettered_words"], count))
        missing, has_list = stats["stop_words"] < limits["stop_words"], stats["has_stop_words"]
        return drop(
            batch,
            [
                (count < limits["least_words"], "too few words"),
                (count > limits["most_words"], "too many words"),
                (
                    spaced & ((mean_length < limits["least_word_length"]) | (mean_length > limits["most_word_length"])),
                    "mean word length",
                ),
                ((hashes > limits["symbols"]) | (dots > limits["symbols"]), "too many symbols"),
                (bullets > limits["bullet_lines"], "mostly bullet points"),
                (open_lines > limits["ellipsis_lines"], "many lines end in an ellipsis"),
                (alphabetic < limits["alphabetic"] * tokens, "too few words with letters"),
                (has_list & missing, "too few stop words"),
            ],
        )

    return step


def c4(knobs: C4Step) -> Step:
    """C4's page-level rules: enough sentences, no placeholder text, and optionally no curly brackets."""

    def step(batch: DocumentBatch) -> Iterable[Verdict]:
        limits = StepLimits(knobs, batch)
        code = np.array(["{" in text for text in batch.texts])
        placeholder = np.array(["lorem ipsum" in text.lower() for text in batch.texts])
        sentences = counts.sentences(batch.words)
        return drop(
            batch,
            [
                (sentences < limits["least_sentences"], "too few sentences"),
                (placeholder, "lorem ipsum"),
                (code & knobs.no_curly_brackets, "curly brackets"),
            ],
        )

    return step


def fineweb(knobs: FineWebStep) -> Step:
    """FineWeb's rules for lines: enough end in punctuation, not too many are short, few are repeated, not too many lines per word."""

    def step(batch: DocumentBatch) -> Iterable[Verdict]:
        limits = StepLimits(knobs, batch)
        stats = counts.fineweb(batch, limits["short_line"])
        count = np.maximum(stats["lines"], 1)
        closed, short, repeats = stats["closed"], stats["short"], stats["repeated_characters"]
        many = count > 1  # the rules do not apply to a single line
        characters = np.maximum(batch.characters - stats["newlines"], 1)  # without the newlines within the text
        newlines = count / np.maximum(stats["words"], 1)
        return drop(
            batch,
            [
                (many & (closed < limits["closed_lines"] * count), "few lines end in punctuation"),
                (many & (short > limits["short_lines"] * count), "mostly short lines"),
                (repeats > limits["duplicate_characters"] * characters, "characters in duplicate lines"),
                (many & (newlines > limits["newlines"]), "too many lines for its words"),
            ],
        )

    return step


def language(knobs: LanguageStep) -> Step:
    """Drop documents in other languages, or with too small a share of the main language. If `keep` is empty, all documents are kept."""

    def step(batch: DocumentBatch) -> Iterable[Verdict]:
        detected = batch.languages
        wanted = {label for code in knobs.keep for label in batch.detector.covered(code)}
        if not wanted:
            return ()
        other = np.array([label not in wanted for label, _ in detected])
        unclear = np.array([share < knobs.share for _, share in detected])
        return drop(batch, [(other, "other language"), (unclear, "language unclear")])

    return step
