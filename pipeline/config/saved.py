"""The configuration of a run from its run directory, as it was when its last job began."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.common.errors import UserError
from pipeline.config.schema import RunConfig, StageConfig
from pipeline.models.config_classes import from_dict


def read(run_dir: Path, key: str) -> RunConfig:
    """Return the configuration that a job wrote to its run directory.

    Args:
        key: the configuration key that names it.

    Raises:
        UserError: config.yaml is not there, or is not a configuration of this version.
    """
    path = run_dir / "config.yaml"
    fix = "pass the run_dir of a pretrain job"
    if not path.is_file():
        raise UserError.of(key, run_dir, "has no config.yaml", fix)
    try:
        stored = OmegaConf.load(path)
        model, stage = stored.pop("model"), stored.pop("stage", {"name": "pretrain"})
        typed = OmegaConf.structured(RunConfig(model=from_dict(OmegaConf.to_container(model)), stage=StageConfig(stage["name"])))
        config = OmegaConf.to_object(OmegaConf.merge(typed, stored))
    except (OmegaConfBaseException, KeyError, TypeError, ValueError) as error:
        raise UserError.of(key, run_dir, f"config.yaml cannot be read: {str(error).splitlines()[0]}", fix) from error
    assert isinstance(config, RunConfig)
    return config
