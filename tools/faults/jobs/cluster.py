"""The dev cluster, and jobs on it."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

from tools.faults.job import ROOT

DEVCLUSTER = str(ROOT / "tools" / "devcluster")
#: Slurm notices a crashed node later than the ranks do, as on real clusters, where it takes minutes.
SETTINGS = ("SlurmdTimeout=30",)
#: States of a job that may still run.
ALIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
NODES = ("n1", "n2", "n3", "n4")


class Cluster:
    """A dev cluster that is running, or that is started and stopped by this context.

    Its folder and ports are those of DEVCLUSTER_BASE and DEVCLUSTER_PORT.
    """

    def __init__(self) -> None:
        self._was_running = False

    def __enter__(self) -> Cluster:
        self._was_running = subprocess.run([DEVCLUSTER, "status"], capture_output=True).returncode == 0
        words = [word for setting in SETTINGS for word in ("--set", setting)]
        done = subprocess.run([DEVCLUSTER, "start", *words], stdout=subprocess.PIPE, text=True)
        if done.returncode:  # it has said why
            raise SystemExit(done.returncode)
        os.environ["SLURM_CONF"] = done.stdout.strip().partition("=")[2]
        return self

    def __exit__(self, *_: object) -> None:
        if not self._was_running:
            subprocess.run([DEVCLUSTER, "stop"])

    def crash(self, node: str) -> None:
        """Kill the slurmd of a node and every other process on it."""
        subprocess.run([DEVCLUSTER, "kill", node], check=True)

    def restore(self) -> None:
        """Start the nodes that were crashed, and wait until all nodes are free."""
        for node in self._down():
            subprocess.run([DEVCLUSTER, "revive", node], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 90
        while left := [
            line for line in command("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines() if not line.endswith("idle")
        ]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"nodes are not free 90 s after the end of their job: {sorted(set(left))}")
            for line in left:
                if line.split()[1].startswith(("down", "drain")):
                    command("scontrol", "update", f"nodename={line.split()[0]}", "state=resume", check=False)
            time.sleep(0.5)

    def _down(self) -> list[str]:
        base = Path(os.environ["SLURM_CONF"]).parent
        return [node for node in NODES if not _is_alive(base / "run" / f"slurmd.{node}.pid")]


def _is_alive(pid_file: Path) -> bool:
    try:
        return bool(Path(f"/proc/{int(pid_file.read_text())}/cmdline").read_bytes())
    except (OSError, ValueError):
        return False


def command(*words: str, check: bool = True) -> str:
    """Run a command of Slurm, and return what it prints.

    Raises:
        RuntimeError: it failed; with its messages. Not with check=False.
    """
    for attempt in range(5):
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=ROOT)
        if not done.returncode or not check:
            return done.stdout
        if "Socket timed out" not in done.stderr and "Unable to contact" not in done.stderr:
            break
        time.sleep(1 + attempt)
    raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def sbatch(*words: str, environment: dict[str, str] | None = None) -> int:
    """Submit a job, and return its id.

    Raises:
        RuntimeError: Slurm refuses it.
    """
    done = subprocess.run(
        ["sbatch", "--parsable", *words], capture_output=True, text=True, timeout=60, cwd=ROOT,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"sbatch {' '.join(words)}: {done.stderr.strip()}")
    return int(done.stdout.split(";")[0])


def facts(job: int) -> dict[str, str]:
    return dict(re.findall(r"(\S+?)=(\S*)", command("scontrol", "show", "job", "--oneliner", str(job))))


def is_alive(found: dict[str, str]) -> bool:
    """Whether a job waits, runs or ends at the moment."""
    return found["JobState"] in ALIVE


def describe(found: dict[str, str]) -> str:
    """State and exit code of a job, for messages."""
    return f"{found['JobState']}, exit code {found['ExitCode']}, {found['Restarts']} restarts, reason {found['Reason']}"
