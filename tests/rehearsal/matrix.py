"""The matrix of rehearsals: which features each family of models is rehearsed with, at tiny size; test_matrix.py runs it.

With the names of cases as arguments it rehearses them, each in a process forked from this one, which has all imports done: it is then run
by the CUDA build of torch, on the driver without a GPU. It prints a line of JSON for each. Without arguments it prints the table.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORLD = 16
JOB = (
    *(f"stage.world_size={WORLD}", "training.sequence_length=64", "training.micro_batch_size=2", "training.global_batch_size=64"),
    *("training.compile=off", "optimizer.warmup_steps=0", "stage.steps=2"),
)
FAMILIES = {
    "encoder-decoder": ("model=t5-tiny",),
    "bert": ("model=bert-tiny",),
    "gpt": ("model=gpt-tiny",),
    "llama": ("model=llama-tiny",),
    "mixtral": ("model=mixtral-tiny",),
    "deepseek": ("model=deepseek-tiny", "model.qk_rope_head_dim=16"),
}


@dataclass(frozen=True)
class Feature:
    """A feature of a job.

    Attributes:
        words: its settings.
        shows: whether rehearsal.json shows that it was used.
    """

    words: str
    shows: Callable[[dict[str, Any]], bool] = lambda _: True


def calls(axis: str, *names: str) -> Callable[[dict[str, Any]], bool]:
    """Whether all of these collectives ran along an axis; "data" is also that of the weights outside of experts."""
    axes = {"data", "dense"} if axis == "data" else {axis}
    return lambda report: set(names) <= {entry["name"] for entry in report["collectives"] if entry["axis"] in axes}


def kernel(part: str) -> Callable[[dict[str, Any]], bool]:
    """Whether a kernel with this in its name was launched."""
    return lambda report: any(part in name for name in report["launches"]["kernels"])


def small_optimizer(report: dict[str, Any]) -> bool:
    """Whether the optimizer state is that of adapters."""
    kinds = report["memory"]["kinds"]
    return 0 < kinds["optimizer"]["rehearsed"] < 0.2 * kinds["weights"]["rehearsed"]


def no_waits_for_rows(report: dict[str, Any]) -> bool:
    """Whether no MoE layer waited for the device."""
    return not any("layers/row_counts.py" in wait["line"] for wait in report["steps"]["waits"])


FEATURES = {
    "zero 0": Feature("parallel.zero_stage=0", calls("data", "all_reduce")),
    "zero 1": Feature("parallel.zero_stage=1", calls("data", "reduce_scatter", "all_gather")),
    "zero 2": Feature("parallel.zero_stage=2", calls("data", "reduce_scatter", "all_gather")),
    "zero 3": Feature("parallel.zero_stage=3", calls("data", "reduce_scatter", "all_gather")),
    "tensor": Feature("parallel.tensor=2 parallel.sequence_parallel=false", calls("tensor", "all_reduce")),
    "sequence": Feature("parallel.tensor=2", calls("tensor", "all_gather", "reduce_scatter")),
    "1f1b": Feature("parallel.pipeline=2", calls("pipeline", "send", "receive")),
    "interleaved": Feature("parallel.pipeline=2 parallel.schedule=interleaved", calls("pipeline", "send", "receive")),
    "zbv": Feature("parallel.pipeline=2 parallel.schedule=zbv", calls("pipeline", "send", "receive")),
    "ring": Feature("parallel.context=2", calls("context", "send", "receive")),
    "ulysses": Feature("parallel.context=2 parallel.context_kind=ulysses", calls("context", "all_to_all")),
    "experts": Feature("parallel.expert=2", calls("expert", "all_to_all")),
    "buffers": Feature("parallel.expert_padding=true", no_waits_for_rows),
    "fp8": Feature("precision=fp8 precision.fp8_exclude_layers=0", kernel("ToFloat8E4M3")),
    "fp8 rowwise": Feature("precision=fp8 precision.fp8=rowwise precision.fp8_exclude_layers=0", kernel("ToFloat8E4M3")),
    "fp8 experts": Feature("precision.fp8_experts=true", kernel("grouped_gemm_data<cutlass::float_e4m3_t")),
    "kept": Feature("training.activation_checkpointing=none"),
    "selective": Feature("training.activation_checkpointing=selective"),
    "full": Feature("training.activation_checkpointing=full"),
    "compile": Feature("training.compile=on", lambda report: (report["launches"]["compiled"] or {"graphs": 0})["graphs"] > 0),
    "lora": Feature("lora.rank=4", small_optimizer),
    "qlora": Feature("lora.rank=4 lora.quantize=nf4", small_optimizer),
    "generation": Feature("", lambda report: report["tokens"] == [8] * 3),
    "relay": Feature("parallel.pipeline=2", calls("pipeline", "send", "broadcast")),
    "one target": Feature("model.mtp_depth=0"),
}
#: Features that belong to others: pipeline stages of generation, and a model that may have context parallelism.
PARTS = ("relay", "one target")
#: Models without a causal mask, which have no context parallelism.
ENCODERS = (
    "zero 0, sequence, 1f1b, selective",
    "zero 1, tensor, interleaved, full",
    "zero 2, zbv, kept, fp8 rowwise",
    "zero 3, full, fp8",
    "zero 3, sequence, selective, compile",
    "zero 1, 1f1b, sequence, lora",
    "zero 3, qlora, full",
)
DENSE = (
    "zero 0, sequence, 1f1b, selective",
    "zero 1, tensor, interleaved, full",
    "zero 2, zbv, kept",
    "zero 3, ring, full, fp8 rowwise",
    "zero 1, ulysses, kept, fp8",
    "zero 3, sequence, selective, compile",
    "zero 1, 1f1b, sequence, lora",
    "zero 3, qlora, full",
    "tensor, generation",
    "relay, generation",
)
EXPERTS = (
    "zero 0, sequence, 1f1b, experts, selective",
    "zero 1, tensor, interleaved, full",
    "zero 2, zbv, experts, kept",
    "zero 3, experts, full, fp8 rowwise",
    "zero 1, ring, experts, kept, fp8, fp8 experts",
    "zero 2, ulysses, selective",
    "zero 1, sequence, experts, full, compile",
    "zero 1, sequence, experts, buffers, selective, compile",
    "zero 2, zbv, experts, buffers, kept",
    "zero 1, experts, 1f1b, lora",
    "zero 3, experts, qlora",
    "tensor, generation",
    "relay, generation",
)
ROWS = {
    "encoder-decoder": (*ENCODERS, "tensor, generation"),
    "bert": ENCODERS,
    "gpt": DENSE,
    "llama": DENSE,
    "mixtral": EXPERTS,
    "deepseek": [row.replace("ring", "ring, one target").replace("ulysses", "ulysses, one target") for row in EXPERTS],
}
CASES = [f"{family}: {features}" for family, rows in ROWS.items() for features in rows]


def parts(case: str) -> tuple[str, list[str]]:
    """The family and the features of a case."""
    family, _, features = case.partition(": ")
    return family, features.split(", ")


def words(case: str) -> tuple[str, ...]:
    """The settings of a case, without the stage."""
    family, features = parts(case)
    return *JOB, *FAMILIES[family], *(word for name in features for word in FEATURES[name].words.split())


def table(results: dict[str, str]) -> Iterator[str]:
    """Yield the lines of the matrix.

    Args:
        results: case -> its character: "+" passes, "x" fails. A feature with both has both; "." has no case.
    """
    width = max(map(len, FEATURES))
    yield f"{'':{width}}" + "".join(f"  {family}" for family in FAMILIES)
    for feature in FEATURES:
        cells = []
        for family in FAMILIES:
            found = Counter(results[case] for case in results if parts(case)[0] == family and feature in parts(case)[1])
            cells.append("".join(f"{found[sign] or ''}{sign}" for sign in sorted(found)) or ".")
        yield f"{feature:{width}}" + "".join(f"  {cell:{len(family)}}" for cell, family in zip(cells, FAMILIES, strict=True))


def rehearse(case: str, folder: Path) -> None:
    """Rehearse a case, and end the process as the command line does."""
    from pipeline.__main__ import main_and_leave

    sys.argv = ["pipeline", "stage=rehearse", "cluster.hardware=h100", f"run_dir={folder}", *words(case)]
    main_and_leave()


def generate(case: str, folder: Path) -> None:
    """Generate with one rank of the model, whose weights are zero; writes the number of tokens, launches and collectives."""
    import torch

    from pipeline.config.layout import Layout
    from pipeline.config.rules.check import layout_violations
    from pipeline.generation import decoding, weights
    from pipeline.generation.generator import Stopping
    from pipeline.parallel import mesh as meshes
    from pipeline.parallel import rehearsed_group
    from pipeline.rehearsal.analysis import axis_names
    from pipeline.rehearsal.calls import DeviceCalls
    from tests.world import configured

    class Untouched:
        """In place of a checkpoint."""

        def read(self, runs: object) -> None:
            """Read nothing."""

    family, features = parts(case)
    layout_words = [word for name in features for word in FEATURES[name].words.split() if "sequence_parallel" not in word]
    config = configured("stage=generate", "stage.prompts=unread.jsonl", *FAMILIES[family], *layout_words)
    config = weights.for_generation(config, config.model)
    assert not layout_violations(config)
    decoding.check_model(config.model, config.stage, config.run_dir, config.parallel.pipeline)
    device = meshes.init_rehearsed(0, 4)
    mesh = meshes.build_mesh(Layout.of(config, 4), device)
    runner = decoding.load_runner(config, config.stage, Untouched(), mesh, 0)
    told: list[rehearsed_group.Call] = []
    rehearsed_group.listen(told.append)
    device_calls, kernels = DeviceCalls(0), Counter()
    device_calls.reset()
    with device_calls.recorded(Counter(), kernels):
        generator = decoding.generator_of(config.stage, runner, None, Stopping(8), share=lambda _: 0.0)
        lengths = [len(completion.tokens) for completion in generator.run([(0, [1, 2, 3]), (1, [4] * 20), (2, [5])])]
    axes = axis_names(mesh)
    torch.cuda.synchronize()
    content = {
        "tokens": lengths,
        "launches": {"kernels": kernels},
        "collectives": [{"axis": axes.get(call.ranks, "world"), "name": call.name} for call in told],
        "unknown_functions": device_calls.record.unknown(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rehearsal.json").write_text(json.dumps(content))


def run(case: str, folder: Path, function: Callable[[str, Path], None]) -> dict[str, Any]:
    """Call a function with a case and a folder in a forked process; returns its exit code, its seconds of CPU and what it printed."""
    folder.mkdir(parents=True)
    if not (process := os.fork()):
        with open(folder / "log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        code = 1
        try:
            function(case, folder)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    _, status, used = os.wait4(process, 0)
    code, text = os.waitstatus_to_exitcode(status), (folder / "log").read_text()
    return {"case": case, "code": code, "seconds": used.ru_utime + used.ru_stime, "log": text[-6000:]}


def import_all() -> None:
    """Import what forked processes use."""
    from torch._inductor import compile_fx  # noqa: F401
    from torch.nn.attention import flex_attention  # noqa: F401

    from pipeline.parallel import rehearsed_group  # noqa: F401
    from pipeline.planner import plan  # noqa: F401
    from pipeline.rehearsal import report, timeline  # noqa: F401
    from pipeline.stages import rehearse as stage  # noqa: F401
    from pipeline.training import loop  # noqa: F401


def main(folder: Path, cases: list[str]) -> None:
    """Rehearse cases, with all imports done once."""
    import_all()
    for number, case in enumerate(cases):
        function = generate if "generation" in parts(case)[1] else rehearse
        print(json.dumps(run(case, folder / str(number), function)), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(Path(sys.argv[1]), sys.argv[2:])
    else:
        print("\n".join(table(dict.fromkeys(CASES, "+"))))
