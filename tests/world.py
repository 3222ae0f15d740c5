"""A gloo process group that is started once and runs functions of many tests on all ranks."""

import contextlib
import dataclasses
import functools
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests import warm
from tests.helpers import environment, run_directory


class World:
    """Rank processes that wait for functions to run; others are started after a test that ended one of them."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size, self._folder, self._starts = size, folder, 0
        self._pipes: list[Connection] = []
        self._ranks: list[Any] = []

    def _start(self) -> None:
        self._starts += 1
        for rank in range(self.size):
            ours, theirs = Pipe()
            store = self._folder / f"store-{self._starts}"
            call = f"from tests.world import serve; serve({rank}, {self.size}, 'file://{store}', {theirs.fileno()})"
            self._ranks.append(warm.start("-c", call, environment=environment(), output=2, pass_fds=(theirs.fileno(),)))
            self._pipes.append(ours)
            theirs.close()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(*arguments)` on every rank at once; the results by rank. A rank that raises fails the test with its traceback."""
        if not self._ranks:
            self._start()
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # of a rank that has ended, which is found below
                pipe.send_bytes(pickle.dumps((function, arguments)))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + 600
        while len(answers) < self.size and (seconds := deadline - time.monotonic()) > 0:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            for pipe in wait(waiting, seconds):
                rank = self._pipes.index(pipe)
                answers[rank] = answer = self._answer(rank)
                if not answer[0]:  # the others may wait for it in a collective
                    deadline = min(deadline, time.monotonic() + 30)
        failures = [answers[rank][1] for rank in sorted(answers) if not answers[rank][0]]
        if missing := sorted(set(range(self.size)) - answers.keys()):
            failures.append(f"ranks {missing} did not answer")
        if missing or any(rank.poll() is not None for rank in self._ranks):
            self.stop()  # the next test gets other ranks
        assert not failures, "\n".join(failures)
        return [answers[rank][1] for rank in range(self.size)]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        """Return what a rank answers: whether its function returned, and the result or the reason."""
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            return False, f"rank {rank} ended with exit code {self._ranks[rank].wait()} (negative: of a signal)"

    def stop(self) -> None:
        """Terminate the rank processes."""
        for rank in self._ranks:
            rank.kill()
        self._pipes, self._ranks = [], []


def serve(rank: int, size: int, store: str, pipe_fd: int) -> None:
    """Be a rank."""
    pipe = Connection(pipe_fd)
    torch.set_num_threads(1)
    from pipeline.parallel import open_files
    from pipeline.parallel.serial_gloo import SERIAL_GLOO

    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"  # groups of all tests share a thread, and do not take half of the machine while they wait
    open_files.allow_many_connections()
    dist.init_process_group(SERIAL_GLOO, init_method=store, rank=rank, world_size=size)
    linear = torch.nn.functional.linear
    while True:
        function, arguments = pipe.recv()
        torch.nn.functional.linear = linear  # an engine of DeepSpeed that no test has closed may have replaced it
        try:
            pipe.send_bytes(pickle.dumps((True, function(*arguments))))  # send() would share the memory of tensors
        except BaseException:
            pipe.send_bytes(pickle.dumps((False, f"rank {rank}:\n{traceback.format_exc()}")))


def configured(*overrides: str) -> Any:
    """Return the configuration of a command line."""
    from pipeline.config import compose

    return compose.to_run_config(composition(overrides))


@functools.cache
def composition(overrides: tuple[str, ...]) -> Any:
    """Compose a command line. Hydra takes 0.2 s of a core for the groups, which are kept; setting values in a copy takes a thirtieth."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.overrides_parser import OverridesParser

    chosen = {word.partition("=")[0]: word for word in overrides if is_of_group(word)}  # the last one of a group, as Hydra does
    values = OverridesParser.create().parse_overrides([word for word in overrides if not is_of_group(word)])
    composed = pickle.loads(composition_of_groups(tuple(sorted(chosen.values()))))  # copy.deepcopy takes five times as long
    ConfigLoaderImpl._apply_overrides_to_config(values, composed)
    return composed


def is_of_group(word: str) -> bool:
    """Whether a word of a command line chooses the file of a group."""
    from pipeline.config.command_line import GROUPS

    return word.partition("=")[0] in GROUPS or word.startswith("hydra")


@functools.cache
def composition_of_groups(overrides: tuple[str, ...]) -> bytes:
    """Compose a command line as Hydra does, and pickle the result."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    from pipeline.config import compose
    from pipeline.config.paths import CONF_DIR

    compose.register()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return pickle.dumps(hydra_compose("config", list(overrides)))


class Observed(TorchDispatchMode):
    """Calls a function with each operator that runs, its arguments and its result."""

    def __init__(self, note: Callable[[Any, tuple[Any, ...], Any], object]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        self.note(operator, args, result)
        return result


def causal(tokens: torch.Tensor, documents: torch.Tensor | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Split (sequences, sequence + 1) tokens into inputs and next-token targets, as the data loader does."""
    batch = {"targets": tokens[:, 1:]}
    return tokens[:, :-1], batch if documents is None else {**batch, "documents": documents}


def tiny(*overrides: str) -> tuple[str, ...]:
    """Return the settings of a tiny fp32 model and its training as a command line; later settings replace earlier ones."""
    sizes = ("model.hidden=32", "model.heads=4", "model.vocab_size=67", "model.max_positions=16")
    batch = ("training.sequence_length=8", "training.global_batch_size=16", "training.micro_batch_size=2", "training.steps=8")
    return ("stage=pretrain", "precision=fp32", *sizes, *batch, "optimizer.warmup_steps=2", "optimizer.lr=0.01", *overrides)


def in_layout(layout: str) -> list[str]:
    """Return the settings of a layout, whose words are keys of parallel, or of training where they name it."""
    return [word if word.startswith("training.") else f"parallel.{word}" for word in layout.split()]


def composed(*overrides: str) -> Any:
    """As configured; the text of an error for other ranks, which would wait for rank 0."""
    try:
        return configured(*overrides)
    except Exception as error:
        return f"{overrides}: {error}"


def trainer(*overrides: str) -> tuple[Any, Any]:
    """Return the checked configuration and this rank's trainer. Collective."""
    from pipeline.config.layout import Layout
    from pipeline.config.rules import check
    from pipeline.parallel import mesh as meshes
    from pipeline.training.trainer import Trainer

    config = meshes.on_rank_0(lambda: composed(*overrides))
    assert not isinstance(config, str), config
    check.check(config, dist.get_world_size())
    return config, Trainer(config, meshes.build_mesh(Layout.of(config, dist.get_world_size()), torch.device("cpu")))


def queued(number: int, **values: Any) -> Any:
    """Step number `number` as callbacks see it; `values` of Step that a test reads."""
    from pipeline.checkpoint.native import TrainState
    from pipeline.training.callback import Step
    from pipeline.training.weight_update import StepResult

    zero = torch.zeros(())
    given = {"tokens": zero, "batch": {}, "loss": zero, "result": StepResult(zero, zero, zero), "more": {}} | values
    return Step(TrainState(number, 16 * number, number), samples=16, seconds=1.0, last=False, since=0.0, **given)


def share(trainer: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return this rank's samples of tensors of the global batch."""
    layout = trainer.mesh.layout
    return [tensor.chunk(layout.batch_shards)[layout.batch_shard(trainer.mesh.coordinates)] for tensor in tensors]


def share_of(trainer: Any, tokens: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return this rank's samples of a global batch and its fields."""
    tokens, *values = share(trainer, tokens, *batch.values())
    return tokens, dict(zip(batch, values, strict=True))


def train_steps(trainer: Any, config: Any, batch_of: Callable[[Any, int], Any], steps: int) -> list[tuple[float, float]]:
    """Train on the global batches `batch_of(config, step)`; return the loss and the gradient norm of each step. Collective."""
    numbers = []
    for step in range(steps):
        loss, result = trainer.train(*share_of(trainer, *batch_of(config, step)), step=step)
        numbers.append((float(loss), float(result.gradient_norm)))
    return numbers


def saved(folder: str | Path, config: Any, trainer: Any, state: Any = None, **options: Any) -> Path:
    """Save the state of a trainer into a run directory; return the checkpoint. Collective.

    Args:
        state: the TrainState that the checkpoint records.
    """
    from pipeline.checkpoint import save
    from pipeline.checkpoint.native import Index, TrainState

    index = Index(state or TrainState(), dataclasses.asdict(config))
    return save.save(run_directory(folder), index, trainer.engine.fragments(), keep=1, **options)


def mean_loss(trainer: Any, tokens: torch.Tensor, batch: Any) -> torch.Tensor:
    """Return the mean loss of the global batch in a validation, from this rank's samples."""
    losses, targets = trainer.evaluate(tokens, batch)
    return losses.sum() / targets.sum()


def unsharded(trainer: Any, kind: str = "weight") -> dict[str, torch.Tensor]:
    """Return the unsharded weights, or the moments of another kind, by name. Collective."""
    from pipeline.checkpoint.fragments import insert_fragment

    owned = [
        (f.piece, f.start, f.tensors[kind].detach().clone()) for f in trainer.engine.fragments() if f.replica == 0 and kind in f.tensors
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, owned)
    found: dict[str, torch.Tensor] = {}
    for piece, start, values in (fragment for rank in gathered for fragment in rank):
        insert_fragment(found.setdefault(piece.name, torch.full(piece.full_shape, torch.nan)), piece, start, values)
    return found
