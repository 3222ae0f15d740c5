"""The harness of the benchmarks: implementations take turns, each in processes of its own; medians, ratios and targets are printed."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]

#: Implementation -> the medians of its measurements over the rounds.
Results = dict[str, dict[str, float]]


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        title: of the column.
        key: of the measurement.
        text: how it is formatted, as in str.format.
        unit: what it is divided by.
        beside: implementation whose measurement it is divided by, as a ratio; empty for none.
    """

    title: str
    key: str
    text: str = "{:,.0f}"
    unit: float = 1.0
    beside: str = ""

    def value(self, results: Results, name: str) -> float | None:
        """The value of an implementation; None if it, or the one beside it, has not been measured."""
        found = results.get(name, {}).get(self.key)
        other = results.get(self.beside, {}).get(self.key) if self.beside else self.unit
        return None if found is None or other is None else found / other

    def cell(self, results: Results, name: str) -> str:
        value = self.value(results, name)
        return "-" if value is None else ("{:.3f}" if self.beside else self.text).format(value)


class Target(NamedTuple):
    """A bound of a measurement of an implementation, or of its ratio to another one's."""

    name: str
    column: Column
    at_least: float = 0.0
    at_most: float = math.inf


def table(results: Results, columns: Sequence[Column], width: int = 11) -> str:
    """Format a line for each implementation."""
    first = 1 + max(map(len, results))
    lines = [" " * first + "".join(f"{column.title:>{width}}" for column in columns)]
    lines += [f"{name:<{first}}" + "".join(f"{column.cell(results, name):>{width}}" for column in columns) for name in results]
    return "\n".join(lines)


def targets(results: Results, bounds: Iterable[Target]) -> list[str]:
    """A line for each target whose implementations have been measured."""
    found = ((target, target.column.value(results, target.name)) for target in bounds)
    return [
        f"{target.name}: {target.column.title:<22} {number(value)}, {verdict(value, target.at_least, target.at_most)}"
        for target, value in found
        if value is not None
    ]


def number(value: float) -> str:
    """Format with four significant digits, or as an integer from 1,000 upwards."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def verdict(value: float, at_least: float = 0.0, at_most: float = math.inf) -> str:
    """Return the target of a measured value, and whether the value meets it. A target has one of the two bounds."""
    bound = f"at least {at_least:,g}" if at_least else f"at most {at_most:,g}"
    return f"target {bound}: {'met' if at_least <= value <= at_most else 'MISSED'}"


def rounds(script: str, names: Sequence[str], settings: dict[str, Any], count: int, threads: str = "") -> Results:
    """Measure every implementation `count` times by a script of tools/bench; returns as `alternating`."""
    return alternating({name: partial(process, script, {"implementation": name, **settings}, threads) for name in names}, count)


def alternating(measures: Mapping[str, Callable[[], dict[str, float]]], count: int) -> Results:
    """Call what measures each implementation `count` times; within a round, they alternate. Returns the medians."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in measures}
    for number in range(count):
        for name, measure in measures.items():
            found[name].append(measure())
            print(f"round {number + 1}: {name} {found[name][-1]['tokens_per_second']:,.0f} tokens/s", file=sys.stderr, flush=True)
    return {name: {key: median(result[key] for result in results) for key in results[0]} for name, results in found.items()}


def process(script: str, settings: dict[str, Any], threads: str = "") -> dict[str, Any]:
    """Return the JSON that a script of tools/bench prints in a new process, on the first GPU only: Trainer would use all of them.

    Args:
        script: its name.
        settings: its argument, as JSON.
        threads: of each process; empty for what the environment says.
    """
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment |= {"OMP_NUM_THREADS": threads} if threads else {}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/bench" / script), json.dumps(settings)], env=environment, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        name = settings.get("implementation", script)
        print(f"{Path(sys.argv[0]).name}: {name} failed; the error is printed above", file=sys.stderr)
        sys.exit(done.returncode)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def add_options(parser: argparse.ArgumentParser, implementations: Sequence[str]) -> None:
    """Add the options of a comparison of trainings on one process."""
    parser.add_argument("--batch", type=positive, default=8, help="sequences per step (default %(default)s)")
    parser.add_argument("--sequence", type=positive, default=256, help="tokens per sequence (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=10, help="timed steps per round, after the warmup (default %(default)s)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16", help="as precision.dtype (default %(default)s)")
    parser.add_argument("--only", choices=implementations, action="append", help="run only this implementation (may be repeated)")
    add_common(parser)


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options of model, rounds and clock."""
    models = sorted(path.stem for path in (ROOT / "conf/model").glob("*.yaml"))
    parser.add_argument("--model", default="llama-demo", choices=models, metavar="NAME", help="a file of conf/model (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="timed runs of each implementation (default %(default)s)")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: measure the CPU time of the process, for a machine under other load (set OMP_NUM_THREADS=1 too: idle threads spin)",
    )


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def compared(script: str, options: argparse.Namespace, implementations: Sequence[str], *more: str) -> tuple[Results, dict[str, Any]]:
    """Measure the implementations of a comparison of trainings, and return their medians and what is known of the machine."""
    settings = {key: getattr(options, key) for key in ("model", "dtype", "batch", "sequence", "steps", "clock", *more)}
    machine = process(script, {"implementation": "machine", **settings})
    model = f"{options.model}, {machine['parameters'] / 1e6:.1f} M parameters; {options.batch} x {options.sequence} tokens, {options.dtype}"
    print(f"{model}; {machine['device']}, {machine['peak'] / 1e12:.3g} TFLOP/s in a matrix product", flush=True)
    found = rounds(script, [name for name in implementations if name in (options.only or implementations)], settings, options.rounds)
    print(f"medians of {options.rounds} rounds of {options.steps} steps, {options.clock} clock\n")
    return found, machine


def resident(field: str, pid: int | str = "self") -> int:
    """A line of /proc/PID/status in bytes: VmRSS is the resident memory, VmHWM its peak; 0 if the process has none."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    return 0
