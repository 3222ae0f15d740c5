"""Random changes of saved stock models: an import computes the logits of the stock class, or is refused with a message.

A case changes some keys of config.json, or the names of tensors, of a small stock model. The changes are drawn from the keys that the
stock class reads, its further names of keys, keys that nothing reads, nulls, and values of a wrong type.
"""

from __future__ import annotations

import json
import random
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from pipeline.common.errors import UserError
from pipeline.conversion.huggingface_import import ImportedWeights, read_config
from pipeline.conversion.stock_weights import StockWeights
from pipeline.models import config_json, registry, stock_keys
from pipeline.models.huggingface_mapping import HuggingFaceMapping
from tools.audit.family_cases import FAMILIES
from tools.audit.small_models import FIRST_TOKEN, PADDING, SEQUENCE, configuration, difference, randomize

TOLERANCE = 1e-3
LARGEST = 2_000_000  # parameters of a stock model that is built; a removed size means the large default of the class
ACTIVATIONS = ("relu", "gelu", "gelu_new", "silu", "swish", "quick_gelu", "gelu_pytorch_tanh", "tanh")
DAMAGED: tuple[object, ...] = (0, -1, "7", "", [3], [], {"a": 1}, {}, 1.5, True, False, None, "many", float("nan"))
ROPE = (
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 4},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 13, "truncate": False},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 16},
    {"rope_type": "linear", "factor": "2"},
    {"rope_type": "linear", "factor": [2]},
    {"rope_type": 3},
    {"rope_theta": 100.0},
    {"rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.5},
    {"full_attention": {"rope_type": "default", "rope_theta": 100.0}},
)


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        kind: equal, refused, "stock refuses", "too large", "too small", or, for failures, "other logits", "traceback", "needless refusal".
        note: the changes, and what the failure prints.
    """

    kind: str
    note: str

    @property
    def failed(self) -> bool:
        """Whether the import is wrong."""
        return self.kind in ("other logits", "traceback", "needless refusal")


def change(content: dict[str, Any], mapping: HuggingFaceMapping, draw: random.Random) -> bool:
    """Change config.json at random; returns whether the stock class computes the same as before."""
    keys = stock_keys.keys_of(mapping.architecture)
    assert keys is not None, f"no stock keys of {mapping.architecture}"
    aliases = {alias: key for alias, key in keys.aliases.items() if isinstance(content.get(key), int) and alias not in content}
    kind = draw.choice(("value", "value", "damaged", "removed", "read", "read", "alias", "alias", "unread", "rope"))
    if kind == "value":
        key = draw.choice(sorted(content))
        content[key] = _other(content[key], draw)
    elif kind == "damaged":
        content[draw.choice(sorted(content))] = draw.choice(DAMAGED)
    elif kind == "removed":
        del content[draw.choice(sorted(content))]
    elif kind == "read":
        content[draw.choice(sorted(keys.reads))] = draw.choice((*DAMAGED, 1, 2, 8, "relu", ["sliding_attention"], 0.5))
    elif kind == "rope":
        content[draw.choice(("rope_scaling", "rope_parameters"))] = draw.choice((*ROPE, *DAMAGED))
    elif kind == "alias" and aliases:
        alias = draw.choice(sorted(aliases))
        content[alias] = content[aliases[alias]] * draw.choice((1, 1, 2))
        return bool(content[alias] == content[aliases[alias]])
    else:
        content[draw.choice(("unsloth_version", "tokenizer_class", "is_llama_config", "n_special"))] = draw.choice((1, "x", [1], {"a": 1}))
        return True
    return False


def _other(value: Any, draw: random.Random) -> Any:
    """Return a plausible value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice((value * 2, max(1, value // 2), value + 1, 1, 4))
    if isinstance(value, float):
        return draw.choice((value * 10, 0.0, 1, 0.5))
    return draw.choice(ACTIVATIONS) if isinstance(value, str) else draw.choice((None, 2))


def change_tensors(folder: Path, draw: random.Random) -> None:
    """Rename, double, remove or change tensors of model.safetensors, or change their dtype."""
    file = folder / "model.safetensors"
    tensors = {name: value.clone() for name, value in load_file(file).items()}
    name = draw.choice(sorted(tensors))
    kind = draw.choice(("bare", "double", "removed", "half", "tied"))
    if kind == "bare":
        tensors = {key.partition(".")[2] if key.startswith(("transformer.", "model.")) else key: value for key, value in tensors.items()}
    elif kind == "double" and name.startswith(("transformer.", "model.", "bert.")):
        tensors[name.partition(".")[2]] = tensors[name] + 1
    elif kind == "removed":
        del tensors[name]
    elif kind == "half":
        tensors = {key: value.bfloat16() for key, value in tensors.items()}
    elif kind == "tied":
        head = next((value for key, value in tensors.items() if key.endswith(("embed_tokens.weight", "wte.weight", "shared.weight"))), None)
        if head is not None:
            tensors["lm_head.weight"] = head.clone() + draw.choice((0, 1))
    save_file(tensors, file, {"format": "pt"})


def case(family: str, fields: dict[str, Any], seed: str) -> Outcome:
    draw = random.Random(seed)
    mapping = registry.mapping_of(configuration(family, fields))
    content = {**mapping.config_json(configuration(family, fields)), "pad_token_id": PADDING}
    if "num_nextn_predict_layers" in content:
        content["num_nextn_predict_layers"] = draw.choice((0, 1))
    harmless = [change(content, mapping, draw) for _ in range(draw.choice((1, 1, 2, 3)))]
    tensors = None if draw.random() < 0.7 else lambda path: change_tensors(path, draw)
    with tempfile.TemporaryDirectory() as folder:
        return compare(content, Path(folder), harmless=all(harmless), tensors=tensors)


def compare(content: dict[str, Any], folder: Path, *, harmless: bool, tensors: Callable[[Path], None] | None = None) -> Outcome:
    """Save the stock model of a config.json with random weights, import it, and compare the logits.

    Args:
        content: content of config.json.
        folder: empty folder for the model.
        harmless: whether a refusal is a failure.
        tensors: changes the saved tensors.
    """
    text = json.dumps(content)
    stock = _stock(content, folder)
    if isinstance(stock, str):
        return _import_only(folder, stock, text)
    if tensors:
        tensors(folder)
        try:
            stock_class: Any = type(stock)
            stock = stock_class.from_pretrained(folder, dtype=torch.float32).eval()
        except Exception:  # whatever the stock class does not like
            return Outcome("stock refuses", text)
    try:
        weights = _imported(folder)
    except UserError as error:
        return Outcome("needless refusal" if harmless and not tensors else "refused", f"{text}\n{error}")
    except Exception:  # a defect of the import, which the table shows with its traceback
        return Outcome("traceback", f"{text}\n{traceback.format_exc()}")
    return _logits(weights, stock, text)


def _stock(content: dict[str, Any], folder: Path) -> nn.Module | str:
    """Save a stock model with this config.json and random weights; returns the reason if the stock class cannot build it."""
    (folder / "config.json").write_text(json.dumps(content))
    try:
        stock_class: Any = getattr(transformers, content["architectures"][0])
        config = stock_class.config_class.from_pretrained(folder)
        with torch.device("meta"):
            if sum(parameter.numel() for parameter in stock_class(config).parameters()) > LARGEST:
                return "too large"
        torch.manual_seed(0)
        _, mapping = registry.find_mapping({"architectures": [stock_class.__name__], "model_type": config.model_type})
        stock: Any = randomize(stock_class(config), exclude=(*mapping.ignored_weights, *mapping.computed_weights))
        stock.save_pretrained(folder)
        stock = stock_class.from_pretrained(folder).eval()  # a saved config.json may differ: save, then restore the original
        (folder / "config.json").write_text(json.dumps(content))
        stock = stock_class.from_pretrained(folder, dtype=torch.float32).eval()
        assert isinstance(stock, nn.Module)
        return stock
    except Exception:  # whatever the stock class does not like
        (folder / "config.json").write_text(json.dumps(content))
        return "stock refuses"


def _import_only(folder: Path, kind: str, text: str) -> Outcome:
    """Read config.json alone: anything but a result or a message is a failure."""
    try:
        content = read_config(folder)
        family, mapping = registry.find_mapping(content)
        config_json.read(mapping, family.config, content)
    except UserError:
        pass
    except Exception:  # a defect of the import, which the table shows with its traceback
        return Outcome("traceback", f"{text}\n{traceback.format_exc()}")
    return Outcome(kind, text)


def _imported(folder: Path) -> ImportedWeights:
    content = read_config(folder)
    family, mapping = registry.find_mapping(content)
    weights = ImportedWeights(StockWeights(folder, mapping), config_json.read(mapping, family.config, content))
    weights.check()
    return weights


def _logits(weights: ImportedWeights, stock: nn.Module, text: str) -> Outcome:
    """Compare the logits of the imported model with those of the stock model."""
    if weights.config.vocab_size <= FIRST_TOKEN:
        return Outcome("too small", text)  # no token that is not special
    ours = registry.build(weights.config)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(weights.tensor(name))
    length = min(SEQUENCE, weights.config.max_positions)
    try:
        largest, _ = difference(ours.eval(), stock, weights.config.vocab_size, length)
    except AssertionError:
        return Outcome("stock refuses", text)  # logits that do not vary
    except Exception as error:
        if any("transformers" in Path(frame.filename).parts for frame in traceback.extract_tb(error.__traceback__)):
            return Outcome("stock refuses", text)  # for example sizes that its kernels do not support
        # a defect of the import, which the table shows with its traceback
        return Outcome("traceback", f"{text}\n{traceback.format_exc()}")
    return Outcome("equal" if largest <= TOLERANCE else "other logits", f"{text}\nlargest difference {largest}")


def main(families: list[str], cases: int, seed: int) -> int:
    total: Counter[str] = Counter()
    for family in families:
        kinds: Counter[str] = Counter()
        for variant, fields in FAMILIES[family].variants.items():
            for number in range(cases):
                outcome = case(family, fields, f"{seed} {family} {variant} {number}")
                kinds[outcome.kind] += 1
                if outcome.failed:
                    print(f"FAILED {family} {variant} case {number}: {outcome.kind}\n{outcome.note}", flush=True)
        print(f"{family:<12} " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()), flush=True)
        total += kinds
    failures = sum(total[kind] for kind in ("other logits", "traceback", "needless refusal"))
    print(f"{total.total()} cases: " + ", ".join(f"{count} {kind}" for kind, count in total.most_common()) + f"; {failures} failures")
    return int(failures > 0)
