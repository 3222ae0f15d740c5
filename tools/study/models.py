"""The model of a published run: a family of the project with the sizes of its row."""

from __future__ import annotations

import math
import re
from typing import Any

from omegaconf import OmegaConf

from pipeline.config.paths import CONF_DIR
from pipeline.models.families.deepseek_v3 import DeepseekV3Config
from pipeline.models.families.gpt import GPTConfig
from pipeline.models.families.llama import LlamaConfig
from pipeline.models.families.mixtral import MixtralConfig
from tools.study.cells import Contradiction, integer, number

#: Models that are not transformers with one stack of self-attention, by words in their names.
OTHERS = r"mamba|hybrid|jamba|zamba|rwkv|retnet|hyena|griffin|\bssm\b|resnet|unet|diffusion|\bt5\b|\bul2\b|bart\b|whisper|pegasus"
#: Mixtures of experts by words in their names -> experts and experts of a token, from their papers.
EXPERTS = {
    r"mixtral|phi-?3\.5-?moe|grok": (8, 2),
    r"qwen-?3.*a(3|22)b": (128, 8),
    r"qwen-?2.*a(2\.7|14)b": (64, 8),
    r"olmoe": (64, 8),
    r"dbrx": (16, 4),
    r"gpt-?oss.*20b": (32, 4),
    r"gpt-?oss": (128, 4),
    r"scout": (16, 1),
    r"maverick": (128, 1),
    r"deepseek.*lite|deepseek-?moe|moonlight": (64, 6),
    r"deepseek.*v2": (160, 6),
    r"deepseek|kimi": (256, 8),
}
#: Column of a table -> key of conf/model/.
KEYS = {"layers": "layers", "hidden": "hidden", "heads": "heads", "kv_heads": "kv_heads", "ffn_hidden": "ffn_hidden", "vocab": "vocab_size"}


def named(row: dict[str, str], assumed: list[str]) -> dict[str, str]:
    """The row with the empty sizes of a model that conf/model/ has under its name."""
    wanted = [column for column in KEYS if number(row, column) is None]
    if number(row, "layers") and number(row, "hidden"):
        return row
    plain = re.sub(r"[^a-z0-9]|meta|instruct|base", "", row.get("model_name", "").lower())
    found = next((path for path in (CONF_DIR / "model").glob("*.yaml") if re.sub(r"[^a-z0-9]", "", path.stem) == plain), None)
    if not plain or not found:
        return row
    sizes = OmegaConf.to_container(OmegaConf.load(found))
    assert isinstance(sizes, dict)
    assumed.append(f"sizes of {found.stem}")
    return row | {column: str(sizes[KEYS[column]]) for column in wanted if KEYS[column] in sizes}


def model_of(row: dict[str, str], sequence: int, tensor: int, expert: int, pipeline: int, assumed: list[str]) -> Any:
    """The model of a row, with one family for each kind of feed-forward: GPT, Llama (gated) or Mixtral (experts)."""
    name = row.get("model_name", "").lower()
    if re.search(OTHERS, name):
        raise Contradiction(f"model_name={row['model_name']} is not one stack of transformer blocks")
    if re.search("bert|encoder|vit|deit", name):
        assumed.append("causal attention")
    if re.search(r"deepseek[-_ ]?(v3|r1)", name) and not row.get("ffn_hidden", "").strip():
        assumed.append("sizes of DeepSeek-V3")
        return DeepseekV3Config(layers=integer(row, "layers", 61, []), max_positions=sequence)
    row = named(row, assumed)
    parameters = (number(row, "params_b") or 0.0) * 1e9
    multiple = 128 * tensor  # frameworks pad the vocabulary
    vocabulary = math.ceil(integer(row, "vocab", 50304, assumed) / multiple) * multiple
    hidden, layers = integer(row, "hidden", 0, []), integer(row, "layers", 0, [])
    if not hidden:
        if not parameters:
            raise Contradiction("hidden and params_b are empty")
        hidden = max(128, round(math.sqrt(parameters / 12 / (layers or 32)) / 128) * 128)
        assumed.append(f"hidden={hidden}")
    given = integer(row, "ffn_hidden", 0, [])
    experts, top_k = _experts(row.get("model_name", ""), expert)
    ffn = given or 4 * hidden
    if not given and experts > 1 and parameters and layers:  # nearly all parameters are those of the three matrices of the experts
        ffn = max(256, round((parameters - 2 * vocabulary * hidden - 4 * layers * hidden**2) / (3 * hidden * layers * experts) / 256) * 256)
    if not given:
        assumed.append(f"ffn_hidden={ffn}")
    if not layers:
        block = 4 * hidden**2 + 2 * ffn * hidden
        layers = max(pipeline, round((parameters - vocabulary * hidden) / block)) if parameters else 0
        if not layers:
            raise Contradiction("layers and params_b are empty")
        assumed.append(f"layers={layers}")
    heads = integer(row, "heads", 0, [])
    if not heads:
        heads = next((n for n in (hidden // 128, hidden // 64, hidden // 96) if n and hidden % n == 0 and n % tensor == 0), tensor)
        assumed.append(f"heads={heads}")
    kv_heads = integer(row, "kv_heads", heads, assumed)
    kv_heads = kv_heads if kv_heads % tensor == 0 else tensor  # every tensor rank has a copy
    if heads % tensor or heads % kv_heads:
        raise Contradiction(f"heads={heads} and kv_heads={kv_heads} do not divide by tp={tensor}")
    if hidden % tensor:
        raise Contradiction(f"hidden={hidden} does not divide by tp={tensor}")
    if hidden % heads:
        rounded = math.ceil(hidden / heads / 8) * 8 * heads
        assumed.append(f"hidden={rounded}, since {hidden} is not a multiple of heads={heads}")
        hidden = rounded
    ffn = math.ceil(ffn / tensor) * tensor
    sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "heads": heads, "ffn_hidden": ffn, "vocab_size": vocabulary}
    sizes["max_positions"] = sequence
    if experts > 1:
        experts = math.ceil(experts / expert) * expert
        return MixtralConfig(**sizes, kv_heads=kv_heads, experts=experts, top_k=top_k)
    if given and ffn != 4 * hidden:
        return LlamaConfig(**sizes, kv_heads=kv_heads)
    if kv_heads != heads:  # no gate: one of the two entry products is not there
        return LlamaConfig(**{**sizes, "ffn_hidden": ffn * 2 // 3 // tensor // 64 * tensor * 64}, kv_heads=kv_heads)
    return GPTConfig(**sizes)


def _experts(name: str, expert: int) -> tuple[int, int]:
    """Number of experts and experts of a token, from the name of a model."""
    text = name.lower()
    top = re.search(r"top-?(\d+)", text)
    if found := re.search(r"(\d+)\s*x\s*(?:\d+b|top|\d+\.\d+b)|moe (\d+)|(\d+)(?:e\b| experts)", text):
        count = int(found[1] or found[2] or found[3])
        return max(1, count), min(count, int(top[1])) if top else (2 if count <= 16 else 1)
    if sizes := next((sizes for word, sizes in EXPERTS.items() if re.search(word, text)), None):
        return sizes
    return (8 * expert, 2) if expert > 1 else (1, 1)
