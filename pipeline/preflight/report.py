"""The table of a preflight: node, check, value, median, verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.preflight.judge import Finding

#: Up to so many nodes the table has every check of every node; of more, the bad ones, and one line for each check.
ALL_ROWS = 16
HEADER = ("node", "check", "value", "median", "verdict")


def table(findings: Sequence[Finding], nodes: Sequence[str], bad: Mapping[str, str]) -> str:
    """Render the findings, and reasons that no finding has, such as those of the bisection.

    Args:
        findings: of judge().
        nodes: of the job.
        bad: node -> reason.
    """
    rows = [(f.node, f.check, f.value, f.median, f.problem or "ok") for f in findings]
    if len(nodes) > ALL_ROWS:
        rows = [row for row in rows if row[4] != "ok"]
        for check in dict.fromkeys(f.check for f in findings):
            passed = [f for f in findings if f.check == check and not f.problem]
            if passed:
                rows.append((f"{len(passed)} nodes", check, passed[0].value if len(passed) == 1 else "", passed[0].median, "ok"))
    shown = {f.node for f in findings if f.problem}
    rows += [(node, "all-reduces", "failed", "", reason) for node, reason in bad.items() if node not in shown]
    order = {node: index for index, node in enumerate(nodes)}
    rows.sort(key=lambda row: order.get(row[0], len(order)))
    widths = [max(len(row[i]) for row in [HEADER, *rows]) for i in range(4)]
    return "\n".join("  ".join([*(row[i].ljust(widths[i]) for i in range(4)), row[4]]).rstrip() for row in [HEADER, *rows])


def verdict(nodes: Sequence[str], bad: Mapping[str, str]) -> str:
    """The last line: how many nodes are bad, and which."""
    if not bad:
        return f"preflight: all {len(nodes)} nodes passed" if len(nodes) > 1 else "preflight: the node passed"
    return f"preflight: {len(bad)} of {len(nodes)} nodes bad: " + "; ".join(f"{node}: {reason}" for node, reason in bad.items())
