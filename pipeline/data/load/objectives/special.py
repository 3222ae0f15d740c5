"""Special tokens of the run's tokenizer: those that an objective writes, and those that stand for no text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.config.schema import RunConfig
from pipeline.data.load.loader import Source
from pipeline.errors import UserError, Violation
from pipeline.files import digest

#: What data.decoder_start is when it names nothing: the first of these that the tokenizer has.
DECODER_STARTS = ("<pad>", "[PAD]")


class SpecialTokens:
    """What the tokenizer.json of `tokenizer.path` says of special tokens.

    Attributes:
        ids: of each, by its text.
    """

    def __init__(self, config: RunConfig, samples: Source) -> None:
        """Read them.

        Raises:
            UserError: the folder holds no tokenizer, or another one than the token shards were made with.
        """
        self._path = Path(config.tokenizer.path) / "tokenizer.json"
        if not self._path.is_file() or digest(self._path) != samples.corpora[0].totals["tokenizer"]:
            rule = "is not the tokenizer that data.tokens was made with" if self._path.is_file() else "holds no tokenizer.json"
            fix = "point tokenizer.path to the folder that stage=tokenize used"
            raise UserError.of("tokenizer.path", config.tokenizer.path, rule, fix)
        added = json.loads(self._path.read_text(encoding="utf-8"))["added_tokens"]
        self.ids: dict[str, int] = {token["content"]: token["id"] for token in added if token["special"]}

    def find(self, wanted: Mapping[str, tuple[str | None, Sequence[str]]]) -> list[int]:
        """The ids of tokens with a task.

        Args:
            wanted: configuration key -> (the token that it names, the usual ones of which the first is taken where it names none).

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


def decoder_start(config: RunConfig, special: SpecialTokens) -> int:
    """The id of the token that a decoder reads first, which also stands where a decoder has nothing to read.

    Raises:
        UserError: as SpecialTokens.find.
    """
    return special.find({"data.decoder_start": (config.data.decoder_start, DECODER_STARTS)})[0]
