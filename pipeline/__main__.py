"""Entry point: `python -m pipeline stage=NAME key=value ...` composes and validates a configuration and runs one stage.

The same command runs as a single process, as one rank of torchrun, srun or mpirun, or with -m as a Hydra sweep.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from pipeline.common import process_exit, signals

if TYPE_CHECKING:
    from pipeline.common.errors import RunFailed, UserError
    from pipeline.config.command_line import Command

log = logging.getLogger("pipeline")


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback."""
    try:
        run()
    except KeyboardInterrupt:
        from pipeline.common import ranks
        from pipeline.common.errors import INTERRUPTED

        if ranks.error_report_delay() == 0:  # only one rank reports it
            print("interrupted; run the same command again to continue", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)


def main_and_leave() -> None:
    """Run the command line and end the process; once PyTorch is loaded, without finalizing the interpreter (see process_exit.leave)."""
    from pipeline.common import ends
    from pipeline.common.errors import STOPPED

    code = 0
    try:
        main()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        ends.report(error)
        code = 1
    if code in (0, *STOPPED):
        ends.record(code, "")
    if "torch" in sys.modules and "mpi4py.MPI" not in sys.modules:  # MPI_Finalize is part of the interpreter's finalization
        process_exit.leave(code)
    sys.exit(code)


def run() -> None:
    """Run the command line."""
    signals.record(signal.SIGUSR1)  # it may arrive during start-up, and would end the process
    gc.disable()  # start-up allocates long-lived objects; garbage collection would take a tenth of its time
    arguments = sys.argv[1:]
    if not arguments or any(argument in ("-h", "--help", "--version") for argument in arguments):
        print_information(arguments)
    else:
        run_hydra(arguments)


def print_information(arguments: list[str]) -> None:
    """Print the version, or a help text."""
    from pipeline.common.errors import UserError

    try:
        if "--version" in arguments:
            from pipeline.common.git_commit import version

            print(f"tannschen {version()}")
        else:
            from pipeline.config.usage import print_help

            print_help(arguments)
        sys.stdout.flush()
    except UserError as error:
        report(error)
    except BrokenPipeError:  # the reader (`| head`) closed the pipe; redirect the final flush of Python to /dev/null
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_hydra(arguments: list[str]) -> None:
    """Compose the configuration with Hydra and run the stage, once or for every run of a sweep."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict

    from pipeline.common.errors import UserError
    from pipeline.config import command_line, compose
    from pipeline.config.composition_errors import COMPOSITION_ERRORS
    from pipeline.config.paths import CONF_DIR
    from pipeline.launch import hydra_launcher

    compose.register()
    hydra_launcher.register()
    try:
        command = command_line.parse(arguments)
        if command.violations:
            report_overrides(command)
    except UserError as error:
        report(error)
    sys.argv[1:] = [*command.options, *command.overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors instead of printing them; user errors are printed below without a traceback
    composing = True

    def task(composed: object) -> None:
        nonlocal composing
        composing = False  # Hydra composes and validates all runs of a sweep before it starts the first one
        run_one(composed)

    try:
        if command.needs_hydra:
            hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")(task)()
            return
        # Without sweeps and Hydra flags: hydra.main would compose the configuration twice.
        with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            composed = hydra.compose("config", command.overrides, return_hydra_config=True)
    except UserError as error:  # raised by a sweep, which validates all runs before the first one starts
        report(error)
    except COMPOSITION_ERRORS:
        if not composing:
            raise
        report_overrides(command)
        raise
    except SystemExit as end:  # of Hydra, which prints a configuration or information
        sys.exit(2 if command.shows and end.code else end.code)
    HydraConfig.instance().set_config(composed)  # the dry run reads the command line from it
    with open_dict(composed):
        del composed["hydra"]
    run_one(composed, command)


def report_overrides(command: Command) -> None:
    """Print why a command line does not compose, with what else is wrong in it, and exit with code 2; return if no argument explains it."""
    from pipeline.common import ranks
    from pipeline.common.errors import UserError
    from pipeline.config import compose, layout
    from pipeline.config.rules import check

    if command.submits:
        report_chain(command)
    violations, valid = compose.diagnose(command)
    if not violations:
        return
    try:
        config = compose.to_run_config(valid)
        more = check.violations(config, layout.job_size(config, ranks.detect().world_size))
        if any(violation.key == "cluster" for violation in violations):  # without its file, the number of ranks is not that of the job
            more = [violation for violation in more if violation.key != "world size"]
        violations += more
    except UserError as error:
        violations += error.violations
    report(UserError(violations))


def report_chain(command: Command) -> None:
    """Print what is wrong with the jobs of stage=submit, whose own command line does not compose, and exit with code 2."""
    from pipeline.common.errors import UserError
    from pipeline.launch import stage_chain

    if problems := stage_chain.problems(command):
        report(UserError(problems))


def run_one(composed: object, command: Command | None = None) -> None:
    """Validate a composed configuration, of a command line or of a run of a sweep, and run its stage."""
    from omegaconf import DictConfig

    from pipeline.common import ends, git_commit, ranks
    from pipeline.common.errors import CheckFailed, RunFailed, ToBeContinued, UserError
    from pipeline.common.progress import set_up_logging
    from pipeline.config import compose, deepspeed_json, layout, ring_kernels
    from pipeline.config.rules import check
    from pipeline.launch import job

    assert isinstance(composed, DictConfig)
    config = None
    try:
        here = ranks.detect(host_suffix=composed.cluster.host_suffix)
        set_up_logging(here.rank, here.world_size)
        config = compose.to_run_config(composed)
        if config.dry_run.enabled:
            from pipeline.launch import moldable

            config = moldable.simulated(config, compose.task_arguments())
        check.check(config, layout.job_size(config, here.world_size))
        if here.rank == 0:  # stages load PyTorch, which takes seconds on a busy file system
            kind = "dry run of " if config.dry_run.enabled else ""
            log.info("%s%s: run_dir=%s, tannschen %s", kind, config.stage.name, config.run_dir, git_commit.version())
            for line in deepspeed_json.lines(config.parallel.deepspeed) if config.parallel.deepspeed else ():
                log.info("%s", line)
            if text := ring_kernels.notice(config):
                log.warning("%s", text)
        job.warn_of_other_size(config.cluster, config.stage.name, here)
        from pipeline import stages

        gc.freeze()
        gc.enable()
        stages.run(config, here)
    except UserError as error:
        if command and command.submits and not config:
            report_chain(command)
        report(error)
    except CheckFailed as failed:
        ends.record(1, str(failed).partition("\n")[0], final=True)
        ends.tell_torchrun(str(failed))
        print(failed, file=sys.stderr, flush=True)
        sys.exit(1)
    except RunFailed as failed:
        report_failure(failed)
    except ToBeContinued as stopped:
        sys.exit(stopped.code)


def report(error: UserError) -> None:
    """Print an error of the user, on one rank, and exit with code 2."""
    from pipeline.common import ends, ranks
    from pipeline.config import compose

    ends.record(2, str(error.violations[0]).partition("\n")[0], final=True)
    compose.exit_with_error(error, after=ranks.error_report_delay())


def report_failure(failed: RunFailed) -> None:
    """Record and print why a run failed, and exit with code 1; one line of it if another rank has failed before."""
    from pipeline.common import ends

    reason, _, more = str(failed).partition("\n")
    is_first = ends.is_first(ends.record(1, reason, where=failed.where))
    ends.tell_torchrun(str(failed))
    print(reason, file=sys.stderr, flush=True)
    for line in itertools.chain(more.splitlines(), failed.details()) if is_first else ():
        print(line, file=sys.stderr, flush=True)
    sys.exit(1)


if __name__ == "__main__":
    main_and_leave()
