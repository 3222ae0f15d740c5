"""tools/pack: the file, unpacked as its lines say, starts a stage without this environment, this checkout and its Python."""

from __future__ import annotations

import os
import re
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the packages of this one by a line, so that a file is small."""
    folder = tmp_path_factory.mktemp("small")
    venv.create(folder, symlinks=True)
    (packages,) = (folder / "lib").glob("*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    (packages / "__editable___tannschen_finder.py").write_text("raise RuntimeError('packed')\n")
    return folder / "bin/python"


def pack(python: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, ROOT / "tools/pack", *words], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", ["env.tar", "env.tar.zst"])
def test_ranks_start_from_the_file(name: str, python: Path, tmp_path: Path):
    done = pack(python, tmp_path / name, "--folder", tmp_path / "node")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [name]
    unpack = re.search(r"sh -c '(.*)'\n", done.stdout)[1]
    for job in ("7", "8"):  # the second job finds what the first has unpacked
        variables = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": job, "SLURM_NODEID": "0"}
        subprocess.run(["sh", "-c", unpack], env=variables, check=True, timeout=120)
    (folder,) = (tmp_path / "node").iterdir()
    packed = re.search(r"^python: (.*)$", done.stdout, re.MULTILINE)[1]
    assert packed == f"{folder}/env/bin/python"
    code = "import os, pipeline.config.paths as paths; print(*map(os.path.realpath, (os.__file__, paths.__file__, paths.CONF_DIR)))"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONSAFEPATH": "1"}
    for words in (["-c", code], ["-m", "pipeline", "stage=plan", "model=gpt-tiny", "cluster.hardware=a100-40"]):
        found = subprocess.run([packed, *words], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert found.returncode == 0, found.stderr
        if words[0] == "-c":
            own_python = sys.base_prefix.startswith("/usr")  # which nodes have
            assert all(path.startswith(str(folder)) for path in found.stdout.split()[own_python:])


def test_mistakes(python: Path, tmp_path: Path):
    for words, expected in (
        ((tmp_path / "env.zip",), "env.zip must end in .tar or .tar.zst"),
        ((tmp_path / "env.tar", "--folder", "tmp"), "--folder=tmp must be absolute"),
        ((tmp_path / "missing/env.tar",), f"{tmp_path}/missing"),
    ):
        done = pack(python, *words)
        assert done.returncode == 2
        assert expected in done.stderr
        assert "Traceback" not in done.stderr
