"""Rules of the group tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.common.errors import Violation
from pipeline.config.data import TokenizerConfig


def violations(wanted: TokenizerConfig) -> Iterator[Violation]:
    """Yield the violated limits of each kind of tokenizer."""
    for name, tokens in (("end_of_document", [wanted.end_of_document]), ("special_tokens", wanted.special_tokens)):
        if "" in tokens:
            yield Violation(f"tokenizer.{name}", tokens, "contains an empty token", "name it, for example <|endoftext|>, or leave it out")
    key = "tokenizer.vocab_sizes" if wanted.vocab_sizes else "tokenizer.vocab_size"
    runs = 45 if wanted.whitespace == "runs" else 0
    least = {"bpe": 257, "unigram": 512, "wordpiece": 512}[wanted.kind] + len(wanted.special_tokens) + runs
    for size in wanted.vocab_sizes or [wanted.vocab_size]:
        if size < least:
            yield Violation(
                key, size, f"leaves nothing to learn: {wanted.kind} with these settings needs at least {least}", f"choose {least} or more"
            )
    if len(set(wanted.vocab_sizes)) < len(wanted.vocab_sizes):
        yield Violation(key, wanted.vocab_sizes, "contains a size twice", "list each size once")
    if wanted.split != "gpt2" and wanted.kind != "bpe":
        yield Violation(
            "tokenizer.split",
            wanted.split,
            f"applies to bpe only; {wanted.kind} has its own pre-tokenization",
            "leave it out, or train bpe",
        )
    if wanted.digits == "groups_of_three" and wanted.kind == "unigram":
        yield Violation("tokenizer.digits", wanted.digits, "is not supported by SentencePiece's Unigram", "use single, or train bpe")
    if wanted.whitespace == "runs" and wanted.kind == "wordpiece":
        yield Violation(
            "tokenizer.whitespace", "runs", "is not supported by wordpiece, which drops whitespace", "leave it out, or train bpe or unigram"
        )
