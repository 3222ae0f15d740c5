"""Tokenizer metrics on held-out text: compression by language, vocabulary coverage, and the FLOPs to train on the text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pipeline.common import page
from pipeline.common.texts import table_lines
from pipeline.data.tokenize.tokenizer import encode, unknown_token

Measurement = dict[str, Any]

SAMPLE_CHARACTERS = 240
"""Characters of a text per language whose division into tokens is shown."""

WARN_PARITY = 2.0
"""The page warns of a language with a parity above this."""

#: Column -> its definition.
COLUMNS = {
    "bytes_per_token": "UTF-8 bytes of text per token",
    "fertility": "tokens per word; words are separated by whitespace",
    "parity": "tokens per byte, relative to the tokenizer's best language: 1 for the best, 2 for a language with twice as many tokens"
    " per byte (after Petrov et al. 2023, who compare translations of the same sentences)",
    "unknown": "number of unknown tokens, for text that the tokenizer cannot represent",
    "coverage": "fraction of the vocabulary's entries that occur",
    "flops_per_gigabyte": "FLOPs to train the configured model, with this vocabulary, on a gigabyte (10**9 bytes) of this text",
}


def measure(name: str, tokenizer: Tokenizer, texts: dict[str, list[str]], flops_per_token: Callable[[int], float]) -> Measurement:
    """Compute the metrics of one tokenizer.

    Args:
        texts: language -> documents.
        flops_per_token: vocabulary size -> FLOPs to train on one token.

    Returns:
        {"name", "vocab_size", "tokens", ..., "languages": {language: {...}}}; COLUMNS defines the metrics.
    """
    unknown = unknown_token(tokenizer)
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    used = np.zeros(vocab_size, dtype=bool)
    languages: dict[str, Measurement] = {}
    for language, documents in texts.items():
        ids = encode(tokenizer, documents)[0]
        used[ids] = True
        counts = _metrics(
            sum(len(document.encode("utf-8")) for document in documents),
            sum(len(document.split()) for document in documents),
            len(ids),
            int(np.isin(ids, unknown).sum()),
        )
        languages[language] = {**counts, "sample": segmentation(tokenizer, documents[0][:SAMPLE_CHARACTERS])}
    best = min(row["tokens"] / row["bytes"] for row in languages.values())
    for row in languages.values():
        row["parity"] = row["tokens"] / row["bytes"] / best
    total = _metrics(*(sum(row[key] for row in languages.values()) for key in ("bytes", "words", "tokens", "unknown")))
    entries = tokenizer.get_vocab_size(with_added_tokens=True)
    cost = {"coverage": int(used.sum()) / entries, "flops_per_gigabyte": 1e9 / total["bytes_per_token"] * flops_per_token(vocab_size)}
    return {"name": name, "vocab_size": vocab_size, **total, **cost, "languages": languages}


def _metrics(size: int, words: int, tokens: int, unknown: int) -> Measurement:
    """The counts and their ratios."""
    ratios = {"fertility": tokens / max(words, 1), "bytes_per_token": size / max(tokens, 1)}
    return {"bytes": size, "words": words, "tokens": tokens, "unknown": unknown, **ratios}


def segmentation(tokenizer: Tokenizer, text: str) -> list[tuple[str, int]]:
    """The pieces into which a tokenizer divides a text: (characters, number of tokens); tokens that share a character are one piece."""
    pieces: list[tuple[int, int, int]] = []  # first character, end, tokens
    for start, end in tokenizer.encode(text, add_special_tokens=False).offsets:
        if pieces and start < pieces[-1][1]:
            first, last, count = pieces.pop()
            pieces.append((first, max(last, end), count + 1))
        else:
            pieces.append((start, end, 1))
    return [(text[start:end], count) for start, end, count in pieces]


def text_table(rows: list[Measurement]) -> str:
    """The rows as a text table for the log, with one line per tokenizer."""
    languages = list(rows[0]["languages"])
    head = ["tokenizer", "entries", "bytes/token", "fertility", "coverage", "FLOP/GB", *(f"parity {language}" for language in languages)]
    table = [head]
    for row in rows:
        numbers = [f"{row['vocab_size']:,}", f"{row['bytes_per_token']:.3f}", f"{row['fertility']:.3f}", f"{row['coverage']:.1%}"]
        parities = [f"{row['languages'][language]['parity']:.3f}" for language in languages]
        table.append([row["name"], *numbers, f"{row['flops_per_gigabyte']:.2e}", *parities])
    return "\n".join(table_lines(table, right=range(1, len(head))))


def write(folder: Path, rows: list[Measurement], about: dict[str, Any]) -> list[Path]:
    """Write report.json and report.html of the results of measure(), that of the folder's tokenizer first."""
    content = {**about, "columns": COLUMNS, "tokenizers": rows}
    (folder / "report.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "report.html").write_text(_page(rows, about), encoding="utf-8")
    return [folder / "report.json", folder / "report.html"]


_TOTALS = ("vocab_size", "tokens", "bytes_per_token", "fertility", "unknown", "coverage", "flops_per_gigabyte")
_BY_LANGUAGE = ("bytes_per_token", "fertility", "parity", "unknown")


def _page(rows: list[Measurement], about: dict[str, Any]) -> str:
    """The report as one HTML page."""
    languages = rows[0]["languages"]
    return page.render(
        "tokenizer_report.html.jinja",
        "Tokenizer report",
        first=rows[0],
        tokenizers=rows,
        languages=languages,
        about=about,
        columns=COLUMNS,
        warn_parity=WARN_PARITY,
        totals=list(_TOTALS),
        total_rows=[[row["name"], *(_formatted(row[key]) for key in _TOTALS)] for row in rows],
        language_rows={
            key: [[row["name"], *(_formatted(row["languages"][language][key]) for language in languages)] for row in rows]
            for key in _BY_LANGUAGE
        },
        size_rows=[[language, row["bytes"], row["words"]] for language, row in languages.items()],
    )


def _formatted(value: Any) -> str:
    """Return a metric as text."""
    if isinstance(value, float):
        return f"{value:.3g}" if value >= 1e6 else f"{value:.3f}"
    return page.cell(value)
