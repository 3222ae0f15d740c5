"""tools/install on a machine without internet: from a folder of wheels, or a message before anything is installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers import ROOT


def install(folder: Path, *arguments: object, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*prefix, "tools/install", *map(str, arguments)], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--offline",), "--offline requires a folder"),
        (("--offline", "/none"), "/none has no wheels: write them with tools/install --download FOLDER on a machine with internet"),
        (("--offlin",), "unknown argument '--offlin': only --dev, --cuda, --download FOLDER and --offline FOLDER are supported"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], said: str) -> None:
    done = install(ROOT, *arguments)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="only root can run a process without a network")
def test_an_installation_without_a_network(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    subprocess.run(["git", "clone", "--quiet", ROOT, checkout], check=True)
    downloaded = install(checkout, "--download", tmp_path / "wheels")
    assert downloaded.returncode == 0, downloaded.stderr
    installed = install(checkout, "--offline", tmp_path / "wheels", prefix=("unshare", "-n"))
    assert installed.returncode == 0, installed.stderr
    words = ("-m", "pipeline", "stage=plan", "model=llama-tiny", "cluster.hardware=h100")
    planned = subprocess.run([checkout / ".venv/bin/python", *words], cwd=checkout, capture_output=True, text=True, check=False)
    assert planned.returncode == 0, planned.stdout + planned.stderr
