"""Writes pipeline/models/stock_keys.json: the keys of config.json that the Hugging Face class of every mapping reads.

transformers sets every key of config.json as an attribute of the configuration; a key has an effect only if code reads that attribute.
The code of a class is what its definition leads to: base classes, modules, functions, and the configuration class. It is parsed, not
imported. Reads are over-approximated: every attribute of something named `config` counts, whether or not a forward pass executes it.

Run it after a family is added, or with another release of transformers installed: python -m tools.audit.stock_keys
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.models import registry
from pipeline.models.stock_keys import TABLE, StockKeys

#: Files outside transformers/models whose definitions are followed; others do not read keys of the architecture.
FOLLOWED = (
    *("activations.py", "cache_utils.py", "configuration_utils.py", "masking_utils.py", "modeling_layers.py", "modeling_rope_utils.py"),
    *("modeling_utils.py", "quantizers/auto.py"),
)
#: Of the base classes, the methods that build a configuration and a model; others save, resize, shard or compile one.
BASE_CLASSES = ("PreTrainedConfig", "PreTrainedModel")
BUILDING = ("__init__", "__post_init__", "post_init", "from_pretrained", "get_text_config", "get_expanded_tied_weights_keys", "tie_weights")


def table() -> dict[str, Any]:
    """Return the content of the file, for the installed transformers."""
    source = installed_source()
    keys_by_class: dict[str, StockKeys] = {}
    for mapping in (mapping for family in registry.FAMILIES.values() for mapping in family.huggingface):
        keys = source.keys(mapping.architecture, mapping.model_type)
        assert keys is not None, f"transformers {source.release} has no {mapping.architecture} with model_type={mapping.model_type}"
        keys_by_class[mapping.architecture] = keys
    common = frozenset.intersection(*(keys.reads for keys in keys_by_class.values()))
    return {
        "transformers": source.release,
        "common": sorted(common),
        "defaulted": sorted(frozenset().union(*(keys.defaulted for keys in keys_by_class.values()))),
        "classes": {name: {"reads": sorted(keys.reads - common), "aliases": keys.aliases} for name, keys in sorted(keys_by_class.items())},
    }


def main() -> None:
    content = table()
    classes = ",\n".join(f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in content.pop("classes").items())
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    TABLE.write_text("{\n" + ",\n".join(lines) + ',\n  "classes": {\n' + classes + "\n  }\n}\n", encoding="utf-8")
    print(f"wrote {TABLE}")


def installed_source() -> TransformersSource:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None, "transformers is not installed"
    assert spec.origin is not None, "transformers has no source"
    return TransformersSource(Path(spec.origin).parent, importlib.metadata.version("transformers"))


@dataclass
class _Module:
    """The top-level definitions of a file, and where its imported names are defined."""

    path: Path
    definitions: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, tuple[Path, str]] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.definitions or name in self.imports


@dataclass(frozen=True)
class _Facts:
    """What a definition reads, and the definitions (file, name) that it uses."""

    reads: frozenset[str]
    defaulted: frozenset[str]
    uses: frozenset[tuple[Path, str]]


class TransformersSource:
    """The source of an installed transformers package."""

    def __init__(self, root: Path, release: str) -> None:
        """Files are parsed when they are reached. `root` is the folder of the package."""
        self.root, self.release = root, release

    @functools.cached_property
    def _texts(self) -> dict[Path, str]:
        return {path: path.read_text(encoding="utf-8") for path in sorted((self.root / "models").glob("*/modeling_*.py"))}

    def keys(self, architecture: str, model_type: str) -> StockKeys | None:
        """Return the keys that a class reads, or None if the package has no such class or configuration."""
        models = [path for path, text in self._texts.items() if f"\nclass {architecture}(" in text]
        pattern = re.compile(rf"""^    model_type(: str)? = ["']{re.escape(model_type)}["']$""", re.MULTILINE)
        files = [file for model in models for file in model.parent.glob("configuration_*.py")]
        configs = [(file, name) for file in files for name in _classes_matching(file, pattern)]
        if not models or not configs:
            return None
        facts = [self._facts(file, name) for file, name in self._reachable([(models[0], architecture), *configs])]
        aliases: dict[str, str] = {}
        for file, name in configs:
            for node in self._module(file).definitions[name]:
                aliases |= _aliases(node)
        reads, defaulted = (frozenset().union(*parts) for parts in zip(*((fact.reads, fact.defaulted) for fact in facts), strict=True))
        return StockKeys(self.release, reads, defaulted, aliases)

    def _reachable(self, start: list[tuple[Path, str]]) -> Iterator[tuple[Path, str]]:
        """Yield the definitions (file, name) that `start` leads to, each once."""
        todo, seen = list(start), set(start)
        while todo:
            yield (current := todo.pop())
            new = self._facts(*current).uses - seen
            seen |= new
            todo += sorted(new)

    @functools.cache  # noqa: B019 - a TransformersSource lives as long as its program
    def _facts(self, file: Path, name: str) -> _Facts:
        module = self._module(file)
        nodes = module.definitions.get(name, [])
        names = {inner.id for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        uses = {(file, used) if used in module.definitions else module.imports[used] for used in names if used in module}
        reads = frozenset().union(*(_reads(node) for node in nodes))
        return _Facts(reads, frozenset().union(*(_defaulted(node) for node in nodes)), frozenset(uses))

    @functools.cache  # noqa: B019 - a TransformersSource lives as long as its program
    def _module(self, path: Path) -> _Module:
        module = _Module(path)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                if node.name in BASE_CLASSES:
                    node.body = [item for item in node.body if not isinstance(item, ast.FunctionDef) or item.name in BUILDING]
                module.definitions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        module.definitions.setdefault(target.id, []).append(node)
            elif isinstance(node, ast.ImportFrom) and node.level:
                folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                file = folder.with_suffix(".py")
                if file.is_file() and (self.root / "models" in file.parents or str(file.relative_to(self.root)) in FOLLOWED):
                    module.imports |= {alias.asname or alias.name: (file, alias.name) for alias in node.names}
        return module


def _classes_matching(file: Path, pattern: re.Pattern[str]) -> list[str]:
    """Return the classes of a file whose source the pattern matches."""
    text = file.read_text(encoding="utf-8")
    parts = re.split(r"^class (\w+)", text, flags=re.MULTILINE)[1:]
    return [name for name, body in zip(parts[::2], parts[1::2], strict=True) if pattern.search(body)]


def _is_config(node: ast.expr) -> bool:
    """Whether an expression is a configuration, judged by its name; within a configuration class, `self` is one."""
    if isinstance(node, ast.Call):
        return _is_config(node.func) if not isinstance(node.func, ast.Attribute) else node.func.attr.endswith("_config")
    if isinstance(node, ast.Subscript):
        return _is_config(node.value)
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.endswith("config")


def _reads(definition: ast.stmt) -> set[str]:
    """Return the names of the attributes of a configuration that a definition reads."""
    owner = isinstance(definition, ast.ClassDef) and any(word in definition.name for word in ("Config", "ConfigMixin"))
    found: set[str] = set()
    for function in [definition, *(node for node in ast.walk(definition) if isinstance(node, ast.FunctionDef))]:
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                if _is_config(node.value) or (owner and isinstance(node.value, ast.Name) and node.value.id == "self"):
                    found.add(node.attr)
            elif isinstance(node, ast.Call):
                found |= _dynamic_reads(node, function, owner)
            elif owner and isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
                found.add(node.left.value)  # "key" in kwargs
    return {name for name in found if name.isidentifier()}


def _dynamic_reads(call: ast.Call, function: ast.AST, owner: bool) -> set[str]:
    """Return the names that getattr(config, name), hasattr(config, name), and kwargs.pop(name) or kwargs.get(name) may read."""
    target = call.func
    if isinstance(target, ast.Name) and target.id in ("getattr", "hasattr") and len(call.args) > 1:
        if not (_is_config(call.args[0]) or owner):
            return set()
        name = call.args[1]
    elif owner and isinstance(target, ast.Attribute) and ast.unparse(target) in ("kwargs.pop", "kwargs.get") and call.args:
        name = call.args[0]
    else:
        return set()
    if isinstance(name, ast.Constant):
        return {name.value} if isinstance(name.value, str) else set()
    # The name is computed: it can be any string of the function.
    return {node.value for node in ast.walk(function) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _aliases(definition: ast.stmt) -> dict[str, str]:
    """Return the attribute_map of a configuration class."""
    if isinstance(definition, ast.ClassDef):
        for node in definition.body:
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["attribute_map"]:
                aliases: dict[str, str] = ast.literal_eval(node.value)
                return aliases
    return {}


def _defaulted(definition: ast.stmt) -> set[str]:
    """Return the names read as getattr(config, name, default) with a default that is not false."""
    calls = [node for node in ast.walk(definition) if isinstance(node, ast.Call) and len(node.args) == 3]
    return {
        call.args[1].value
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "getattr" and _is_config(call.args[0])
        if isinstance(call.args[1], ast.Constant) and isinstance(call.args[1].value, str)
        if isinstance(call.args[2], ast.Constant) and call.args[2].value
    }


if __name__ == "__main__":
    main()
