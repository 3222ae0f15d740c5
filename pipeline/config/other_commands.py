"""Composition of other command lines than that of this process, with every problem of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from pipeline.common.errors import UserError
from pipeline.config.command_line import Command, parse
from pipeline.config.compose import diagnose, to_run_config
from pipeline.config.composition_errors import COMPOSITION_ERRORS
from pipeline.config.paths import CONF_DIR
from pipeline.config.rules import check
from pipeline.config.schema import RunConfig

Sized = Callable[[RunConfig], tuple[RunConfig, int]]
"""Configuration -> the same with the layout of its job, and the number of ranks."""


def checked(arguments: Sequence[str], sized: Sized) -> RunConfig:
    """Compose and validate a command line, beside the configuration of this run.

    Args:
        arguments: of `python -m pipeline`.
        sized: gives the configuration with the layout of its job, and its number of ranks.

    Raises:
        UserError: with every problem of the command line.
    """
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        config = _composed(parse(arguments), sized)
    finally:
        GlobalHydra.instance().hydra = running
    check.check(*sized(config))
    return config


def _composed(command: Command, sized: Sized) -> RunConfig:
    """The configuration; a command line that does not compose is reported with what else is wrong in it."""
    if not command.violations:
        try:
            with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
                return to_run_config(compose("config", command.overrides))
        except COMPOSITION_ERRORS:
            GlobalHydra.instance().clear()
    violations, valid = diagnose(command)
    try:
        config = to_run_config(valid)
        violations += check.violations(*sized(config))
    except UserError as more:
        violations += more.violations
    if not violations:  # no argument explains it
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            return to_run_config(compose("config", command.overrides))
    raise UserError(violations)
