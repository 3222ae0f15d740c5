"""The location of the configuration files."""

from __future__ import annotations

from pathlib import Path

#: conf/ at the repository root: one folder per Hydra group, one file per option.
CONF_DIR = Path(__file__).resolve().parents[2] / "conf"
