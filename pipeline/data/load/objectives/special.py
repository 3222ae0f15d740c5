"""Special tokens of the run's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.config.schema import RunConfig
from pipeline.data.load.loader import Source
from pipeline.errors import UserError, Violation
from pipeline.files import digest


class SpecialTokens:
    """The special tokens in the tokenizer.json of `tokenizer.path`.

    Attributes:
        ids: token text -> id.
    """

    def __init__(self, config: RunConfig, samples: Source) -> None:
        """Read them.

        Raises:
            UserError: the folder contains no tokenizer, or not the one that the data was tokenized with.
        """
        self._path = Path(config.tokenizer.path) / "tokenizer.json"
        if not self._path.is_file() or digest(self._path) != samples.corpora[0].totals["tokenizer"]:
            rule = "is not the tokenizer that data.tokens was made with" if self._path.is_file() else "contains no tokenizer.json"
            fix = "point tokenizer.path to the folder that stage=tokenize used"
            raise UserError.of("tokenizer.path", config.tokenizer.path, rule, fix)
        added = json.loads(self._path.read_text(encoding="utf-8"))["added_tokens"]
        self.ids: dict[str, int] = {token["content"]: token["id"] for token in added if token["special"]}

    def find(self, wanted: Mapping[str, tuple[str | None, Sequence[str]]]) -> list[int]:
        """The ids of special tokens that are configured by keys.

        Args:
            wanted: configuration key -> (its value, default tokens of which the first that exists is used if the value is None).

        Raises:
            UserError: naming every key whose token the tokenizer does not have.
        """
        problems, found = [], []
        for key, (named, usual) in wanted.items():
            token = next((token for token in ([named] if named else usual) if token in self.ids), None)
            if token is None:
                rule = f"is no special token of {self._path}" if named else f"{self._path} has none of {', '.join(usual)}"
                have = ", ".join(sorted(self.ids)[:20]) or "it has none"
                train = "train a tokenizer that has it (tokenizer=bert, tokenizer=roberta, tokenizer.special_tokens)"
                fix = f"name one of its special tokens ({have}), or {train}"
                problems.append(Violation(key, named, rule, fix))
            else:
                found.append(self.ids[token])
        if problems:
            raise UserError(problems)
        return found
