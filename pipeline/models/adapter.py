"""A family's correspondence with a stock Hugging Face class, as two tables, of weights and of config.json's keys, read both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import UserError
from pipeline.models.config import ModelConfig
from pipeline.models.rows import Blocks, Row, rows, written_out

Table = tuple[Row | Blocks, ...]

__all__ = ["Adapter", "Blocks", "Nested", "Row", "refusal", "rows"]


def refusal(key: str, value: object, rule: str, fix: str = "import a model without it, or add the feature to the family") -> UserError:
    """What is said of a key of a config.json that cannot be imported."""
    return UserError.of(f"config.json {key}", value, rule, fix)


@dataclass(frozen=True)
class Nested:
    """Keys of config.json that a table of names cannot translate (a dict of rope parameters, a list with an entry a layer).

    Attributes:
        keys: theirs; `read` answers for their values.
        write: our configuration -> their keys and values.
        read: the content of config.json -> our fields; raises `refusal` for a value that the family does not have.
    """

    keys: tuple[str, ...]
    write: Callable[[Any], dict[str, Any]]
    read: Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Adapter:
    """The tables of a family and one stock class. A family with several classes has an adapter for each.

    Attributes:
        architecture: the stock class.
        model_type: its name in config.json.
        fields: key of config.json -> field (or property) of our configuration.
        constants: key of config.json -> what is true of every model of this family.
        table: every weight, blocks as `{i}`; a function of our configuration where its choices change names.
        implied: field of our configuration -> the value that every model of the class has, for which config.json has no key.
        defaults: key of config.json -> what the stock class takes where the key is missing, or a function of the content that tells;
            a constant without one may be missing, a field may not.
        nested: keys that need more than a table.
        harmless: further keys that change no logit.
        older: names that the class had in former releases.
        copies: stock weight -> the one of the table that it always equals; files have both or either.
        stand_ins: stock weight -> the one that files hold in its place when they do not have it, since they saved two equal ones once.
        zeros: stock tensors that ours has none of; files may have them, all zero.
        unused: patterns (fnmatch) of stock tensors that files may have and the class does not compute with.
        renamed: (regular expression, replacement) for weights whose names in files differ from the class's.
    """

    architecture: str
    model_type: str
    fields: dict[str, str]
    constants: dict[str, Any]
    table: Table | Callable[[Any], Table]
    implied: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    nested: tuple[Nested, ...] = ()
    harmless: tuple[str, ...] = ()
    older: tuple[str, ...] = ()
    copies: dict[str, str] = field(default_factory=dict)
    stand_ins: dict[str, str] = field(default_factory=dict)
    zeros: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def config_json(self, config: ModelConfig) -> dict[str, Any]:
        """The content of config.json, but for what the tokenizer and the export say (token ids, number format)."""
        content = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **self.constants,
            **{theirs: getattr(config, ours) for theirs, ours in self.fields.items()},
        }
        for group in self.nested:
            content.update(group.write(config))
        return content

    def differences(self, config: ModelConfig) -> dict[str, Any]:
        """The fields in which a configuration is none of this class's: field -> the only value the class has."""
        return {ours: value for ours, value in self.implied.items() if getattr(config, ours) != value}

    def rows(self, config: ModelConfig) -> Iterator[Row]:
        """Every row, also those of weights that are other weights' copies in this configuration."""
        return written_out(self.table(config) if callable(self.table) else self.table, config)
