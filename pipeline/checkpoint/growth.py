"""What grows when a run starts with the weights of a smaller model (checkpoint.initialize_from), and when its function is kept.

The larger model begins with the function of the smaller one: experts are copies of a feed-forward (sparse upcycling, Komatsuzaki et al.
2022, https://arxiv.org/abs/2212.05055), new blocks (LLaMA Pro, Wu et al. 2024, https://arxiv.org/abs/2401.02415) and new dims of a
feed-forward add nothing at first. Only noise and re-initialized dims change it. checkpoint/grown_weights.py computes the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common.errors import UserError, Violation
from pipeline.config.schema import RunConfig
from pipeline.models import config_classes
from pipeline.models.rope import extended

#: Families whose blocks add the outputs of attention and feed-forward to the residual stream without a norm behind them.
PRE_NORM = ("apertus", "bloom", "gpt", "gpt_neox", "granite", "llama", "mistral", "mixtral", "nemotron", "olmoe", "phi3", "qwen3_moe")
#: A dense family, and one with experts that differs in the feed-forwards alone.
WITH_EXPERTS = (("llama", "mixtral"), ("llama", "qwen3_moe"), ("mistral", "mixtral"))
#: Sizes that may grow, fields that say which blocks have experts, and those that are no part of the function of the weights.
_SIZES, _PLACES = ("layers", "ffn_hidden", "expert_ffn_hidden", "experts", "top_k"), ("expert_interval", "dense_blocks", "norm_topk_prob")
_FREE = ("family", "head_width", "init_std", "capacity_factor")
#: Fields by which blocks differ -> the value with which all are alike.
_PATTERNS: dict[str, Any] = {"no_rope_layer_interval": None, "banded_window": None, "expert_interval": 1, "dense_blocks": []}
_FIX = "set it to that value, or choose another checkpoint: only layers, feed-forwards and experts grow (pipeline/checkpoint/README.md)"


@dataclass(frozen=True)
class Growth:
    """How the weights of a model follow from those of a smaller one.

    Attributes:
        blocks: for each block, that of the smaller model, and whether it is a copy whose outputs are zero.
        parts: experts that a feed-forward (or an expert) of the smaller model is divided into.
        copies: experts that an expert of the smaller model becomes; 0: it has none, and the routers are new.
    """

    blocks: tuple[tuple[int, bool], ...]
    parts: int
    copies: int
    text: str


def of(config: RunConfig, path: Path, recorded: Mapping[str, Any]) -> Growth | None:
    """Return how a run starts with the smaller model of a checkpoint, with what that recorded as configuration; None if no size differs.

    Raises:
        UserError: the models differ in a way that is not supported, or a setting of growth has no effect.
    """
    new: Any = config.model
    old: Any = config_classes.from_dict(recorded["model"])
    settings, factor = config.checkpoint, config.training.context_factor
    old = old if factor == 1 else extended(old, factor)
    copies, parts = _factors(new, old)
    is_copied, noise, reinitialized = bool(getattr(new, "experts", 0)) and copies != 1, settings.expert_noise, settings.expert_reinitialized
    UserError.raise_for([] if new == old else [*_different(new, old, path)] or [*_sizes(new, old, path)])
    if is_copied and copies > parts and not (noise or reinitialized):
        rule = f"copies each expert of {path} {copies // parts} times, and equal experts behind equal routers stay equal in training"
        raise UserError.of("model.experts", new.experts, rule, "set checkpoint.expert_reinitialized=0.5, or checkpoint.expert_noise")
    more = {"new_blocks": new.layers > old.layers, "expert_noise": is_copied, "expert_reinitialized": is_copied}
    for key in (key for key, is_read in more.items() if not is_read and getattr(settings, key) not in (0, "interleaved")):
        rule = f"has no effect: the model has as many {'blocks' if key == 'new_blocks' else 'experts'} as {path}"
        raise UserError.of(f"checkpoint.{key}", getattr(settings, key), rule, "remove it, or choose a model that has more")
    if not (grown := _grown(new, old)):
        return None
    if config.lora.rank:
        rule = f"adapts weights of a checkpoint, and those of a model that is larger than {path} are in none"
        raise UserError.of("lora.rank", config.lora.rank, rule, "train all weights first, and start from that run")
    text = ", ".join(f"model.{name} {getattr(old, name, 'none')} -> {getattr(new, name)}" for name in grown)
    text += f", new blocks {settings.new_blocks}" if new.layers > old.layers else ""
    text += f", expert_noise {noise:g}, expert_reinitialized {reinitialized:g}" if is_copied else ""
    return Growth(_blocks(old.layers, new.layers, settings.new_blocks), parts, copies, text)


def _blocks(old: int, new: int, place: str) -> tuple[tuple[int, bool], ...]:
    """Return Growth.blocks. Interleaved, the k-th of e new blocks stands behind, and copies, the block that ends the share k/e of all."""
    added = new - old
    behind = [-(-number * old // added) - 1 if place == "interleaved" else old - 1 for number in range(1, added + 1)]
    return tuple((block, copy > 0) for block in range(old) for copy in range(1 + behind.count(block)))


def _grown(new: Any, old: Any) -> list[str]:
    """The sizes that differ."""
    return [name for name in _SIZES if hasattr(new, name) and getattr(new, name) != getattr(old, name, None)]


def _width(model: Any) -> int:
    """The intermediate width of an expert; of a dense model that of its feed-forward."""
    return int(getattr(model, "expert_ffn_hidden", model.ffn_hidden))


def _factors(new: Any, old: Any) -> tuple[int, int]:
    """Return Growth.copies and Growth.parts."""
    copies = new.experts // old.experts if getattr(new, "experts", 0) and getattr(old, "experts", 0) else 0
    return copies, max(1, _width(old) // _width(new)) if getattr(new, "experts", 0) else 1


def _different(new: Any, old: Any, path: Path) -> Iterator[Violation]:
    """Yield what may not differ: all but the sizes that grow. A family without a field computes what the default of the field says."""
    if old.family != new.family and (old.family, new.family) not in WITH_EXPERTS:
        rule = f"{path} was made with {old.family}; what becomes experts is {', '.join(map(' -> '.join, WITH_EXPERTS))}"
        yield Violation("model.family", new.family, rule, _FIX)
        return
    defaults = vars(type(new)()) | vars(type(old)())
    for name in sorted(defaults.keys() - {*_SIZES, *_FREE, *(() if getattr(old, "experts", 0) else _PLACES)}):
        mine, theirs = (getattr(model, name, defaults[name]) for model in (new, old))
        if mine != theirs:
            yield Violation(f"model.{name}", mine, f"{path} was made with {theirs}", _FIX)
    if new.head_dim != old.head_dim:
        key = "head_width" if hasattr(new, "head_width") else "heads"
        yield Violation(f"model.{key}", getattr(new, key), f"makes heads of width {new.head_dim}, and {path} has {old.head_dim}", _FIX)
    grown = _grown(new, old)
    for name in grown if new.family not in PRE_NORM else ():
        rule = f"{path} was made with {getattr(old, name)}, and the families that grow are {', '.join(PRE_NORM)}"
        yield Violation(f"model.{name}", getattr(new, name), rule, _FIX)
    if grown and getattr(old, "parametrization", "standard") == "mup":
        rule = f"{path} was made with {getattr(old, grown[0], 'none')}, and muP has no rule for a model that grows"
        yield Violation(f"model.{grown[0]}", getattr(new, grown[0]), rule, "start from a model of the standard parametrization")


def _sizes(new: Any, old: Any, path: Path) -> Iterator[Violation]:
    """Yield sizes with which the function would not be kept."""
    if new.layers < old.layers:
        yield Violation("model.layers", new.layers, f"{path} has more: {old.layers}", "choose at least that many")
    for name, alike in _PATTERNS.items() if new.layers > old.layers else ():
        if (value := getattr(old, name, alike)) != alike:
            rule = f"moves blocks to other places, and by model.{name}={value} what a block computes depends on its place"
            yield Violation("model.layers", new.layers, rule, f"keep model.layers={old.layers}, as {path} has")
    has_experts = getattr(new, "has_experts", lambda _: getattr(new, "experts", 0))
    if not all(map(has_experts, range(new.layers))) and new.ffn_hidden < old.ffn_hidden:
        yield Violation("model.ffn_hidden", new.ffn_hidden, f"{path} has more: {old.ffn_hidden}", "choose at least that width")
    if not getattr(new, "experts", 0):
        return
    key, width, before = "expert_ffn_hidden" if hasattr(new, "expert_ffn_hidden") else "ffn_hidden", _width(new), _width(old)
    copies, parts = _factors(new, old)
    if width < before and before % width:
        rule = f"is neither a part of the width {before} of {path} nor more: its function would not be kept"
        yield Violation(f"model.{key}", width, rule, f"choose a divisor of {before}, or at least {before}")
    elif getattr(old, "experts", 0):
        if new.experts % old.experts or new.top_k != old.top_k * copies or copies % parts:
            rule = f"with model.top_k={new.top_k} and experts of width {width} does not keep the function of {path}, which has "
            rule += f"model.experts={old.experts}, model.top_k={old.top_k} and width {before}"
            fix = f"multiply both by the same number, a multiple of {parts} for experts of this width"
            yield Violation("model.experts", new.experts, rule, fix)
    elif new.experts % parts or new.top_k % parts:
        rule = f"makes each expert 1/{parts} of the feed-forward of {path}, whose function is kept if all parts process a token: "
        rule += f"model.experts={new.experts} and model.top_k={new.top_k} are not multiples of {parts}"
        yield Violation(f"model.{key}", width, rule, f"choose multiples of {parts}, or model.{key}={before}")
    if not (getattr(old, "experts", 0) or getattr(new, "norm_topk_prob", True)):
        rule = f"scales the feed-forwards of {path}: the weights of the experts of a token do not sum to one"
        yield Violation("model.norm_topk_prob", False, rule, "set it to true")
