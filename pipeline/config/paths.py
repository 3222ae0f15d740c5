"""The location of the configuration files."""

from __future__ import annotations

import os
from pathlib import Path

#: conf/ at the repository root: one folder per Hydra group, one file per option. PIPELINE_CONF names a copy, with which a job of a sweep
#: uses the files of the time of its submission.
CONF_DIR = Path(os.environ.get("PIPELINE_CONF") or Path(__file__).resolve().parents[2] / "conf")
