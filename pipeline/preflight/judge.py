"""Which nodes are bad, and why: a pure function of the results of all nodes. Loads no torch."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.common.texts import table_lines
from pipeline.config.cluster import ClusterConfig
from pipeline.preflight import node_result
from pipeline.preflight.node_result import PHASES, Result

#: A network that other jobs share varies more than devices: half of the median bandwidth is a lost rail or a bad cable.
SLOW_NETWORK = 2.0
#: Least share of a GPU's memory that is free before training, besides the context of this process.
FREE_MEMORY = 0.9
#: Least free inodes of the run directory's file system.
FREE_INODES = 1000
#: A file of 1 MB is written slowly if it takes so many seconds, and ten times the median.
SLOW_WRITE = 5.0
#: Largest difference of a clock from the median, seconds. NTP keeps milliseconds; the reading itself has the error of a collective.
CLOCK_SKEW = 1.0
#: Up to so many nodes the table has every check of every node; of more, the bad ones, and one line for each check.
ALL_ROWS = 16
HEADER = ("node", "check", "value", "median", "verdict")


@dataclass(frozen=True)
class Finding:
    """One check of one node.

    Attributes:
        median: that of all nodes, or what is required; empty if there is none.
        problem: why the node is bad; None if it is not.
    """

    node: str
    check: str
    value: str
    median: str = ""
    problem: str | None = None


def is_complete(results: Mapping[str, Result], nodes: Iterable[str]) -> bool:
    """Whether every node has finished its last all-reduce."""
    return all(results.get(node, {}).get("phase") == "complete" for node in nodes)


def bad_nodes(findings: Iterable[Finding]) -> dict[str, str]:
    """The reasons of the bad nodes, by node."""
    reasons: dict[str, list[str]] = {}
    for finding in findings:
        if finding.problem:
            reasons.setdefault(finding.node, []).append(finding.problem)
    return {node: "; ".join(problems) for node, problems in reasons.items()}


def common_problems(findings: Sequence[Finding], nodes: Sequence[str]) -> list[tuple[str, int, str]]:
    """Checks that more than half of several nodes fail, which is no fault of the nodes: (check, number of nodes, reason of one)."""
    failing: dict[str, dict[str, str]] = {}  # check -> node -> reason: a node has a finding for each rank that fails
    for finding in findings:
        if finding.problem and finding.check not in ("result", "phase"):
            failing.setdefault(finding.check, {}).setdefault(finding.node, finding.problem)
    common = {check: p for check, p in failing.items() if len(p) > len(nodes) / 2 and (len(nodes) > 1 or check == "file system")}
    return [(check, len(reasons), next(iter(reasons.values()))) for check, reasons in common.items()]


def judge(results: Mapping[str, Result], nodes: Sequence[str], cluster: ClusterConfig) -> list[Finding]:
    """Judge all results.

    Args:
        results: node -> its result, as measure.RankChecks writes it.
        nodes: of the job; one without a result is bad: its processes did not start, hang or were killed.
        cluster: GPUs per node, promised fabric, slow_factor, free_gb.

    Returns:
        The findings of all checks, in the order of the checks and of the nodes.
    """
    present = {node: results[node] for node in nodes if node in results}
    silent = "gave no result: its processes did not start, hang or were killed"
    findings = [Finding(node, "result", "none", problem=silent) for node in nodes if node not in present]
    checks: list[Callable[[Mapping[str, Result], ClusterConfig], Iterator[Finding]]] = [
        _phases, _ranks, _gpus, _memory, _products, _inside, _between, _network, _names, _file_system, _clocks, _versions,
    ]  # fmt: skip
    for check in checks:
        findings += check(present, cluster)
    return findings


def _phases(results: Mapping[str, Result], _: ClusterConfig) -> Iterator[Finding]:
    """A node is behind the others if most of them have done more; where most stopped at the same place, it may be any node's fault."""
    reached = {node: PHASES.index(result["phase"]) for node, result in results.items()}
    if not reached or min(reached.values()) == PHASES.index("complete"):
        return
    usual = statistics.median_high(reached.values())
    for node, phase in reached.items():
        error = results[node].get("error") or "it hangs, or was killed"
        if phase < usual:
            yield Finding(node, "phase", PHASES[phase], PHASES[usual], f"did not get beyond '{PHASES[phase]}', as others did ({error})")


def _ranks(results: Mapping[str, Result], _: ClusterConfig) -> Iterator[Finding]:
    for node, result in results.items():
        if failed := node_result.failed_ranks(result):
            yield Finding(node, "device", "failed", problem=f"{failed[0]}{f' (and {len(failed) - 1} more)' if failed[1:] else ''}")


def _gpus(results: Mapping[str, Result], cluster: ClusterConfig) -> Iterator[Finding]:
    """Number, ECC errors, clocks: by gpu_query, where it knows the GPUs."""
    wanted = cluster.gpus_per_node
    clocks = _median(gpu["max_sm_mhz"] for result in results.values() for gpu in _smi_gpus(result))
    for node, result in results.items():
        smi, ranks = result.get("smi") or {}, result.get("ranks", ())
        gpus = _smi_gpus(result)
        seen = max(len(gpus), len({r["gpu"] for r in ranks if r.get("gpu")}), *(r.get("gpus_seen", 0) for r in ranks), 0)
        if error := smi.get("error"):
            yield Finding(node, "GPUs", "?", str(wanted), error if wanted else None)
        elif (seen or wanted) and ranks:
            few = wanted and seen < wanted
            yield Finding(node, "GPUs", str(seen), str(wanted or ""), f"has {seen} GPUs, not {wanted}" if few else None)
        for index, gpu in enumerate(gpus):
            faults = [f"{gpu['ecc']} uncorrected ECC errors"] if gpu["ecc"] else []
            faults += [f"has {fault}" for fault in gpu["faults"]]
            faults += ["clocks are reduced: " + ", ".join(gpu["throttled"])] if gpu["throttled"] else []
            if gpu["max_sm_mhz"] and clocks and gpu["max_sm_mhz"] < 0.95 * clocks:
                faults.append(f"its highest clock is {gpu['max_sm_mhz']:g} MHz, that of others {clocks:g} MHz")
            value = f"ECC {'off' if gpu['ecc'] is None else gpu['ecc']}, {gpu['sm_mhz'] or 0:g} MHz"
            yield Finding(node, f"GPU {index}", value, problem=f"GPU {index} ({gpu['uuid']}): {', '.join(faults)}" if faults else None)


def _smi_gpus(result: Result) -> list[dict[str, Any]]:
    """The GPUs of a node, as its first rank sees them, and other ranks which see one GPU each."""
    answers = [result.get("smi"), *(rank.get("smi") for rank in result.get("ranks", ()))]
    return list({gpu["uuid"]: gpu for answer in answers if answer for gpu in answer.get("gpus", ())}.values())


def _memory(results: Mapping[str, Result], _: ClusterConfig) -> Iterator[Finding]:
    known = {node: [r for r in result.get("ranks", ()) if r["memory_gb"]] for node, result in results.items()}
    usual = _median(r["memory_gb"][0] for ranks in known.values() for r in ranks)
    for node, ranks in known.items():
        for rank in ranks:
            total, free = rank["memory_gb"]
            problem = None
            if usual and total < 0.95 * usual:
                problem = f"the GPU of rank {rank['rank']} has {total:g} GB, those of others {usual:g} GB"
            elif free < FREE_MEMORY * total:
                problem = f"the GPU of rank {rank['rank']} has {free:g} of {total:g} GB free: another process uses it"
            if problem or rank is ranks[0]:
                yield Finding(node, "GPU memory", f"{free:g} GB free of {total:g}", f"{usual:g}", problem)


def _products(results: Mapping[str, Result], cluster: ClusterConfig) -> Iterator[Finding]:
    """The slowest rank of a node against the median of all ranks: every step of training waits for it."""
    times = {node: [r for r in result.get("ranks", ()) if r["matmul_ms"]] for node, result in results.items()}
    usual = _median(r["matmul_ms"] for ranks in times.values() for r in ranks)
    for node, ranks in times.items():
        if ranks and usual:
            slowest = max(ranks, key=lambda r: r["matmul_ms"])
            ratio = slowest["matmul_ms"] / usual
            problem = f"a matrix product on rank {slowest['rank']} takes {slowest['matmul_ms']:.3g} ms, {ratio:.2f} times the median"
            yield Finding(
                node,
                "matrix product",
                f"{slowest['matmul_ms']:.3g} ms",
                f"{usual:.3g} ms",
                problem if ratio > cluster.slow_factor else None,
            )


def _inside(results: Mapping[str, Result], cluster: ClusterConfig) -> Iterator[Finding]:
    rates = {node: rate for node, result in results.items() if (rate := result.get("inside_gb_s"))}
    yield from _bandwidths("all-reduce inside", "all-reduce inside the node", rates, _median(rates.values()), cluster.slow_factor)


def _between(results: Mapping[str, Result], cluster: ClusterConfig) -> Iterator[Finding]:
    """The faster of a node's two pairs counts: in the other one its neighbor may be slow."""
    rates = {node: max(pairs.values()) for node, result in results.items() if (pairs := result.get("between_gb_s"))}
    usual = _median(rate for result in results.values() for rate in (result.get("between_gb_s") or {}).values())
    yield from _bandwidths("all-reduce between", "all-reduce with a neighbor", rates, usual, max(SLOW_NETWORK, cluster.slow_factor))


def _bandwidths(check: str, label: str, rates: Mapping[str, float], usual: float, factor: float) -> Iterator[Finding]:
    for node, rate in rates.items():
        problem = f"{label}: {rate:.3g} GB/s, the median is {usual:.3g}" if rate < usual / factor else None
        yield Finding(node, check, f"{rate:.3g} GB/s", f"{usual:.3g} GB/s", problem)


def _network(results: Mapping[str, Result], cluster: ClusterConfig) -> Iterator[Finding]:
    for node, result in results.items():
        if fields := result.get("network"):
            network = node_result.Network(**fields)
            yield Finding(node, "network", str(network), cluster.fabric or "", node_result.refused(network, cluster.fabric))


def _names(results: Mapping[str, Result], cluster: ClusterConfig) -> Iterator[Finding]:
    """A name that none of several nodes resolves is that node's fault; one that others resolve, the fault of the node that does not."""
    asked: dict[str, dict[str, str | None]] = {}
    for node, result in results.items():
        names = result.get("names") or {}
        for name, error in names.items() if "error" not in names else ():
            asked.setdefault(name, {})[node] = error
    for node, result in results.items():
        names = result.get("names") or {}
        if not names:
            continue
        host_names = [name for name in names if name in (result.get("host"), f"{node}{cluster.host_suffix}")]
        problems = [f"name server: {names['error']}"] if "error" in names else []
        for name in host_names:
            others = [error for other, error in asked.get(name, {}).items() if other != node]
            if names[name] or (others and all(others)):
                problems.append(f"its host name {name} is not resolved ({names[name] or others[0]})")
        for name, error in names.items():
            if name != "error" and name not in host_names and error and any(e is None for e in asked[name].values()):
                problems.append(f"does not resolve the host name {name} ({error}), which others do")
        yield Finding(node, "host names", f"{sum(e is None for e in names.values())} of {len(names)}", "", "; ".join(problems) or None)


def _file_system(results: Mapping[str, Result], cluster: ClusterConfig) -> Iterator[Finding]:
    states = {node: state for node, result in results.items() if (state := result.get("file_system"))}
    usual = _median(state.get("seconds") for state in states.values())
    for node, state in states.items():
        problem = file_system_problem(state, cluster.free_gb)
        if problem is None and state.get("seconds", 0) > max(SLOW_WRITE, 10 * usual):
            problem = f"{state['folder']}: 1 MB was written in {state['seconds']:.3g} s, the median is {usual:.3g} s"
        value = f"{state.get('seconds', 0):.3g} s, {state.get('free_gb', 0):.4g} GB free"
        yield Finding(node, "file system", value, f"{usual:.3g} s", problem)


def file_system_problem(state: Mapping[str, Any], free_gb: float) -> str | None:
    """Why a file system (file_system.check) cannot take a run; None if it can."""
    numbers = f"{state.get('free_gb', 0):.4g} of {state.get('total_gb', 0):.4g} GB and {state.get('free_inodes')} inodes are free"
    where = state.get("folder", "run_dir")
    if state.get("error"):
        return f"{where}: a file of 1 MB cannot be written, flushed and read back: {state['error']} ({numbers})"
    if state.get("free_gb", free_gb) < free_gb:
        return f"{where}: {numbers}, less than cluster.free_gb={free_gb:g}"
    if state.get("free_inodes") is not None and state["free_inodes"] < FREE_INODES:
        return f"{where}: {numbers}; {FREE_INODES} inodes are required"
    if state.get("quota"):
        return f"{where}: quota exceeded: {state['quota'][0]}"
    return None


def _clocks(results: Mapping[str, Result], _: ClusterConfig) -> Iterator[Finding]:
    """All nodes read their clocks as they leave the same collectives; the median over the collectives of the difference is the skew."""
    readings = {node: clock for node, result in results.items() if (clock := result.get("clock"))}
    usual = [statistics.median(row) for row in zip(*readings.values(), strict=False)]
    for node, clock in readings.items():
        skew = statistics.median(reading - median for reading, median in zip(clock, usual, strict=False))
        problem = f"its clock differs by {skew:+.3g} s from the median" if abs(skew) > CLOCK_SKEW else None
        yield Finding(node, "clock", f"{skew:+.3f} s", "0 s", problem)


def _versions(results: Mapping[str, Result], _: ClusterConfig) -> Iterator[Finding]:
    """The most frequent version counts; of two equally frequent ones, that of the first node."""
    known = {node: versions for node, result in results.items() if (versions := result.get("versions"))}
    names = list(dict.fromkeys(name for versions in known.values() for name in versions))
    usual = {name: Counter(versions.get(name) for versions in known.values()).most_common(1)[0][0] for name in names}
    for node, versions in known.items():
        other = [f"{name} is {versions.get(name)}, on most nodes {usual[name]}" for name in names if versions.get(name) != usual[name]]
        value = f"torch {versions.get('torch')}, commit {str(versions.get('commit'))[:12]}"
        yield Finding(node, "versions", value, "", "; ".join(other) or None)


def _median(values: Iterable[float | None]) -> float:
    """The median of what is known, 0 if nothing is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else 0.0


def table(findings: Sequence[Finding], nodes: Sequence[str], bad: Mapping[str, str]) -> str:
    """Render the findings, and reasons that no finding has, such as those of the bisection.

    Args:
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
    return "\n".join(table_lines([HEADER, *rows]))


def verdict(nodes: Sequence[str], bad: Mapping[str, str]) -> str:
    """The last line: how many nodes are bad, and which."""
    if not bad:
        return f"preflight: all {len(nodes)} nodes passed" if len(nodes) > 1 else "preflight: the node passed"
    return f"preflight: {len(bad)} of {len(nodes)} nodes bad: " + "; ".join(f"{node}: {reason}" for node, reason in bad.items())
