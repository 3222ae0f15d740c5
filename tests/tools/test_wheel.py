"""An installed wheel, used from an empty folder: help, version, own settings, completion, a stage, a dry run and a job."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import ROOT

Run = Callable[..., str]


def install(folder: Path) -> None:
    """Build the wheel from a copy of the tracked files, and install it into an environment that has the packages of this one."""
    folder.mkdir()
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "source" / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, "."]
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in ([*git, "init", "--quiet"], [*git, "commit", "--quiet", "--allow-empty", "-m", "Built here"], build):
        subprocess.run(command, cwd=folder / "source", check=True, timeout=120)
    venv.create(folder / "venv")
    (wheel,) = folder.glob("*.whl")
    python = folder / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True, timeout=120)
    (packages,) = (folder / "venv/lib").glob("*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")


@pytest.fixture(scope="module")
def tannschen(once, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`tannschen(*words)` runs the installed command in a folder that is empty at first; returns what it printed, both streams."""
    folder, cwd = once("wheel", install), tmp_path_factory.mktemp("elsewhere")
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIPELINE_CONF")}

    def run(*words: object, code: int = 0, **variables: str) -> str:
        command = [folder / "venv/bin/tannschen", *map(str, words)]
        done = subprocess.run(
            command, cwd=cwd, env=kept | {"OMP_NUM_THREADS": "1"} | variables, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    return run


@pytest.mark.long
def test_an_installed_wheel(tannschen: Run, tmp_path: Path) -> None:
    whole = tannschen("--help")
    assert "stage=pretrain" in whole
    assert "model=apertus-70b|" in whole
    assert "stage.max_tokens=256" in tannschen("stage=generate", "--help")
    assert tannschen("--version").startswith("tannschen 0.1.0 (")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/short.yaml").write_text("# @package _global_\ntraining: {steps: 123}\n")
    assert "steps: 123" in tannschen(f"--config-dir={tmp_path}", "experiment=short", "--cfg=job")
    assert "complete -o nospace -o default -F" in tannschen("-sc", "install=bash")
    line = "tannschen model=llama3-8"
    assert tannschen("-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line))).split() == ["model=llama3-8b"]
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"The old captain crossed the river {n} times."}) + "\n" for n in range(20)))
    tannschen("stage=shard", f"data.input=[{text}]", "data.shards=out/shards", "clean=none", "dedup=none")
    manifest = tannschen("stage=shard", f"data.input=[{text}]", "data.shards=out/shards", "clean=none", "dedup=none")
    assert "data.shards=out/shards is complete, nothing to do" in manifest
    dry = tannschen("stage=pretrain", "dry_run=true", "dry_run.world_size=4", "cluster.tasks_per_node=2")
    assert "parameters" in dry
    submit = next(line for line in dry.splitlines() if "sbatch" in line)
    scripts = next(word.partition("=")[2] for word in submit.split() if word.startswith("PIPELINE_SLURM="))
    assert Path(scripts, "pretrain.sbatch").is_file()
    assert "site-packages/pipeline/slurm" in scripts
    sweep = ("-m", "optimizer.lr=1e-4,2e-4", "hydra/launcher=slurm", "dry_run=true", f"run_dir={tmp_path}/sweep", "stage=pretrain")
    assert f"exec bash {scripts}/pretrain.sbatch " in tannschen(*sweep)
