"""The sections of a DeepSpeed configuration whose keys depend on each other: optimizer, scheduler, bf16 and fp16.

A section that names an optimizer or a scheduler stands for all of its parameters: those that it does not have take DeepSpeed's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pipeline.config.deepspeed_keys import Only

#: What a key means: (our key, value), or why it is refused (rule, fix); None for no effect.
Meaning = tuple[str, Any] | Only | None
#: Yields (key of the file, its value, meaning).
Reader = Callable[[dict[str, Any]], Iterator[tuple[str, Any, Meaning]]]

AUTO = "auto"


def _adam(name: str, given: dict[str, Any], *, scheduled: bool) -> Iterator[tuple[str, Any, Meaning]]:
    """DeepSpeed's Adam and AdamW; Adam is AdamW unless adam_w_mode is false. A scheduler may set the rate instead (`scheduled`)."""
    defaults: dict[str, Any] = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    if "lr" in given or not scheduled:
        defaults["lr"] = 1e-3
    for key, value in {**defaults, **given}.items():
        path = f"optimizer.params.{key}"
        if key == "betas" and isinstance(value, list) and len(value) == 2:
            for number, beta in enumerate(value):
                yield f"{path}.{number}", beta, (f"optimizer.beta{number + 1}", beta)
        elif key == "betas" and value != AUTO:
            yield path, value, Only((), "is not a list of two numbers", "correct it")
        elif key in defaults:
            yield path, value, (f"optimizer.{key}", value)
        elif key == "bias_correction":
            yield path, value, None if value is True else Only((), "moments are corrected for their bias", "set it to true")
        elif key == "amsgrad":
            yield path, value, None if value is False else Only((), "is not supported", "set it to false")
        elif key == "adam_w_mode":
            is_same = value is True or name == "adamw" or not given.get("weight_decay")
            yield path, value, None if is_same else Only((), "weight decay is decoupled", "set it to true, or weight_decay to 0")
        elif key in ("torch_adam", "freeze_step", "fused", "foreach"):
            yield path, value, None
        else:
            yield path, value, Only((), "is not a parameter of Adam that is known here", "remove it")


def optimizer(document: dict[str, Any]) -> Iterator[tuple[str, Any, Meaning]]:
    """`optimizer`: its type and parameters."""
    kind, given = document["optimizer"].get("type"), document["optimizer"].get("params", {})
    if not isinstance(kind, str) or kind.lower() not in ("adam", "adamw"):
        yield "optimizer.type", kind, Only((), "is not an optimizer of this program", "set it to AdamW")
        return
    yield "optimizer.type", kind, ("optimizer.name", "adamw")
    yield from _adam(kind.lower(), given, scheduled="warmup_max_lr" in document.get("scheduler", {}).get("params", {}))


def scheduler(document: dict[str, Any]) -> Iterator[tuple[str, Any, Meaning]]:
    """`scheduler`: a linear warm-up to the peak, and what follows.

    DeepSpeed's rate of update n, counted from 0, is that of n - 1 in its formula, and 0 in the first; ours is that of n + 1.
    """
    kind, given = document["scheduler"].get("type"), document["scheduler"].get("params", {})
    schedules = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if kind not in schedules:
        yield "scheduler.type", kind, Only((), "is not a schedule of this program", f"set it to {', '.join(schedules)}, or remove it")
        return
    yield "scheduler.type", kind, ("optimizer.schedule", schedules[kind])
    defaults: dict[str, Any] = {"warmup_num_steps": 1000, "warmup_type": "log"}
    if kind == "WarmupDecayLR":
        yield "scheduler.type", kind, ("optimizer.min_lr_ratio", 0.0)
        defaults["warmup_max_lr"] = 0.001
    if kind == "WarmupCosineLR":
        defaults["cos_min_ratio"] = 0.0001
    for key, value in {**defaults, **given}.items():
        yield f"scheduler.params.{key}", value, _scheduler_parameter(kind, key, value)


def _scheduler_parameter(kind: str, key: str, value: Any) -> Meaning:
    """The meaning of a parameter of a scheduler."""
    names = {"warmup_num_steps": "optimizer.warmup_steps"}
    names |= {"cos_min_ratio": "optimizer.min_lr_ratio"} if kind == "WarmupCosineLR" else {"warmup_max_lr": "optimizer.lr"}
    if kind != "WarmupLR":
        names["total_num_steps"] = "training.steps"
    if key in names:
        return names[key], value
    if key == ("warmup_min_ratio" if kind == "WarmupCosineLR" else "warmup_min_lr"):
        return None if value in (0, AUTO) else Only((), "the warm-up begins at 0", "set it to 0")
    if key == "warmup_type":
        return None if value in ("linear", AUTO) else Only((), "the warm-up is linear", "set warmup_type to linear")
    if key == "last_batch_iteration":
        return None if value == -1 else Only((), "a run continues from its checkpoint", "remove it")
    return Only((), f"is not a parameter of {kind}", "remove it")


def bf16(document: dict[str, Any]) -> Iterator[tuple[str, Any, Meaning]]:
    """`bf16` beside `enabled`: master weights, optimizer state and gradients are fp32 in every dtype."""
    for key, value in document["bf16"].items():
        if key in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
            yield f"bf16.{key}", value, None if value is False else Only((), "they are always fp32", "set it to false")
        elif key in ("immediate_grad_update", "check_grad_overflow", "check_overflow"):
            yield f"bf16.{key}", value, None
        elif key != "enabled":
            yield f"bf16.{key}", value, Only((), "no such key", "remove it")


def fp16(document: dict[str, Any]) -> Iterator[tuple[str, Any, Meaning]]:
    """`fp16` beside `enabled`: the loss scale is halved after every step without a finite gradient, and doubled after a window."""
    enabled = document["fp16"].get("enabled", False) is True
    for key, value in document["fp16"].items():
        if key == "initial_scale_power":
            yield f"fp16.{key}", value, ("precision.initial_loss_scale", 2.0**value if isinstance(value, int) else value)
        elif key == "loss_scale_window":
            yield f"fp16.{key}", value, ("precision.loss_scale_window", value)
        elif key in _FP16:
            yield f"fp16.{key}", value, None if not enabled or value in (*_FP16[key].values, AUTO) else _FP16[key]
        elif key != "enabled":
            yield f"fp16.{key}", value, Only((), "no such key", "remove it")


_FP16 = {
    "loss_scale": Only((0,), "the loss scale is dynamic", "set it to 0"),
    "hysteresis": Only((1,), "the loss scale is halved at the first gradient that is not finite", "set it to 1"),
    "consecutive_hysteresis": Only((False, True), "", ""),
    "min_loss_scale": Only((1,), "the smallest loss scale is 1", "set it to 1"),
    "auto_cast": Only((False, True), "", ""),
    "fp16_master_weights_and_grads": Only((False,), "they are always fp32", "set it to false"),
}

READERS: dict[str, Reader] = {"optimizer": optimizer, "scheduler": scheduler, "bf16": bf16, "fp16": fp16}


def dtype(document: dict[str, Any]) -> tuple[str, str] | None:
    """Return the key that decides about the dtype, and precision.dtype; None if the file leaves it to us.

    DeepSpeed computes in fp32 if neither bf16 nor fp16 is enabled.
    """
    switches = {name: document[name].get("enabled", False) for name in ("bf16", "fp16") if name in document}
    for name, enabled in switches.items():
        if enabled is True:
            return f"{name}.enabled", name
    if not switches or AUTO in switches.values():
        return None
    return f"{next(iter(switches))}.enabled", "fp32"
