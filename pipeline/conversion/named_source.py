"""Finds out by which names a state dict has the weights of a model: those of its Hugging Face class, of torchtitan, or ours."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from pipeline.common.errors import UserError
from pipeline.conversion import foreign_names
from pipeline.conversion.foreign_weights import ForeignWeights, NamedTensors, Source, places
from pipeline.conversion.huggingface_import import ImportedWeights
from pipeline.models import registry
from pipeline.models.config import ModelConfig
from pipeline.models.huggingface_mapping import HuggingFaceMapping

log = logging.getLogger("pipeline")

#: First parts of the names of state that is not the model's.
_OTHER_STATE = ("optimizer.", "optim.", "lr_scheduler", "dataloader", "train_state", "rng", "step", "iteration")


class Prefixed(Source):
    """The tensors of a source whose names begin with a prefix, without it.

    Attributes:
        left: names of the other tensors.
    """

    def __init__(self, source: Source, prefix: str) -> None:
        self.path: Path = source.path
        self._source, self._prefix = source, prefix
        names = source.names()
        self._names = [name for name in names if name.startswith(prefix) and not name.startswith(_OTHER_STATE)]
        self.left = sorted(set(names) - set(self._names))

    def names(self) -> list[str]:
        """Names without the prefix."""
        return [name.removeprefix(self._prefix) for name in self._names]

    def origin(self, name: str) -> str:
        """Where a tensor is stored."""
        return self._source.origin(self._prefix + name)

    def meta(self, name: str) -> Sequence[Tensor]:
        """Shapes and dtypes of the shards of a tensor."""
        return self._source.meta(self._prefix + name)

    def shards(self, name: str) -> Sequence[Tensor]:
        """The shards of a tensor."""
        return self._source.shards(self._prefix + name)


def open_weights(
    source: Source, config: ModelConfig, model_origin: str, fix: str
) -> tuple[ImportedWeights | ForeignWeights, NamedTensors | None]:
    """Return the weights of a model in a state dict, and its tensors if it has the names of the stock class. Call `check` of the weights.

    Args:
        source: the tensors of the state dict, with those of the optimizer and under any prefix (`model.`, `module.`).
        model_origin: where the configuration is from, for messages.
        fix: advice for tensors that do not match it.

    Raises:
        UserError: the names are not of any of these.
    """
    shapes = registry.weight_shapes(config)
    ours = foreign_names.ours(list(shapes))
    titan = [place.theirs for place in places(foreign_names.TORCHTITAN, config) if place.name in shapes]
    expected = {"Hugging Face": _stock_names(config), "torchtitan": titan, ours.tool: list(shapes)}
    counts = Counter({(tool, prefix): count for tool, names in expected.items() for prefix, count in _prefixes(source, names).items()})
    (tool, prefix), count = next(iter(counts.most_common(1)), (("", ""), 0))
    if 2 * count < min(len(expected.get(tool, [])), len(source.names())) or not count:  # single names, such as norm.weight, are common
        some = ", ".join(source.names()[:3]) or "no tensors"
        wanted = ", ".join(f"{names[0]} ({tool})" for tool, names in expected.items() if names)
        rule = f"has {some}, ...; the model ({model_origin}) has {wanted}"
        raise UserError.of("stage.input", source.path, rule, fix)
    twins = sorted(other for (name, other), number in counts.items() if name == tool and number == count)
    if len(twins) > 1:  # which of them is the model that was trained is not known
        some = " and ".join(f"{other}*" for other in twins[:3])
        rule = f"has {len(twins)} models with these weights: {some}"
        raise UserError.of("stage.input", source.path, rule, "save the one to import in a folder of its own")
    chosen = Prefixed(source, prefix)
    if chosen.left:
        log.info("convert: %d tensors are not imported, which are not the model's: %s, ...", len(chosen.left), ", ".join(chosen.left[:3]))
    if tool == "Hugging Face":
        stock = NamedTensors(source, _in_class(chosen, prefix, registry.mapping_of(config)))
        return ImportedWeights(stock, config, fix), stock
    log.info("convert: the tensors have the names of %s", tool)
    return ForeignWeights(chosen, foreign_names.TORCHTITAN if tool == "torchtitan" else ours, config, fix), None


def _in_class(source: Source, prefix: str, mapping: HuggingFaceMapping) -> dict[str, str]:
    """Return the name of each tensor in the class of a mapping -> its name with the prefix.

    Raises:
        UserError: two tensors have the same name in the class.
    """
    stored: dict[str, str] = {}
    renamed = foreign_names.Naming(mapping.architecture, (), renamed=mapping.renamed)
    for name in source.names():
        if (current := renamed.current(name)) in stored:
            rule = f"contains {current} twice: as {stored[current]} and as {name}"
            raise UserError.of("stage.input", source.path, rule, "remove one of them")
        stored[current] = name
    return {current: prefix + name for current, name in stored.items()}


def _prefixes(source: Source, expected: list[str]) -> Counter[str]:
    """Count, for each prefix, the names that are an expected one after it."""
    known, counts = set(expected), Counter[str]()
    for name in source.names():
        parts = name.split(".")
        for start in range(len(parts)):
            if ".".join(parts[start:]) in known and not name.startswith(_OTHER_STATE):
                counts["".join(f"{part}." for part in parts[:start])] += 1
    return counts


def _stock_names(config: ModelConfig) -> list[str]:
    """Return the names of the Hugging Face class, none if the model has no such class."""
    try:
        return [entry.hf_name for entry in registry.stock_tensors(config)[0]]
    except UserError:
        return []
