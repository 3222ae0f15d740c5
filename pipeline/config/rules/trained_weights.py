"""Rules between configuration keys and the names of the model's weights: lora, and training.frozen. They require the built model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from pipeline.common.errors import Violation
from pipeline.config.layout import Layout
from pipeline.config.lora import LoraConfig, is_adapter, layer_of
from pipeline.config.schema import RunConfig

#: The ranks of experts' adapters in bf16.
_MULTIPLE = 8


def violations(config: RunConfig, layout: Layout, names: Mapping[str, bool]) -> list[Violation]:
    """Return the rules of training.frozen and lora that a configuration violates.

    Args:
        names: all weights of the model, with its adapters -> whether the model has a gradient for it.
    """
    broken = []
    layers = {layer_of(name) for name in names if is_adapter(name)}
    for key, patterns in (("targets", config.lora.targets), ("rank_pattern", config.lora.rank_pattern)):
        default = key == "targets" and bool(layers) and patterns == LoraConfig().targets  # a family may have one kind of layer only
        for pattern in patterns if config.lora.rank and not default else ():
            if not any(fnmatchcase(layer, pattern) for layer in layers) and config.lora.rank_pattern.get(pattern) != 0:
                rule = f"matches no linear layer of model.family={config.model.family}" + (" with an adapter" if key != "targets" else "")
                broken.append(
                    Violation(
                        f"lora.{key}", pattern, rule, f"choose names such as {', '.join(sorted(layers)[:3]) or 'blocks.0.attention.query'}"
                    )
                )
    of_experts = sorted(layer for layer in layers if layer in names)  # a weight, where that of a linear layer is LAYER.weight
    for layer in of_experts if config.precision.dtype == "bf16" else ():
        if (rank := config.lora.rank_of(layer)) % _MULTIPLE:
            rule = (
                f"is the rank of {layer}, and that of routed experts must be a multiple of {_MULTIPLE}: their kernel reads 16 bytes at once"
            )
            broken.append(
                Violation(
                    "lora.rank", rank, rule, f"set it to {rank + -rank % _MULTIPLE}; lora.rank_pattern sets that of some layers alone"
                )
            )
            break
    if of_experts and config.parallel.folded and config.lora.dropout:
        rule = f"would drop the same elements on all tensor ranks in {of_experts[0]}: with parallel.expert_tensor=1 they have other experts"
        broken.append(Violation("lora.dropout", config.lora.dropout, rule, "set it to 0, or remove parallel.expert_tensor"))
    layers |= {layer.rpartition(".")[0] for layer in of_experts}
    modules = {name.rpartition(".")[0] for name in names if not is_adapter(name)}
    for pattern in config.lora.modules_to_save:
        matching = [module for module in sorted(modules) if fnmatchcase(module, pattern)]
        if not matching:
            rule = f"matches no module of model.family={config.model.family}"
            fix = f"choose names such as {', '.join(sorted(modules - layers)[-3:])}"
            broken.append(Violation("lora.modules_to_save", pattern, rule, fix))
        if adapted := [module for module in matching if module in layers]:
            rule = f"matches {adapted[0]}, which has an adapter"
            broken.append(Violation("lora.modules_to_save", pattern, rule, "name other modules, or exclude it by lora.targets"))
    for pattern in config.training.frozen:
        if not any(fnmatchcase(name, pattern) for name in names):
            fix = f"choose names such as {', '.join(_examples(names))}"
            broken.append(Violation("training.frozen", pattern, f"matches no weight of model.family={config.model.family}", fix))
    trained = {
        _stage(name, layout, config.model.layers) for name, has_gradient in names.items() if has_gradient and not config.is_frozen(name)
    }
    if idle := sorted(set(range(layout.stage_count)) - trained):
        where = "the model" if layout.stage_count == 1 else f"pipeline stage {idle[0]} of {layout.stage_count}"
        if config.lora.rank:
            fix = "set lora.targets such that each stage has an adapter"
            return [*broken, Violation("lora.targets", ", ".join(config.lora.targets), f"leaves nothing to train in {where}", fix)]
        fix = "freeze fewer weights" + ("" if layout.stage_count == 1 else ", or use fewer pipeline stages")
        broken.append(Violation("training.frozen", ", ".join(config.training.frozen), f"leaves nothing to train in {where}", fix))
    return broken


def _stage(name: str, layout: Layout, layers: int) -> int:
    """The pipeline stage that holds a weight."""
    first, _, rest = name.partition(".")
    if first != "blocks":
        return 0 if first == "embed" else layout.stage_count - 1
    block = int(rest.partition(".")[0])
    return next(stage for stage in range(layout.stage_count) if block in layout.layers(stage, layers))


def _examples(names: Iterable[str]) -> list[str]:
    """One name for each kind of weight, at most four."""
    return list({name.rpartition(".")[0].partition(".")[0]: name for name in names}.values())[:4]
