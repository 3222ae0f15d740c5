"""The table and the targets that tools/bench_train prints."""

from __future__ import annotations

import statistics
from typing import Any

from tools.bench.report import verdict


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of every measurement over the rounds."""
    return {key: statistics.median(result[key] for result in rounds) for key in rounds[0]}


def table(results: dict[str, dict[str, float]], machine: dict[str, Any]) -> str:
    """Format one line per implementation.

    Args:
        results: implementation -> its medians (train_implementations.run).
        machine: the result of train_implementations.measure_machine.
    """

    def ratio(name: str, other: str, key: str) -> str:
        return f"{results[name][key] / results[other][key]:.3f}" if other in results else "-"

    columns = ("tokens/s", "x plain", "x trainer", "TFLOP/s", "MFU", "memory MB", "x plain", "not model", "loss")
    lines = [f"{'':<11}" + "".join(f"{column:>11}" for column in columns)]
    for name, result in results.items():
        flops = result["tokens_per_second"] * machine["flops_per_token"]
        cells = (
            f"{result['tokens_per_second']:,.0f}",
            ratio(name, "plain", "tokens_per_second"),
            ratio(name, "trainer", "tokens_per_second"),
            f"{flops / 1e12:.3g}",
            f"{flops / machine['peak']:.1%}",
            f"{result['memory'] / 1e6:,.0f}",
            ratio(name, "plain", "memory"),
            f"{result['not_model']:.2%}" if "not_model" in result else "-",
            f"{result['loss']:.5f}",
        )
        lines.append(f"{name:<11}" + "".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)


def targets(results: dict[str, dict[str, float]]) -> list[str]:
    """Return one line per target of `ours` that the measured implementations allow to check."""
    if "ours" not in results:
        return []
    ours = results["ours"]
    lines = [_target("not model", ours["not_model"], at_most=0.03)]
    if "plain" in results:
        lines.append(_target("tokens/s x plain", ours["tokens_per_second"] / results["plain"]["tokens_per_second"], at_least=0.97))
        lines.append(_target("memory x plain", ours["memory"] / results["plain"]["memory"], at_most=1.0))
    if "trainer" in results:
        lines.append(_target("tokens/s x trainer", ours["tokens_per_second"] / results["trainer"]["tokens_per_second"], at_least=1.2))
    return lines


def _target(name: str, value: float, **bounds: float) -> str:
    return f"ours: {name:<18} {value:.3f}, {verdict(value, **bounds)}"
