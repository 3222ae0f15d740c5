"""Faults that are planted into a job, which is then rehearsed; test_planted.py runs them and checks that the rehearsal names them.

Each is put into the code of a process that is forked from this one, as a later change of the code would: mutants of the real functions.
"""

from __future__ import annotations
import __future__

import functools
import importlib
import inspect
import json
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "pipeline"
SMALL = (
    *("cluster.hardware=h100", "stage.world_size=16", "cluster.tasks_per_node=8", "training.sequence_length=64"),
    *("training.micro_batch_size=2", "training.global_batch_size=64", "training.compile=off", "optimizer.warmup_steps=0", "stage.steps=2"),
    *("training.activation_checkpointing=none",),
)
LLAMA = ("model=llama-tiny", "model.layers=4")
COMPILED = (*LLAMA, "training.compile=on", "parallel.zero_stage=1")
LONG = (*LLAMA, "training.sequence_length=512", "training.micro_batch_size=8", "training.global_batch_size=128", "parallel.zero_stage=1")


@dataclass(frozen=True)
class Planted:
    """A fault.

    Attributes:
        words: settings of the job.
        plant: changes the code of this process.
    """

    words: tuple[str, ...]
    plant: Callable[[], None] = lambda: None


def mutate(module: str, function: str, *changes: tuple[str, str]) -> None:
    """Replace text in a function or method of the package; its lines keep their numbers.

    Args:
        module: its name, such as "training.buckets".
        function: its name, "name" or "Class.name".
        changes: text and what is there instead, without more or fewer lines.
    """
    home = importlib.import_module(f"pipeline.{module}")
    holder, name = home, function
    if "." in function:
        holder_name, name = function.split(".")
        holder = getattr(home, holder_name)
    original = inspect.unwrap(inspect.getattr_static(holder, name))
    lines, first = inspect.getsourcelines(original)
    source = textwrap.dedent("".join(lines))
    for old, new in changes:
        assert source.count(old) == 1, f"{function} has {source.count(old)} times: {old}"
        assert old.count("\n") == new.count("\n")
        source = source.replace(old, new)
    scope: dict[str, Any] = {}
    # The file and the lines of the original, which the rehearsal names.
    code = compile("\n" * (first - 1) + source, original.__code__.co_filename, "exec", __future__.annotations.compiler_flag)
    exec(code, home.__dict__, scope)
    setattr(holder, name, scope[name])


def line(file: str, text: str) -> str:
    """The only line of a file of the package that contains a text, as the rehearsal names it."""
    found = [number for number, content in enumerate((PACKAGE / file).read_text().splitlines(), 1) if text in content]
    assert len(found) == 1, f"{file}: {found}: {text}"
    return f"{file}:{found[0]}"


def without_code_generation() -> None:
    """Trace compiled blocks, but generate no code: the breaks are the same."""
    from torch import nn

    compile_module = nn.Module.compile
    nn.Module.compile = lambda module: compile_module(module, backend="aot_eager")


def broken(*change: tuple[str, str]) -> None:
    """A change in the feed-forward layer of compiled blocks."""
    without_code_generation()
    mutate("layers.mlp", "GatedMLP.forward", *change)


def more_activations(share: float) -> None:
    """Blocks keep more for their backward pass, by a share of what is planned."""
    import torch

    from pipeline.layers import mlp
    from pipeline.planner.plan import hardware_of, plan
    from tests.world import configured

    config = configured("stage=rehearse", *SMALL, *LONG)
    size = int(share * plan(config, 16, hardware_of(config)).trace.block(1).saved)

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, size: int) -> torch.Tensor:
            ctx.save_for_backward(torch.empty(size, dtype=torch.uint8, device=x.device))
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            return grad + 0 * ctx.saved_tensors[0][0], None

    forward = mlp.GatedMLP.forward
    # On GPUs alone: the planner traces the same code, and would see it.
    mlp.GatedMLP.forward = lambda self, x: Kept.apply(forward(self, x), size) if x.is_cuda else forward(self, x)


def flash_3_everywhere() -> None:
    """As if its package were installed: it replaces operators of torch by its own, which refuse other GPUs than Hopper's."""
    import torch

    from pipeline.layers import attention_kernel

    def activate() -> bool:
        library = torch.library.Library("aten", "IMPL")

        def of_hopper(*_: Any, **__: Any) -> Any:
            raise RuntimeError("FA3 requires compute capability 9.0")

        library.impl("_scaled_dot_product_flash_attention", of_hopper, "CUDA", allow_override=True)
        kept.append(library)
        return True

    kept: list[Any] = []
    attention_kernel.has_flash_3 = functools.cache(activate)
    mutate("layers.attention_kernel", "case", ("capability == _HOPPER and has_flash_3()", "has_flash_3() and capability == _HOPPER"))


REDUCTION = "training.gradient_reduction"
MAIN_WAITS = "if self._stream is not None and flat is not state.reduced:"
FAULTS = {
    "none": Planted((*LLAMA, "parallel.zero_stage=3", "parallel.tensor=2", "parallel.context=2")),
    "none: order": Planted((*LLAMA, "parallel.zero_stage=1")),
    "none: gradients": Planted((*LLAMA, "parallel.zero_stage=2")),
    "none: documents": Planted((*LLAMA, "training.document_mask=true", "parallel.zero_stage=1")),
    "none: compiled": Planted(COMPILED, without_code_generation),
    "gathers in the wrong order": Planted(
        (*LLAMA, "parallel.zero_stage=1"),
        partial(
            mutate,
            "training.weight_gathering",
            "WeightGatherer.__init__",
            ("list(dict.fromkeys([*used, *self._weights]))", "list(dict.fromkeys([*used, *self._weights]))[::-1]"),
        ),
    ),
    "no wait for gathered weights": Planted(
        (*LLAMA, "parallel.zero_stage=3"),
        partial(mutate, "training.weight_gathering", "FlatWeights.wait", ("self._work.wait()", "pass")),
    ),
    "no wait for reduced gradients": Planted(
        (*LLAMA, "parallel.zero_stage=1"),
        partial(mutate, REDUCTION, "GradientReducer._finish_oldest", ("work.wait()", "pass")),
    ),
    "no wait for tokens of experts": Planted(
        ("model=mixtral-tiny", "parallel.expert=2", "parallel.zero_stage=1"),
        partial(mutate, "parallel.expert_parallel", "Exchange._wait", ("self._work.wait()", "pass")),
    ),
    "no wait in the ring": Planted(
        (*LLAMA, "parallel.context=2", "parallel.zero_stage=1"),
        partial(mutate, "parallel.ring_attention", "_RingExchange.wait", ("work.wait()", "pass")),
    ),
    "freed buffer": Planted(
        (*LLAMA, "parallel.zero_stage=2"),
        partial(mutate, REDUCTION, "GradientReducer._finish_oldest", (MAIN_WAITS, "if False:")),
    ),
    "unbounded gradients": Planted(
        (*LLAMA, "parallel.zero_stage=2"),
        partial(
            mutate,
            REDUCTION,
            "GradientReducer._finish_oldest",
            ("torch.cuda.current_stream().wait_stream(self._stream)", "flat.record_stream(self._stream)"),
        ),
    ),
    "host wait for each bucket": Planted(
        (*LLAMA, "parallel.zero_stage=1"),
        partial(
            mutate,
            REDUCTION,
            "GradientReducer._sum_over_groups",
            ("state.remaining = 0", "state.remaining = 0 if bool(self.reduced(state.bucket).isfinite().all()) else 0"),
        ),
    ),
    "flash attention 3 on every GPU": Planted((*LLAMA, "cluster.hardware=a100-80", "parallel.zero_stage=1"), flash_3_everywhere),
    "mask in every layer": Planted(
        (*LLAMA, "training.document_mask=true", "parallel.zero_stage=1"),
        partial(mutate, "layers.mask", "Mask.cached", ("if name not in self._cache:", "if True:")),
    ),
    "none: activations": Planted(LONG),
    "more activations": Planted(LONG, partial(more_activations, 0.1)),
    "break: print": Planted(COMPILED, partial(broken, ("return ", "print('?', end=''); return "))),
    "break: branch": Planted(COMPILED, partial(broken, ("return ", "return x if x.is_cuda and x.sum() > 0 else "))),
}


def rehearse(name: str, folder: Path) -> None:
    """Plant a fault, and rehearse as the command line does."""
    from pipeline.__main__ import main_and_leave

    FAULTS[name].plant()
    sys.argv = ["pipeline", "stage=rehearse", *SMALL, *FAULTS[name].words, f"run_dir={folder}"]
    main_and_leave()


def main(folder: Path, names: list[str]) -> None:
    """Rehearse jobs with faults, each in a process forked from this one; prints a line of JSON for each."""
    from tests.rehearsal import matrix

    matrix.import_all()
    for number, name in enumerate(names):
        print(json.dumps(matrix.run(name, folder / str(number), rehearse)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
