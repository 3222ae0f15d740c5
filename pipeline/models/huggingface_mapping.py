"""The mapping between a family and a Hugging Face class: a table of weights and a table of config.json keys, for export and import."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.common.errors import UserError
from pipeline.models.config import ModelConfig
from pipeline.models.stock_tensors import BlockTensors, StockTensor, expand, gated_experts, gated_mlp, tensors
from pipeline.models.wrapper import Wrapper

if TYPE_CHECKING:
    from torch import Tensor

Table = tuple[StockTensor | BlockTensors, ...]

__all__ = ["BlockTensors", "HuggingFaceMapping", "KeyGroup", "StockTensor", "gated_experts", "gated_mlp", "positive", "refusal", "tensors"]


def refusal(key: str, value: object, rule: str, fix: str = "import a model without it, or add the feature to the family") -> UserError:
    """Return the error for a key of config.json that cannot be imported."""
    return UserError.of(f"config.json {key}", value, rule, fix)


def positive(key: str, value: object) -> int:
    """Return the value of a key if it is a positive integer.

    Raises:
        UserError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise refusal(key, value, "must be a positive integer", "fix config.json")
    return value


class StoredTensors(Protocol):
    """The tensors of the files of a Hugging Face model, by name."""

    def names(self) -> Iterable[str]:
        """Names of all tensors."""

    def tensor(self, name: str) -> Tensor:
        """Value of a tensor, fp32."""


@dataclass(frozen=True)
class KeyGroup:
    """Keys of config.json that need functions to translate (a dict of rope parameters, a list with an entry per layer).

    Attributes:
        keys: the keys of config.json; `read` validates their values.
        write: our configuration -> these keys and their values.
        read: the content of config.json -> our fields; raises `refusal` for a value that the family does not support.
    """

    keys: tuple[str, ...]
    write: Callable[[Any], dict[str, Any]]
    read: Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class HuggingFaceMapping:
    """The tables of a family and one Hugging Face class. A family with several classes has a mapping for each.

    Attributes:
        architecture: name of the Hugging Face class.
        model_type: model_type of its config.json.
        keys: key of config.json -> field (or property) of our configuration, and the default of the Hugging Face class, or a function that
            computes it from the keys that are not null.
        constants: key of config.json -> the only value that this family supports.
        constant_defaults: those of these keys for which the class has another default.
        table: the tensors of all weights; a function of our configuration if the configuration changes the names.
        implied: field or property of our configuration -> the value that every model of the class has, and that config.json has no key for.
        nested: keys that need functions to translate.
        training_keys: key of config.json -> setting of the group training that it is the value of.
        ignored_keys: further keys that the class reads and that do not affect the logits.
        legacy_architectures: names of the class in earlier releases.
        other_model_types: further values of model_type, of files whose model this class computes.
        copies: Hugging Face weight -> the weight of the table that it always equals; files contain either or both.
        zero_weights: Hugging Face tensors that our model lacks; if files contain them, they must be zero.
        computed_weights: Hugging Face tensors that our model computes -> a function that computes one from our configuration; if files
            contain them, they must equal it.
        from_weights: (our configuration, tensors of the files) -> the configuration, with the fields that only the tensors tell.
        separate_weights: our configuration -> patterns (fnmatch) of tensors that the class does not expect; they are exported to files of
            their own (mtp.safetensors), which the class does not read.
        ignored_weights: patterns (fnmatch) of tensors that files may contain and the class does not use.
        left_over_weights: our configuration -> the same, of tensors that the class uses in other layers.
        mxfp4: whether files may hold stacks of matrices in MXFP4 (conversion/stock_weights.py).
        renamed: (regular expression, replacement) for weights whose names in files differ from those of the class.
        wrappers: classes whose model contains that of this one.
        export_only: whether another family imports this class.
        wrapper: the one of them that the files are of, None if they are of this class; set by `within`.
    """

    architecture: str
    model_type: str
    keys: dict[str, tuple[str, Any]]
    constants: dict[str, Any]
    table: Table | Callable[[Any], Table]
    implied: dict[str, Any] = field(default_factory=dict)
    constant_defaults: dict[str, Any] = field(default_factory=dict)
    nested: tuple[KeyGroup, ...] = ()
    training_keys: dict[str, str] = field(default_factory=dict)
    ignored_keys: tuple[str, ...] = ()
    legacy_architectures: tuple[str, ...] = ()
    other_model_types: tuple[str, ...] = ()
    copies: dict[str, str] = field(default_factory=dict)
    zero_weights: tuple[str, ...] = ()
    computed_weights: dict[str, Callable[[Any], Tensor]] = field(default_factory=dict)
    from_weights: Callable[[Any, StoredTensors], Any] = lambda config, _: config
    separate_weights: Callable[[Any], tuple[str, ...]] = lambda _: ()
    ignored_weights: tuple[str, ...] = ()
    left_over_weights: Callable[[Any], tuple[str, ...]] = lambda _: ()
    mxfp4: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    wrappers: tuple[Wrapper, ...] = ()
    export_only: bool = False
    wrapper: Wrapper | None = None

    def config_json(self, config: ModelConfig) -> dict[str, Any]:
        """Return the content of config.json without the keys that the export adds (token ids, dtype)."""
        content = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **self.constants,
            **{key: getattr(config, name) for key, (name, _) in self.keys.items()},
        }
        for group in self.nested:
            content.update(group.write(config))
        return content

    def within(self, wrapper: Wrapper) -> HuggingFaceMapping:
        """Return the mapping for files of a class that contains this one."""
        return replace(self, wrapper=wrapper, renamed=(*wrapper.renamed, *self.renamed))

    def language_model(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return the content of config.json as this class has it, if the files are of a wrapper; else, and if it is that already, as it is.

        Raises:
            UserError: the wrapper has a key that may change what the language model computes.
        """
        if self.wrapper is None or content.get("model_type") == self.model_type:
            return content
        violations = [
            violation
            for key, value, rule in self.wrapper.problems(content, self.model_type)
            for violation in refusal(key, value, rule).violations
        ]
        UserError.raise_for(violations)
        return self.wrapper.language_model(content) | {"architectures": [self.architecture], "model_type": self.model_type}

    def training_settings(self, content: dict[str, Any]) -> dict[str, float]:
        """Return the settings of the group training that config.json has.

        Raises:
            UserError: a value is not a number of at least 0.
        """
        content = self.language_model(content)
        settings = {name: (key, content[key]) for key, name in self.training_keys.items() if content.get(key) is not None}
        for key, value in settings.values():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise refusal(key, value, "must be a number of at least 0", "correct config.json")
        return {name: float(value) for name, (_, value) in settings.items()}

    def mismatches(self, config: ModelConfig) -> dict[str, Any]:
        """Return the fields of a configuration that this class does not support: field -> the only value it supports."""
        return {name: value for name, value in self.implied.items() if getattr(config, name) != value}

    def tensors(self, config: ModelConfig) -> Iterator[StockTensor]:
        """Yield every tensor, including those of tied weights."""
        return expand(self.table(config) if callable(self.table) else self.table, config)
