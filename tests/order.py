"""Plugin of pytest: the order of the test files, which of the two workers of pytest-xdist runs them, and how long they take.

Files whose tests start several ranks stand first, the longest of them at the very front; the other files follow, the longest of them last.
The first worker takes files from the front and the second one from the back, until they meet: at files of a second, so that neither waits
for the other. Thus at most one world of ranks runs at a time, except at the end.

With --quick, only tests of one process run that take, in the mean of their parameters, at most QUICK_SECONDS, or of which no time is known.
"""

from __future__ import annotations

import json
import random
import statistics
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest

#: File of tests -> seconds that its tests took: those of the default tier, and those marked `long`; and the functions that are too slow for
#: --quick. Written by tools/test --record.
DURATIONS = Path(__file__).with_name("durations.json")
QUICK_SECONDS = 0.1


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("order of the tests")
    group.addoption("--shuffle", metavar="SEED", type=int, help="random order of the files, and of the tests in every file")
    group.addoption("--quick", action="store_true", help="only fast tests of one process")
    group.addoption("--record", action="store_true", help=f"write how long every file took to tests/{DURATIONS.name}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(config.getoption("record")), "durations of files")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "worlds" in getattr(item, "fixturenames", ()) or item.get_closest_marker("slurm"):
            item.add_marker("world")
    recorded = read_durations()
    if config.getoption("quick"):
        slow = {f"{name}::{function}" for name, entry in recorded.items() for function in entry.get("slow", [])}
        left_out = [item for item in items if item.get_closest_marker("world") or item.nodeid.partition("[")[0] in slow]
        config.hook.pytest_deselected(items=left_out)
        kept = set(items).difference(left_out)
        items[:] = [item for item in items if item in kept]
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(file_of(item.nodeid), []).append(item)
    seed = config.getoption("shuffle")
    if seed is None:
        long = config.getoption("markexpr") != "not long"
        several_ranks = {name: any(item.get_closest_marker("world") for item in tests) for name, tests in files.items()}
        names = sorted(files, key=lambda name: place(recorded.get(name, {}), several_ranks[name], long))
    else:
        order = random.Random(seed)
        names = order.sample(sorted(files), len(files))
        for tests in files.values():
            order.shuffle(tests)
    items[:] = [item for name in names for item in files[name]]


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def read_durations() -> dict[str, dict[str, Any]]:
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


def place(seconds: dict[str, Any], several_ranks: bool, long: bool) -> tuple[bool, float]:
    """The sort key of a file: see above.

    Args:
        seconds: its entry in the file of durations.
        several_ranks: whether one of its tests starts several ranks.
        long: whether tests marked `long` run.
    """
    total = seconds.get("default", 1.0) + (seconds.get("long", 0.0) if long else 0.0)
    return not several_ranks, -total if several_ranks else total


class Durations:
    """Sums the durations of tests by file and tier, and writes them at the end.

    Args:
        write: whether to write them.
    """

    def __init__(self, write: bool) -> None:
        self.write = write
        self.seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.functions: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(float)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name, long = file_of(report.nodeid), "long" in report.keywords
        self.seconds[name]["long" if long else "default"] += report.duration
        if not long:
            self.functions[name][report.nodeid.partition("[")[0]][report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        if self.write:
            known = {name: entry for name, entry in read_durations().items() if (DURATIONS.parents[1] / name).exists()}
            for name, seconds in self.seconds.items():
                known[name] = known.get(name, {}) | {tier: round(value, 1) for tier, value in sorted(seconds.items())}
                means = {function: statistics.mean(tests.values()) for function, tests in self.functions[name].items()}
                slow = {function.partition("::")[2] for function, mean in means.items() if mean > QUICK_SECONDS}
                slow |= {function for function in known[name].get("slow", []) if f"{name}::{function}" not in means}
                known[name]["slow"] = sorted(slow)
            lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known))
            DURATIONS.write_text(f"{{\n{lines}\n}}\n")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The first worker takes files from the front, every other one from the back."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FromBothEnds(LoadFileScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            if node.gateway.id != "gw0":
                self.workqueue = OrderedDict(reversed(self.workqueue.items()))
                super()._assign_work_unit(node)
                self.workqueue = OrderedDict(reversed(self.workqueue.items()))
            else:
                super()._assign_work_unit(node)

    return FromBothEnds(config, log)
