"""Special tokens of the run's tokenizer: sentinels, masks and the like, which data settings name by their text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.common.errors import UserError, Violation
from pipeline.config.data import MaskingConfig
from pipeline.data.tokenize.tokenizer import check_same

#: Usual tokens before a text, after each text, and in place of a masked token.
FIRST, BETWEEN, MASK = ("[CLS]", "<s>"), ("[SEP]", "</s>"), ("[MASK]", "<mask>")


class SpecialTokens:
    """The added tokens in a tokenizer.json; `ids` are those of the special ones, which never are text, by their text."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        """Read a tokenizer.

        Args:
            fingerprint: checksum of the tokenizer.json that the data was tokenized with.

        Raises:
            UserError: the folder contains no tokenizer, or another one.
        """
        self._path = folder / "tokenizer.json"
        fix = "point tokenizer.path to the folder that stage=tokenize used"
        if not self._path.is_file():
            raise UserError.of("tokenizer.path", folder, "contains no tokenizer.json", fix)
        check_same(folder, fingerprint, "data.tokens", fix)
        added = json.loads(self._path.read_text(encoding="utf-8"))["added_tokens"]
        self.ids: dict[str, int] = {token["content"]: token["id"] for token in added if token["special"]}
        self._added: dict[str, int] = {token["content"]: token["id"] for token in added}

    def find(self, wanted: Mapping[str, tuple[str | None, Sequence[str]]]) -> list[int]:
        """The ids of added tokens that are configured by keys.

        Args:
            wanted: configuration key -> (its value, default tokens of which the first that exists is used if the value is None).

        Raises:
            UserError: naming every key whose token the tokenizer does not have.
        """
        problems, ids = [], []
        for key, (named, usual) in wanted.items():
            token = next((token for token in ([named] if named else usual) if token in self._added), None)
            if token is None:
                rule = f"is not a special token of {self._path}" if named else f"{self._path} has none of {', '.join(usual)}"
                have = ", ".join(sorted(self._added)[:20]) or "it has none"
                train = "train a tokenizer that has it (tokenizer=bert, tokenizer=roberta, tokenizer.special_tokens)"
                fix = f"name one of its special tokens ({have}), or {train}"
                problems.append(Violation(key, named, rule, fix))
            else:
                ids.append(self._added[token])
        UserError.raise_for(problems)
        return ids


def enclosing_tokens(masking: MaskingConfig) -> dict[str, tuple[str | None, Sequence[str]]]:
    """The tokens before and after texts, for SpecialTokens.find."""
    return {"data.masking.first": (masking.first, FIRST), "data.masking.between": (masking.between, BETWEEN)}
