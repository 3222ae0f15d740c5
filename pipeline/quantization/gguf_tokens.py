"""The tokenizer of a GGUF file: byte-level BPE."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common.errors import UserError
from pipeline.config.run_tokenizer import end_of_document
from pipeline.conversion.original import TokenIds
from pipeline.data.tokenize import chat_template
from pipeline.data.tokenize.tokenizer import load

log = logging.getLogger("pipeline")

#: Start of the regular expression that splits words -> its name in llama.cpp.
_SPLITS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|": "llama-bpe",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|": "qwen2",
}


@dataclass(frozen=True)
class Tokens:
    """A byte-level BPE tokenizer as GGUF stores it.

    Attributes:
        texts: of all ids.
        kinds: gguf.TokenType of each: 1 normal, 3 control, 4 user-defined, 5 unused.
        merges: in order of their rank.
        split: name of the regular expression that splits words.
        ids: name in GGUF of a token with a role -> its id: bos, eos, eot and eom, which all end a text, and padding.
        begins_with_bos: whether bos precedes every text that is tokenized.
        chat_template: None without one.
    """

    texts: list[str]
    kinds: list[int]
    merges: list[str]
    split: str
    ids: dict[str, int]
    begins_with_bos: bool
    chat_template: str | None


def read_tokens(folder: Path, vocab_size: int, named: TokenIds) -> Tokens:
    """Read a tokenizer.

    Args:
        folder: with tokenizer.json.
        vocab_size: rows of the embedding; ids without a token are unused.
        named: the tokens with which texts begin and end.

    Raises:
        UserError: it is not a byte-level BPE tokenizer, or splits words in a way that llama.cpp has no name for.
    """
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    split = _split(content.get("pre_tokenizer") or {})
    if content["model"].get("type") != "BPE" or split is None:
        rule = "is not a byte-level BPE tokenizer that splits words as GPT-2, Llama 3 or Qwen do, which stage.format=gguf requires"
        raise UserError.of("tokenizer.path", folder, rule, "set stage.format=huggingface")
    texts, kinds = [f"[PAD{index}]" for index in range(vocab_size)], [5] * vocab_size
    for text, index in content["model"]["vocab"].items():
        texts[index], kinds[index] = text, 1
    for token in content.get("added_tokens", []):
        texts[token["id"]], kinds[token["id"]] = token["content"], 3 if token["special"] else 4
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    ids = _ends({index: texts[index] for index in named.ends if index < vocab_size}, end_of_document(folder))
    ids |= {role: index for role, index in (("bos", named.bos), ("pad", named.pad)) if index is not None and index < vocab_size}
    begins = "bos" in ids and load(folder).encode("a", add_special_tokens=True).ids[:1] == [ids["bos"]]
    template = chat_template.load(folder)
    return Tokens(texts, kinds, merges, split, ids, begins, None if template is None else template.text)


def _ends(ends: dict[int, str], preferred: str | None) -> dict[str, int]:
    """Return the ids of eos, eot and eom, the tokens of which any ends a text in llama.cpp.

    Args:
        ends: id -> text of each.
        preferred: the text of the one that is eos, if it is among them.
    """
    first = next((index for index, text in ends.items() if text == preferred), next(iter(ends), None))
    ids = {} if first is None else {"eos": first}
    others = sorted((index for index in ends if index != first), key=lambda index: "eom" in ends[index])
    roles = ["eom"] if len(others) == 1 and "eom" in ends[others[0]] else ["eot", "eom"]
    ids |= dict(zip(roles, others, strict=False))
    if left := [ends[index] for index in others[2:]]:
        log.warning("convert: a GGUF file names three tokens that end a text; left out: %s", ", ".join(left))
    return ids


def _split(pre_tokenizer: dict[str, Any]) -> str | None:
    """The name of the way in which words are split; None without a name."""
    if pre_tokenizer.get("type") == "ByteLevel":
        return "gpt-2" if pre_tokenizer.get("use_regex", True) else None
    parts = pre_tokenizer.get("pretokenizers", [])
    if [part["type"] for part in parts] != ["Split", "ByteLevel"]:
        return None
    pattern = parts[0]["pattern"].get("Regex", "")
    return next((name for start, name in _SPLITS.items() if pattern.startswith(start)), None)
