"""The `--help` text: stages, groups and all keys, generated from the dataclasses. Imports neither Hydra nor torch."""

from __future__ import annotations

from pipeline.common import knobs
from pipeline.config.paths import CONF_DIR
from pipeline.config.schema import RunConfig
from pipeline.config.stages import STAGES
from pipeline.models.config_classes import CONFIG_CLASSES


def print_usage() -> None:
    """Print the help text."""
    print("usage: python -m pipeline stage=NAME [group=option] [key=value] ...\n")
    print("stages:")
    for name, (_, summary) in STAGES.items():
        print(f"  stage={name:<16} {summary}")
    print("\ngroups (conf/GROUP/OPTION.yaml):")
    for group in sorted(p for p in CONF_DIR.iterdir() if p.is_dir() and p.name != "stage"):
        print(f"  {group.name}={'|'.join(sorted(p.stem for p in group.glob('*.yaml')))}")
    print("\nkeys:")
    _print_keys(knobs.walk(RunConfig()))
    for family, schema in CONFIG_CLASSES.items():
        print(f"\nkeys of model family {family}:")
        _print_keys(knobs.walk(schema(), "model."))
    for stage, (schema, _) in STAGES.items():
        rows = list(knobs.walk(schema(name=stage), "stage."))
        if rows:
            print(f"\nkeys of stage={stage}:")
            _print_keys(rows)
    print("\nThe command runs as a single process, as one rank of torchrun, srun or mpirun, or with -m as a Hydra sweep (--hydra-help).")


def _print_keys(rows: object) -> None:
    """Print one line per key: name, default, meaning, unit and range."""
    for key, knob, default in rows:  # type: ignore[attr-defined]
        details = ", ".join(part for part in (knob.unit, knob.rule()) if part)
        print(f"  {f'{key}={default}':<46} {knob.meaning}{f' ({details})' if details else ''}")
        if knob.item:
            _print_keys(knobs.walk(knob.item(), f"{key}.{'NAME' if isinstance(default, dict) else 'NUMBER'}."))
