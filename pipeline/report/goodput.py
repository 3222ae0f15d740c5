"""Node-hours of many runs by bucket and cause beside Slurm's accounting, with nodes that were blamed, energy and CO2."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.common import metrics_file, page
from pipeline.common.errors import UserError
from pipeline.common.texts import count, first_names, table_lines
from pipeline.report import run as runs
from pipeline.report import run_files
from pipeline.report.account import BUCKETS, Account, account_of
from pipeline.report.answers import moment, short
from pipeline.report.run import State

#: What sacct is asked, before job ids. JobIDRaw is the number by which a job knows itself, also in an array.
SACCT = ("sacct", "-a", "-X", "-P", "-n", "-D", "-o", "JobIDRaw,State,ElapsedRaw,NNodes,ConsumedEnergyRaw,Start,End", "-j")
#: Causes, nodes and jobs that are shown; JSON has all.
_MOST = 20
#: Node-seconds and joules of jobs, or why they are unknown.
Sacct = dict[str, tuple[float, float]] | str


def read(run_dir: Path, since: float, now: float) -> tuple[Account, float | None, tuple[str, ...]]:
    """Return the account of a run, the planned power of a node in W, None if it is unknown, and what is damaged or missing.

    Jobs that run are counted up to `now`; `since` is that of account_of.
    """
    run, lines = runs.read(run_dir, now), run_files.read_metrics(run_dir)
    config, problems = run_files.read_config(run_dir, whole=True)
    until = now if run.state in (State.RUNNING, State.STARTING) else run.last_sign or 0.0
    account = account_of(run, metrics_file.columns(lines.content), until, since)
    return account, _watts(run_dir, config) if account.seconds else None, tuple(dict.fromkeys((*run.problems, *lines.problems, *problems)))


def _watts(run_dir: Path, config: Mapping[str, Any]) -> float | None:
    """Planned power of a node: that of cluster.hardware, or of the GPU that the run has found, for each of its ranks."""
    from pipeline.config import hardware  # loads omegaconf

    cluster = config.get("cluster") or {}
    gpus = [event["gpu"] for event in run_files.read_events(run_dir).content if event.get("gpu")]
    try:
        name = cluster.get("hardware")
        gpu = hardware.load(name) if name else hardware.of_device(gpus[-1]) if gpus else None
    except UserError:
        return None
    return None if gpu is None else (gpu.watts + gpu.node_watts) * max(cluster.get("tasks_per_node") or 1, 1)


def read_sacct(printed: str) -> dict[str, tuple[float, float]]:
    """Return node-seconds and joules of each job, all of its stays summed, from what SACCT prints; raises ValueError for other lines."""
    jobs: dict[str, tuple[float, float]] = {}
    for line in filter(None, printed.splitlines()):
        try:
            job, _, elapsed, nodes, energy, *_ = line.split("|")
            seconds, joules = float(elapsed) * float(nodes), float(energy or 0)
        except ValueError:
            raise ValueError(f"sacct printed {line!r}, and not the fields {SACCT[-2]}") from None
        known = jobs.get(job, (0.0, 0.0))
        jobs[job] = known[0] + seconds, known[1] + (joules if joules < 2**63 else 0.0)  # Slurm prints 2^64 - 2 for none
    return jobs


def summary(run_dirs: Sequence[Path], since: float, now: float, sacct: Callable[[list[str]], Sacct], co2: float | None) -> dict[str, Any]:
    """Return what text, page and JSON show.

    Args:
        since, now: as of read.
        sacct: returns what read_sacct returns for jobs.
        co2: grams for a kWh; None if it is unknown.
    """
    by_run = {str(run_dir): read(run_dir, since, now) for run_dir in run_dirs}
    whole, used = Account(), {run: account for run, (account, _, _) in by_run.items() if account.seconds}
    for account in used.values():
        whole.add(account)
    answer = sacct(sorted(whole.jobs)) if whole.jobs else {}
    joules = {} if isinstance(answer, str) else {job: answer[job][1] for job in whole.jobs if job in answer}
    planned = unknown = 0.0
    for run, account in used.items():
        seconds, watts = sum(account.seconds.values()) - sum(account.jobs[job] for job in account.jobs if joules.get(job)), by_run[run][1]
        planned += seconds * (watts or 0.0) / 3.6e6
        unknown += seconds / 3600 if watts is None else 0.0
    measured = sum(joules.values()) / 3.6e6
    energy = {"measured_kwh": measured, "planned_kwh": planned, "unknown_node_hours": unknown}
    lost: list[dict[str, Any]] = []
    for cause in {cause for bucket, cause, _ in whole.seconds if bucket == "lost"}:
        again, rest = (whole.seconds.get(("lost", cause, is_again), 0.0) / 3600 for is_again in (True, False))
        lost.append({"cause": cause, "node_hours": again + rest, "made_again": again, "starts": whole.starts["lost", cause]})
    blamed = sorted(whole.blamed.items(), key=lambda item: (-item[1], item[0]))
    return {
        "since": since,
        "now": now,
        "runs": [{"run_dir": run, "jobs": list(account.jobs), **account.hours()} for run, account in used.items()],
        "without": [run for run in by_run if run not in used],
        "total": whole.hours(),
        "lost": sorted(lost, key=lambda loss: -loss["node_hours"]),
        "nodes": [{"node": node, "times": times, "reason": reason} for (node, reason), times in blamed],
        "jobs": {job: seconds / 3600 for job, seconds in whole.jobs.items()},
        "sacct": answer if isinstance(answer, str) else {job: answer[job][0] / 3600 for job in joules},
        "energy": {**energy, "co2_kg": None if co2 is None else (measured + planned) * co2 / 1000},
        "problems": {run: list(problems) for run, (_, _, problems) in by_run.items() if problems},
    }


def lines(content: Mapping[str, Any]) -> list[str]:
    """What a summary says besides its tables: accounting, energy and CO2, and what is damaged."""
    jobs, sacct, energy, said = content["jobs"], content["sacct"], content["energy"], []
    if isinstance(sacct, str):
        said.append(f"sacct: not compared: {sacct}")
    elif jobs:
        more = {job: sacct.get(job, 0.0) - hours for job, hours in jobs.items()}
        differ = sorted((job for job in more if abs(more[job]) * 3600 >= 1), key=lambda job: -abs(more[job]))
        named = first_names([f"job {job}: {more[job]:+.3f}{'' if job in sacct else ', unknown to sacct'}" for job in differ], _MOST)
        said.append(f"sacct: {sum(sacct.values()):,.3f} node-hours of {count(len(sacct), 'job')}")
        said.append(f"not in a run directory's records: {sum(more.values()):+,.3f} node-hours{named and f' ({named})'}")
    kinds = {"measured_kwh": "kWh by Slurm", "planned_kwh": "kWh at planned power", "unknown_node_hours": "node-hours of unknown power"}
    said.append(f"energy: {', '.join(f'{energy[name]:,.3f} {text}' for name, text in kinds.items() if energy[name]) or 'none'}")
    said += [f"CO2: {energy['co2_kg']:,.3f} kg, of the energy that is known"] if energy["co2_kg"] else []
    return [*said, *(f"{run}: {problem}" for run, problems in content["problems"].items() for problem in problems)]


def _hours(value: float) -> str:
    """Node-hours, also those of a minute."""
    return f"{value:,.3f}" if value >= 0.1 else f"{value:.2g}"


def head(content: Mapping[str, Any]) -> str:
    """A summary in one sentence."""
    total, without = content["total"], content["without"]
    counted = f"{count(len(content['runs']), 'run')} and {count(len(content['jobs']), 'Slurm job')}"
    share = page.share(total["buckets"]["training"], total["node_hours"])
    rest = f"; none of {first_names(without, 4)}" if without else ""
    hours = f"{_hours(total['node_hours'])} node-hours of {counted}"
    return f"since {moment(content['since'])}: {hours}, {share} of them in steps that count{rest}"


def tables(content: Mapping[str, Any]) -> list[tuple[str, str, list[str], list[list[Any]]]]:
    """The tables of a summary: title, explanation, head and rows."""
    total, accounts = content["total"], content["runs"]
    folder = os.path.commonpath([Path(run["run_dir"]).absolute().parent for run in accounts] or [Path.cwd()])
    rows: list[list[Any]] = []
    for name, hours in [*((os.path.relpath(run["run_dir"], folder), run) for run in accounts), ("total", total)]:
        shares = (page.share(hours["buckets"][bucket], hours["node_hours"]) for bucket in BUCKETS)
        rows.append([name, _hours(hours["node_hours"]), *shares])
    rows.append(["node-hours", _hours(total["node_hours"]), *map(_hours, total["buckets"].values())])
    lost = [[short(loss["cause"]), _hours(loss["node_hours"]), _hours(loss["made_again"]), loss["starts"]] for loss in content["lost"]]
    nodes = [[blame["node"], blame["times"], short(blame["reason"])] for blame in content["nodes"]]
    return [
        ("Node-hours", "", ["run", "node-hours", *BUCKETS], rows),
        ("Lost", "", ["lost to", "node-hours", "steps made again", "starts"], lost[:_MOST]),
        ("Nodes", "", ["blamed node", "times", "reason"], nodes[:_MOST]),
    ]


def text(content: Mapping[str, Any]) -> str:
    """Return a summary for a terminal."""
    blocks = [[head(content)]]
    for _, _, names, rows in tables(content):
        right = [place for place, is_right in enumerate(page.numeric_columns(names, rows)) if is_right]
        blocks += [table_lines([names, *([str(cell) for cell in row] for row in rows)], right)] if rows else []
    return "\n\n".join("\n".join(block) for block in [*blocks, lines(content)])


def html(content: Mapping[str, Any]) -> str:
    """Return a summary as a page."""
    shown = {"verdict": head(content), "more": "; ".join(lines(content)), "tables": [table for table in tables(content) if table[-1]]}
    none = dict.fromkeys(("problems", "answers", "charts", "marked", "first"), ())
    return page.render("run_report.html.jinja", "Node-hours", level="neither", **shown, **none)
