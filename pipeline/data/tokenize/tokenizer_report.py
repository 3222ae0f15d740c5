"""Tokenizer metrics on held-out text: compression by language, vocabulary coverage, and the FLOPs to train on the text."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pipeline.common import page
from pipeline.data.tokenize.tokenizer import encode

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
        name: of the tokenizer in the report.
        tokenizer: from data.tokenize.tokenizer.load.
        texts: language -> documents.
        flops_per_token: vocabulary size -> FLOPs to train on one token.

    Returns:
        {"name", "vocab_size", "tokens", ..., "languages": {language: {...}}}; COLUMNS defines the metrics.
    """
    unknown = _unknown(tokenizer)
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
            int(np.count_nonzero(ids == unknown)) if unknown is not None else 0,
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


def _unknown(tokenizer: Tokenizer) -> int | None:
    """The id of the unknown token; None if the tokenizer has none."""
    model = json.loads(tokenizer.to_str())["model"]
    return tokenizer.token_to_id(model["unk_token"]) if model.get("unk_token") else model.get("unk_id")


def text_table(rows: list[Measurement]) -> str:
    """The rows as a text table for the log, with one line per tokenizer."""
    languages = list(rows[0]["languages"])
    width = max(len("tokenizer"), *(len(row["name"]) for row in rows))
    head = f"{'tokenizer':<{width}} {'entries':>9} {'bytes/token':>11} {'fertility':>9} {'coverage':>8} {'FLOP/GB':>8}"
    lines = [head + "".join(f" {f'parity {language}':>{_width(language)}}" for language in languages)]
    for row in rows:
        line = f"{row['name']:<{width}} {row['vocab_size']:>9,} {row['bytes_per_token']:>11.3f} {row['fertility']:>9.3f}"
        line += f" {row['coverage']:>8.1%} {row['flops_per_gigabyte']:>8.2e}"
        lines.append(line + "".join(f" {row['languages'][language]['parity']:>{_width(language)}.3f}" for language in languages))
    return "\n".join(lines)


def _width(language: str) -> int:
    return len(f"parity {language}")


def write(folder: Path, rows: list[Measurement], about: dict[str, Any]) -> list[Path]:
    """Write report.json and report.html.

    Args:
        folder: output folder.
        rows: results of measure(), that of the folder's tokenizer first.
        about: additional properties to include in the report.

    Returns:
        The paths of both files.
    """
    content = {**about, "columns": COLUMNS, "tokenizers": rows}
    (folder / "report.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "report.html").write_text(_page(rows, about), encoding="utf-8")
    return [folder / "report.json", folder / "report.html"]


_TOTALS = ("vocab_size", "tokens", "bytes_per_token", "fertility", "unknown", "coverage", "flops_per_gigabyte")
_BY_LANGUAGE = ("bytes_per_token", "fertility", "parity", "unknown")


def _page(rows: list[Measurement], about: dict[str, Any]) -> str:
    """The report as one HTML page."""
    languages = rows[0]["languages"]
    parts = [*_verdict(rows[0], about), "<h2>Samples</h2>", "<p class=soft>How the tokenizers divide held-out text. "]
    parts += ["A number counts tokens that are parts of one character.</p>"]
    parts += [_samples(language, rows) for language in languages]
    parts += ["<h2>All text</h2>", _table(["tokenizer", *_TOTALS], [[row["name"], *(row[key] for key in _TOTALS)] for row in rows])]
    for key in _BY_LANGUAGE:
        values = [[row["name"], *(row["languages"][language][key] for language in languages)] for row in rows]
        parts += [f"<h2>{html.escape(key)}</h2><p>{html.escape(COLUMNS[key])}.</p>", _table(["tokenizer", *languages], values)]
    sizes = [[language, row["bytes"], row["words"]] for language, row in languages.items()]
    parts += ["<h2>The text</h2>", _table(["language", "bytes", "words"], sizes)]
    notes = "".join(f"<li>{html.escape(key)}: {html.escape(meaning)}</li>" for key, meaning in COLUMNS.items())
    return page.whole_page("Tokenizer report", [*parts, f"<h2>Columns</h2><ul>{notes}</ul>"])


def _verdict(row: Measurement, about: dict[str, Any]) -> Iterator[str]:
    """The size and the compression of the folder's tokenizer, the settings, and warnings."""
    name, languages = html.escape(row["name"]), row["languages"]
    yield f"<div class=verdict><b>{name}: {row['bytes_per_token']:.2f} bytes per token, {row['vocab_size']:,} entries</b>"
    yield f"<p>{row['fertility']:.2f} tokens per word on {row['bytes']:,} bytes of held-out text in {len(languages)} languages; "
    yield f"{100 * row['coverage']:.1f} % of the entries occur in it.</p>{page.settings(about)}</div>"
    for language, part in languages.items():
        if part["parity"] > WARN_PARITY:
            what = f"{html.escape(language)} takes {part['parity']:.1f} times as many tokens per byte as the best language"
            yield f"<div class=warning>{what}: see tokenizer.balance, or add text of this language.</div>"
        if part["unknown"]:
            what = f"{part['unknown']:,} of {part['tokens']:,} tokens of {html.escape(language)} are unknown: their text is lost"
            yield f"<div class=warning>{what}.</div>"


def _samples(language: str, rows: list[Measurement]) -> str:
    """The beginning of a text of a language, as every tokenizer divides it."""
    shown = []
    for row in rows:
        pieces = row["languages"][language]["sample"]
        spans = (f"<span class=token>{html.escape(piece)}{f'<sub>{count}</sub>' if count > 1 else ''}</span>" for piece, count in pieces)
        count = sum(count for _, count in pieces)
        shown.append(f"<div class=soft>{html.escape(row['name'])}: {count} tokens</div><pre>{''.join(spans)}</pre>")
    return f"<p><b>{html.escape(language)}</b></p>{''.join(shown)}"


def _table(head: list[str], rows: list[list[Any]]) -> str:
    return page.table(head, [[_formatted(value) for value in row] for row in rows])


def _formatted(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if value >= 1e6 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
