"""The keys of config.json that the code of a Hugging Face class reads, from a table: every other key has no effect.

`stock_keys.json` is made from the source of the release of transformers that it names, by `python -m tools.audit.stock_keys`.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("stock_keys.json")
#: Keys about the file or its tokenizer, which no release of any class reads.
INERT = frozenset(("_name_or_path", "tokenizer_class", "task_specific_params", "unsloth_fixed", "unsloth_version"))


@dataclass(frozen=True)
class StockKeys:
    """Keys that matter to a Hugging Face class.

    Attributes:
        release: the release of transformers.
        reads: keys that its code reads.
        defaulted: those of them that have a default in the code other than None, so that null is not the same as absence.
        aliases: further name of a key -> the key.
    """

    release: str
    reads: frozenset[str]
    defaulted: frozenset[str]
    aliases: dict[str, str]

    def covers(self, release: object) -> bool:
        """Whether a file written by that release of transformers has no key that only newer code reads."""
        return not isinstance(release, str) or _release(release) <= _release(self.release)


@functools.cache
def keys_of(architecture: str) -> StockKeys | None:
    """Return the keys of a class, None if the table does not have it."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    entry = table["classes"].get(architecture)
    if entry is None:
        return None
    reads = frozenset([*table["common"], *entry["reads"]])
    return StockKeys(table["transformers"], reads, frozenset(table["defaulted"]) & reads, entry["aliases"])


def _release(text: str) -> tuple[int, ...]:
    """Return major and minor number of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
