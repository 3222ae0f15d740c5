"""The tokenizer of a GGUF file: byte-level BPE."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pipeline.common.errors import UserError
from pipeline.config.run_tokenizer import end_of_document
from pipeline.conversion.original import TokenIds
from pipeline.data.tokenize import chat_template
from pipeline.data.tokenize.tokenizer import TextEncoder
from pipeline.data.tokenize.tokenizer_training import split_pattern

log = logging.getLogger("pipeline")

#: Regular expression that splits words, and whether a word of the vocabulary is a token whatever its merges (ignore_merges) -> the name of
#: both in llama.cpp.
_SPLITS = {
    (split_pattern("llama3", "keep"), True): "llama-bpe",
    (split_pattern("llama3", "keep"), False): "dbrx",
    (split_pattern("llama3", "single"), False): "qwen2",
    ("", False): "gpt-2",
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
        begins_with_bos: whether bos precedes every text that is tokenized; ends_with_eos: whether eos follows it.
        chat_template: None without one.
    """

    texts: list[str]
    kinds: list[int]
    merges: list[str]
    split: str
    ids: dict[str, int]
    begins_with_bos: bool
    ends_with_eos: bool
    chat_template: str | None


def read_tokens(encoder: TextEncoder, vocab_size: int, named: TokenIds) -> Tokens:
    """Read a tokenizer.

    Args:
        vocab_size: rows of the embedding; ids without a token are unused.
        named: the tokens with which texts begin and end.

    Raises:
        UserError: it is not a byte-level BPE tokenizer, or does something that llama.cpp does not do.
    """
    folder = encoder.path.parent
    content = json.loads(encoder.path.read_text(encoding="utf-8"))
    split = _split(content)
    if split is None:
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
    before, after = encoder.around
    if before not in ([], [ids.get("bos")]) or after not in ([], [ids.get("eos")]):
        _refuse(folder, f"adds {[texts[index] for index in (*before, *after)]} to a text (post_processor)")
    if normalizer := content.get("normalizer"):
        if normalizer.get("type") != "NFC":
            _refuse(folder, f"changes text before it splits it (normalizer {normalizer.get('type')})")
        log.warning("convert: llama.cpp does not compose characters (NFC), as the tokenizer does: decomposed text gets other tokens there")
    for token in content.get("added_tokens", []):
        if flags := [name for name in ("lstrip", "rstrip", "single_word") if token.get(name)]:
            _refuse(folder, f"has the token {token['content']} with {' and '.join(flags)}")
    template = chat_template.load(folder)
    return Tokens(texts, kinds, merges, split, ids, bool(before), bool(after), None if template is None else template.text)


def _refuse(folder: Path, behavior: str) -> NoReturn:
    """Refuse a tokenizer that does what llama.cpp does not do for byte-level BPE."""
    raise UserError.of("tokenizer.path", folder, f"{behavior}, which llama.cpp does not do", "set stage.format=huggingface")


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


def _split(content: dict[str, Any]) -> str | None:
    """The name of the way in which words are split, from tokenizer.json; None without a name."""
    model, pre_tokenizer = content["model"], content.get("pre_tokenizer") or {}
    options = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model.get("type") != "BPE" or any(model.get(name) for name in options):
        return None
    *splits, bytes_of = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if bytes_of.get("type") != "ByteLevel" or bytes_of.get("add_prefix_space", True) or bytes_of.get("use_regex", True) == bool(splits):
        return None
    isolated = [split for split in splits if split.get("type") == "Split" and split["behavior"] == "Isolated" and not split["invert"]]
    if len(isolated) != len(splits) or len(splits) > 1:
        return None
    pattern = splits[0]["pattern"].get("Regex") if splits else ""
    return _SPLITS.get((pattern, bool(model.get("ignore_merges"))))
