"""The wheel: the package, with conf/ and slurm/ of the repository root inside of it, and the commit that it was built from."""

import shutil
import subprocess
from pathlib import Path

from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parents[1]
#: Folders of the repository root that are part of the package.
FOLDERS = ("conf", "slurm")


class BuildPy(build_py):
    """setuptools' build of the package. An editable install has nothing to copy: the package finds the folders beside itself."""

    def run(self) -> None:
        """Build the package from nothing, such that no file of an earlier build remains."""
        package = Path(self.build_lib) / "pipeline"
        if not self.editable_mode:
            shutil.rmtree(package, ignore_errors=True)
        super().run()
        if self.editable_mode:
            return
        for name in FOLDERS:
            shutil.copytree(ROOT / name, package / name)
        if commit := _commit():
            (package / "COMMIT").write_text(commit + "\n", encoding="ascii")

    def get_source_files(self) -> list[str]:
        """The files of a source distribution: also those that `run` copies, and this one."""
        more = [path.relative_to(ROOT) for name in FOLDERS for path in sorted((ROOT / name).rglob("*")) if path.is_file()]
        return [*super().get_source_files(), *map(str, more), str(Path(__file__).resolve().relative_to(ROOT))]


def _commit() -> str:
    """The commit of the repository, with "-dirty" if files were changed; empty without git, or outside of a checkout."""
    if not (ROOT / ".git").exists():
        return ""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
