"""The tables and targets that tools/bench_checkpoint prints."""

from __future__ import annotations

import os
from importlib.metadata import version
from statistics import median
from typing import Any

from tools.bench.harness import verdict

#: Implementations of saves; those that save beside training are compared.
SAVES = ("ours", "dcp-thread", "dcp-process")
#: Number of ranks -> what their loads show.
LAYOUTS = {"1": "the same layout", "2": "another layout"}


def report(found: dict[str, Any]) -> str:
    """All tables, targets and rows whose work is not equal."""
    parts = [head(found), synchronous(found), asynchronous(found), loads(found), *([export(found)] if "export" in found else [])]
    return "\n\n".join([*parts, "\n".join([*targets(found), *unequal(found)])])


def head(found: dict[str, Any]) -> str:
    """What was measured, and on which machine."""
    ours = found["saves"]["ours"]
    before, after = found["load average"]
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers"))
    return (
        f"{ours['parameters'] / 1e6:,.0f} M parameters, state {ours['bytes'] / 1e9:.2f} GB; {os.cpu_count()} cores, "
        f"load average {before:.2f} before and {after:.2f} after the run of {found['seconds']:,.0f} s\n{libraries}"
    )


def rate(found: dict[str, Any], seconds: float) -> str:
    """GB/s of the state's bytes."""
    return f"{found['saves']['ours']['bytes'] / 1e9 / seconds:.2f}"


def synchronous(found: dict[str, Any]) -> str:
    """The save for which training waits, beside a plain write."""
    ours = found["saves"]["ours"]
    plain = median(ours["plain"])
    lines = [f"{'save':<28}{'seconds':>10}{'GB/s':>10}{'x plain':>10}"]
    for name, seconds in (("plain write", plain), ("ours", median(ours["synchronous"]))):
        lines.append(f"  {name:<26}{seconds:>10.2f}{rate(found, seconds):>10}{plain / seconds:>10.2f}")
    return "\n".join(lines)


def beside(result: dict[str, Any]) -> dict[str, float] | None:
    """Medians of the asynchronous saves of an implementation, without the first; None if it has none."""
    saves = result["saves"][1:] or result["saves"]
    if not saves:
        return None
    quiet = median(result["quiet"])
    return {
        "first pause": result["saves"][0]["pause"],
        "pause": median(save["pause"] for save in saves),
        "steps": median(seconds for save in saves for seconds in save["times"]) / quiet,
        "complete": median(save["complete"] for save in saves),
        "lost": median(save["total"] - save["steps"] * quiet for save in saves),
        "step": quiet,
    }


def asynchronous(found: dict[str, Any]) -> str:
    """The saves beside training."""
    columns = ("first pause", "pause", "steps", "complete", "lost", "step")
    wait = median(found["saves"]["ours"]["synchronous"])
    lines = [f"{'beside training, seconds':<28}" + "".join(f"{name:>13}" for name in (*columns, "pause / save"))]
    for name, result in found["saves"].items():
        if values := beside(result):
            lines.append(f"  {name:<26}" + "".join(f"{values[column]:>13.3f}" for column in columns) + f"{values['pause'] / wait:>13.1%}")
    return "\n".join(lines)


def loads(found: dict[str, Any]) -> str:
    """Loads in both layouts, from the disk and from the page cache."""
    lines = [f"{'load':<34}{'disk s':>10}{'x plain':>10}{'cache s':>10}{'x plain':>10}{'read':>8}"]
    for ranks, result in found["loads"].items():
        for name in ("plain", "ours", "dcp"):
            disk, cache = (result[f"{name} {place}"]["seconds"] for place in ("disk", "cache"))
            ratios = [result[f"plain {place}"]["seconds"] / seconds for place, seconds in (("disk", disk), ("cache", cache))]
            read = result[f"{name} disk"]["bytes"] / result["needed"]
            label = f"  {name}, {LAYOUTS[ranks]}"
            lines.append(f"{label:<34}{disk:>10.2f}{ratios[0]:>10.2f}{cache:>10.2f}{ratios[1]:>10.2f}{read:>8.3f}")
    return "\n".join(lines)


def export(found: dict[str, Any]) -> str:
    """The export of both."""
    lines = [f"{'export to Hugging Face':<28}{'seconds':>10}{'peak MB':>10}"]
    for name in ("ours", "deepspeed"):
        result = found["export"][name]
        lines.append(f"  {name:<26}{result['seconds']:>10.1f}{result['peak'] / 1e6:>10,.0f}")
    return "\n".join(lines)


def targets(found: dict[str, Any]) -> list[str]:
    """A line for each target."""
    ours = found["saves"]["ours"]
    lines = [line("synchronous save / plain write", median(ours["plain"]) / median(ours["synchronous"]), at_least=0.8)]
    if values := beside(ours):
        lines.append(line("pause / synchronous save", values["pause"] / median(ours["synchronous"]), at_most=0.05))
        lines.append(line("steps beside a save / undisturbed", values["steps"], at_most=1.03))
        for name in SAVES[1:]:
            if other := beside(found["saves"][name]):
                lines += [line(f"{key}: ours / {name}", values[key] / other[key], at_most=1.0) for key in ("pause", "steps", "complete")]
        lines.append(line("memory of the writer / its largest buffer", ours["writer"] / ours["buffer"], at_most=2.0))
    for ranks, least in (("1", 0.8), ("2", 0.4)):
        result = found["loads"][ranks]
        seconds = {name: result[f"{name} disk"]["seconds"] for name in ("plain", "ours", "dcp")}
        lines.append(line(f"load in {LAYOUTS[ranks]} / plain read", seconds["plain"] / seconds["ours"], at_least=least))
        lines.append(line(f"load in {LAYOUTS[ranks]}: seconds of ours / DCP", seconds["ours"] / seconds["dcp"], at_most=1.0))
    lines.append(
        line("bytes read / needed, another layout", found["loads"]["2"]["ours disk"]["bytes"] / found["loads"]["2"]["needed"], at_most=1.2)
    )
    lines.append(line("bytes on the disk / state", ours["disk"] / ours["bytes"], at_most=1.02))
    if "export" in found:
        mine, peer = found["export"]["ours"], found["export"]["deepspeed"]
        lines.append(line("export: seconds of DeepSpeed / ours", peer["seconds"] / mine["seconds"], at_least=3))
        lines.append(line("export: memory of ours / DeepSpeed", mine["peak"] / peer["peak"], at_most=0.25))
    return lines


def line(name: str, value: float, **bound: float) -> str:
    """A measured value with its target."""
    return f"{name:<48}{value:>8.3f}  {verdict(value, **bound)}"


def unequal(found: dict[str, Any]) -> list[str]:
    """A line for every load that has not given the state of the save."""
    exported = [] if found.get("export", {"equal": True})["equal"] else ["UNEQUAL WORK: export: the tensors of both differ"]
    return exported + [
        f"UNEQUAL WORK: {name}, {LAYOUTS[ranks]}: it loaded other values than were saved"
        for ranks, result in found["loads"].items()
        for name in ("ours", "dcp")
        if not result[f"{name} equal"]
    ]
