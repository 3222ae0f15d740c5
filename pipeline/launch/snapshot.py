"""The snapshot of what was submitted, and the copy of the configuration files that submitted jobs read.

A snapshot has code, settings, environment and job texts, as a folder RUN/snapshots/NAME.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash
from omegaconf import OmegaConf

from pipeline.common import git_commit
from pipeline.common.atomic_files import atomic_folder, report_disk_full
from pipeline.common.errors import UserError
from pipeline.common.git_commit import git
from pipeline.config.paths import CONF_DIR
from pipeline.config.schema import RunConfig

log = logging.getLogger("pipeline")

#: In a run directory.
FOLDER = "snapshots"
#: Set in a job whose submission has written a snapshot: its folder.
VARIABLE = "PIPELINE_SNAPSHOT"
#: The rest of the difference to the commit is left out, and so are untracked files that are larger or of other kinds.
DIFF_BYTES, UNTRACKED_BYTES, UNTRACKED_FILES = 5_000_000, 100_000, 200
_SOURCE = (".py", ".yaml", ".yml", ".sh", ".sbatch", ".toml", ".json", ".md", ".txt", ".cfg", ".jinja")
#: Variables that change how a job computes or communicates; none of them is a secret.
_VARIABLES = (
    r"(NCCL|RCCL|GLOO|UCX|FI|MPICH|MPIR_CVAR|OMPI_MCA|OMP|MKL|CUDA|HIP|ROCR|TORCH|PYTORCH|PIPELINE|SLURM)_|(LOADEDMODULES|VIRTUAL_ENV)$"
)
_SECRET = r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|JWT"
#: A user's own folder is a few groups of files; more is another folder, such as the root of a file system.
MOST_FILES = 2000


def path(run_dir: Path) -> Path:
    """Return the folder of a snapshot that is written now, named by the id of this job, else the time; none of the earlier ones."""
    wanted = run_dir.absolute() / FOLDER / (os.environ.get("SLURM_JOB_ID") or time.strftime("%Y-%m-%dT%H-%M-%S"))
    others = (wanted.with_name(f"{wanted.name}-{number}") for number in range(2, 10_000))
    return next(folder for folder in (wanted, *others) if not folder.exists())


def write(
    folder: Path, arguments: Sequence[str], configs: Mapping[str, str], texts: Mapping[str, str], conf: Mapping[str, Path] | None = None
) -> None:
    """Write a snapshot, which appears with all of its files.

    It has snapshot.json (time, command, commit, versions, variables), changes.diff and untracked/ (the code, beside its commit),
    config/JOB.yaml, jobs/JOB.sbatch, and conf/ with the configuration files that the jobs read.

    Args:
        configs: name of a job -> its resolved configuration, YAML.
        texts: name of a job -> its script; empty in a job that sbatch started.
        conf: configuration files, name in conf/ -> file (`files`); None for none.

    Raises:
        UserError: the disk is full.
        OSError: the folder cannot be written.
    """
    with report_disk_full(folder.parent), atomic_folder(folder) as partial:
        for kind, suffix, content in (("config", "yaml", configs), ("jobs", "sbatch", texts)):
            for job, text in content.items():
                _write(partial / kind / f"{job}.{suffix}", text.encode())
        _copy(partial / "conf", conf or {})
        code = _code(partial)
        _write(partial / "snapshot.json", (json.dumps(_facts(arguments) | code, indent=1) + "\n").encode())


def write_in_job(run_dir: Path, arguments: Sequence[str], config: RunConfig) -> Path | None:
    """Write the snapshot of a job that was submitted without one, by sbatch alone, and return its folder.

    Args:
        run_dir: of the job, which exists.

    Returns:
        The folder; that of the submission if it has written one; None if it cannot be written, which is logged.
    """
    if (submitted := os.environ.get(VARIABLE)) and Path(submitted).is_dir():
        return Path(submitted)
    try:
        folder = path(run_dir)
        write(folder, arguments, {config.stage.name: resolved(config)}, {})
    except (OSError, UserError) as error:
        log.warning("%s: no snapshot was written: %s", run_dir, error)
        return None
    return folder


def resolved(config: RunConfig) -> str:
    """Return a configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def _facts(arguments: Sequence[str]) -> dict[str, Any]:
    packages = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions() if dist.metadata["Name"]}
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "arguments": list(arguments),
        "directory": str(Path.cwd()),
        "version": git_commit.version(),
        "commit": git_commit.commit(),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "host": {"name": platform.node(), "system": platform.platform()},
        "torch": packages.get("torch"),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
        "variables": {n: v for n, v in sorted(os.environ.items()) if re.match(_VARIABLES, n) and not re.search(_SECRET, n)},
    }


def _code(partial: Path) -> dict[str, Any]:
    """Write what differs from the commit, and return what was left out: bytes of the difference, and untracked files."""
    root = git_commit.PACKAGE.parent
    if not (root / ".git").exists() or (difference := git("--no-optional-locks", "diff", "--binary", "HEAD")) is None:
        return {}
    if difference:
        _write(partial / "changes.diff", difference[:DIFF_BYTES])
    untracked = (
        (git("--no-optional-locks", "ls-files", "--others", "--exclude-standard", "-z") or b"").decode(errors="surrogateescape").split("\0")
    )
    left_out: list[str] = []
    copied = 0
    for file in filter(None, untracked):
        source = root / file
        small = source.suffix in _SOURCE and source.is_file() and not source.is_symlink() and source.stat().st_size <= UNTRACKED_BYTES
        if small and copied < UNTRACKED_FILES:
            _write(partial / "untracked" / file, source.read_bytes())
            copied += 1
        elif len(left_out) < UNTRACKED_FILES:
            left_out.append(file.encode(errors="replace").decode())
    return {"changes_left_out": max(0, len(difference) - DIFF_BYTES), "untracked_left_out": left_out}


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def hashed(folder: Path, sources: Sequence[Path]) -> Path:
    """Return the folder for a copy inside of `folder`, named after the content of the files.

    Args:
        sources: a user's own folders with configuration files.

    Raises:
        UserError: as `files`.
    """
    content = xxhash.xxh3_64()
    for name, path in sorted(files(sources).items()):
        content.update(f"{name}\n".encode() + path.read_bytes())
    return (folder / f".conf-{content.hexdigest()}").absolute()


def files(sources: Sequence[Path]) -> dict[str, Path]:
    """Return the configuration files: name in the copy -> file. Those of conf/ come before a user's own, as in Hydra's search path.

    Raises:
        UserError: a user's own folder has too many files.
    """
    paths: dict[str, Path] = {}
    for source in [*reversed(sources), CONF_DIR]:
        for number, path in enumerate(_yaml(source)):
            if number >= MOST_FILES:
                rule = f"has more than {MOST_FILES:,} .yaml files, and jobs read a copy of them"
                raise UserError.of("argument", f"--config-dir={source}", rule, "name a folder with experiment/NAME.yaml and no other files")
            paths[path.relative_to(source).as_posix()] = path
    return paths


def _yaml(source: Path) -> Iterator[Path]:
    """Yield the configuration files of a folder; hidden folders are copies of earlier submissions, and environments."""
    for folder, folders, names in os.walk(source):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder) / name for name in sorted(names) if name.endswith(".yaml"))


def write_conf_copy(conf: Path, sources: Sequence[Path]) -> None:
    """Write the copy to a folder, which appears with all of its files, unless it exists; sources and errors as of `files`."""
    if not conf.is_dir():
        with atomic_folder(conf) as folder:
            _copy(folder, files(sources))


def _copy(folder: Path, files: Mapping[str, Path]) -> None:
    for name, path in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
