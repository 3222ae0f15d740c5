"""The tables and the targets that tools/bench_data prints."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tools.bench import data_sections
from tools.bench.data_processes import Setting
from tools.bench.data_sections import Result, Section
from tools.bench.harness import verdict


def format_number(value: float) -> str:
    """Format with four significant digits, or as an integer from 1,000 upwards."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def table(section: Section, results: dict[str, Result | str]) -> str:
    """Format one line per row. The first column is the rate of ours divided by the rate of the row, in the same run.

    It is comparable between machines, the rates are not. It is left out for a row whose work is not that of ours.
    """
    lines = [section.title, f"{'':<28}{'ours / row':>11}{section.unit:>15}{'seconds':>10}"]
    ours = next(iter(results.values()))
    for name, result in results.items():
        if isinstance(result, str):
            lines.append(f"  {name:<26}{result}")
            continue
        ratio = f"{ours.rate / result.rate:.2f}" if isinstance(ours, Result) and not result.unequal else "-"
        seconds = "" if result.seconds is None else f"{result.seconds:.2f}"
        note = f"UNEQUAL WORK: {result.unequal}" if result.unequal else result.note
        lines.append(f"  {name:<26}{ratio:>11}{format_number(result.rate):>15}{seconds:>10}  {note}".rstrip())
    return "\n".join(lines)


def unequal(section: Section, results: dict[str, Result | str]) -> list[str]:
    """A line for every row whose work is not that of ours."""
    found = {name: result.unequal for name, result in results.items() if isinstance(result, Result) and result.unequal}
    return [f"UNEQUAL WORK: {section.title}: {name}: {how}" for name, how in found.items()]


@dataclass(frozen=True)
class Target:
    """A bound for a value that is computed from the medians of a section.

    Attributes:
        section: the section with its size in MB; the target applies to this size only.
        quantity: name and unit of the value.
        value: computes it from row name -> median; None where it was not measured.
    """

    section: str
    quantity: str
    value: Callable[[dict[str, Result]], float | None]
    at_least: float = 0.0
    at_most: float = math.inf

    def line(self, value: float) -> str:
        """Format the value, the bound and whether it is met."""
        return f"{self.section}: {self.quantity} {format_number(value)}, {verdict(value, self.at_least, self.at_most)}"


TARGETS = [
    Target("tokenize 40", "MB/s", lambda of: of["ours, tokenize"].rate, at_least=40),
    Target("tokenize 400", "MB/s", lambda of: of["ours, tokenize"].rate, at_least=150),
    Target("shard 40", "MB/s per core", lambda of: of["ours"].rate, at_least=10),
    Target("shard 40", "x datatrove", lambda of: of["ours"].rate / of["datatrove"].rate, at_least=10),
    Target("dedup 40", "x datatrove", lambda of: of["ours"].rate / of["datatrove"].rate, at_least=15),
    Target("loader 256", "x GPTDataset", lambda of: of["ours, tokens"].rate / of["GPTDataset"].rate, at_least=10),
    Target("loader 256", "samples/s", lambda of: of["ours, tokens"].rate, at_least=300_000),
    Target("loader 256", "samples/s with boundaries", lambda of: of["ours, document boundaries"].rate, at_least=150_000),
    Target("first batch", "seconds", lambda of: of["ours"].seconds, at_most=0.2),
    Target("first batch", "MB", lambda of: of["ours"].rate, at_most=50),
]


def targets(section: str, results: dict[str, Result | str]) -> list[str]:
    """Return the target lines of a section, without those whose rows were not measured."""
    measured, lines = {name: result for name, result in results.items() if isinstance(result, Result) and not result.unequal}, []
    for target in TARGETS:
        with contextlib.suppress(KeyError):
            if target.section == section and (value := target.value(measured)) is not None:
                lines.append(target.line(value))
    return lines


def memory(setting: Setting, size: float) -> Iterator[str]:
    """Yield the lines of the memory table. The last column is the growth per document from a quarter of the text to the full text.

    Args:
        size: MB of the largest text.
    """
    sizes = [size / 16, size / 4, size]
    texts = [data_sections.text(setting, part) for part in sizes]
    yield f"peak memory of a rank in MB; text of {', '.join(data_sections.describe(text) for text in texts)}"
    yield f"{'':<28}{'1 x':>13}{'4 x':>9}{'16 x':>10}{'16 x / 4 x':>14}{'bytes per added document':>26}"
    for stage, peaks in data_sections.memory(setting, sizes).items():
        growth = (peaks[2] - peaks[1]) / (texts[2].documents - texts[1].documents)
        cells = f"{peaks[0] / 1e6:>13,.1f}{peaks[1] / 1e6:>9,.1f}{peaks[2] / 1e6:>10,.1f}{peaks[2] / peaks[1]:>14.2f}{growth:>26,.0f}"
        yield f"  {stage:<26}{cells}"
