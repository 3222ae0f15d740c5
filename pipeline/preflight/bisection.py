"""The nodes because of which a group of nodes fails, found by tests of smaller groups: halves, halves of halves, and at last pairs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

#: Tests groups of nodes that have no node in common, all at once; whether each passed.
Test = Callable[[list[list[str]]], list[bool]]
#: A failing group is split into so many: more steps of Slurm at a time, and fewer rounds one after the other (10 with halves for 1,024
#: nodes, 4 with eighths).
PARTS = 8


def search(nodes: Sequence[str], test: Test) -> dict[str, str]:
    """Find the bad nodes of a group that has failed; node -> reason. Empty if the failure does not occur again.

    A node is bad if it fails alone. If every part passes and the whole fails, two nodes fail together: of them, those are bad that fail
    with a third one, too.

    Args:
        nodes: of the failed group.
    """
    bad: dict[str, str] = {}
    failing, parted = [list(nodes)], []
    while failing:
        parts = [split(group, PARTS) for group in failing]
        answers = iter(test([part for group in parts for part in group]))
        passed = [[next(answers) for _ in group] for group in parts]
        failing = []
        for group, results in zip(parts, passed, strict=True):
            if all(results) and len(group) > 1:
                parted.append(group)
            for part, passes in zip(group, results, strict=True):
                if not passes and len(part) == 1:
                    bad[part[0]] = "fails the preflight also without any other node"
                elif not passes:
                    failing.append(part)
    for group in parted:
        if sides := _smallest_union(group, test):
            bad |= _of_pair(*_narrowed(*sides, test), [node for node in nodes if node not in bad], test)
    return bad


def split(group: Sequence[str], parts: int) -> list[list[str]]:
    """Split a group into parts of equal size, as nearly as possible; a group of fewer nodes into single ones."""
    count = min(parts, len(group))
    bounds = [len(group) * i // count for i in range(count + 1)]
    return [list(group[a:b]) for a, b in itertools.pairwise(bounds)]


def _smallest_union(parts: list[list[str]], test: Test) -> tuple[list[str], list[str]] | None:
    """Two groups that pass, and fail together; None if even all parts pass together now."""
    while len(parts) > 1:
        pairs = list(zip(parts[::2], parts[1::2], strict=False))
        unions = [a + b for a, b in pairs]
        for pair, passes in zip(pairs, test(unions), strict=True):
            if not passes:
                return pair
        parts = unions + parts[len(pairs) * 2 :]
    return None


def _narrowed(left: list[str], right: list[str], test: Test) -> tuple[list[str], list[str]]:
    """Halve both of two groups that fail together, as long as halves of them fail together, too."""
    while len(left) > 1 or len(right) > 1:
        a, b = split(left, 2), split(right, 2)
        both = len(a) == len(b) == 2
        rounds = [[(a[0], b[0]), (a[1], b[1])], [(a[0], b[1]), (a[1], b[0])]] if both else [[(x, y)] for x in a for y in b]
        for pairs in rounds:
            failed = [pair for pair, passes in zip(pairs, test([x + y for x, y in pairs]), strict=True) if not passes]
            if failed:
                left, right = failed[0]
                break
        else:
            return left, right
    return left, right


def _of_pair(left: list[str], right: list[str], others: Sequence[str], test: Test) -> dict[str, str]:
    """Which of two nodes that fail together are bad: those that also fail with a third one."""
    if len(left) > 1 or len(right) > 1:
        return dict.fromkeys([*left, *right], f"fails only together with others: {', '.join([*left, *right])}")
    (a,), (b,) = left, right
    third = [node for node in others if node not in (a, b)]
    if not third:
        return dict.fromkeys((a, b), f"{a} and {b} fail together, and each passes alone")
    checks = [[a, third[0]], [b, third[-1]]]
    passed = test(checks) if len(third) > 1 else [test([check])[0] for check in checks]
    bad = {n: f"fails with {b if n == a else a} and with {c}" for (n, c), passes in zip(checks, passed, strict=True) if not passes}
    return bad or {b: f"fails with {a}; each passes with others, so that leaving one of them out is enough"}
