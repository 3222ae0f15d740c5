"""The implementations of tools/bench_scale: the same model under our engines, PyTorch's FSDP2 and DeepSpeed's engine, on gloo ranks.

usage: scale_implementations.py '{"implementation": ..., "ranks": ..., ...}'; prints the results of rank 0 as one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tools.bench.harness import resident
from tools.bench.tensor_memory import TensorMemory

#: A Llama of 60 M parameters.
MODEL = (
    *("model=llama-tiny", "model.hidden=512", "model.heads=8", "model.kv_heads=8", "model.layers=8", "model.ffn_hidden=1376"),
    *("model.vocab_size=32000", "model.max_positions=256"),
)
PRODUCT = "product"
C10D = torch.ops.c10d
#: Collective -> (its name, which argument is the whole tensor).
COLLECTIVES = {
    C10D.allreduce_.default: ("all-reduce", 0),
    C10D._reduce_scatter_base_.default: ("reduce-scatter", 1),
    C10D._allgather_base_.default: ("all-gather", 0),
    C10D.reduce_scatter_.default: ("reduce-scatter", 1),
    C10D.allgather_.default: ("all-gather", 0),
    C10D.allgather_into_tensor_coalesced_.default: ("all-gather", 0),
    C10D.broadcast_.default: ("broadcast", 0),
    C10D.reduce_.default: ("reduce", 0),
}
REDUCTIONS = ("all-reduce", "reduce-scatter", "reduce")
ATEN = torch.ops.aten
#: Operators that compute gradients of matrices. Hooks on weights would miss FSDP2, whose weights are not those of the graph.
PRODUCTS = (ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default, ATEN.embedding_dense_backward.default)


class Traffic(TorchDispatchMode):
    """Records the collectives of a step in order, as (name, bytes of the whole tensor), and the products between them."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation in COLLECTIVES:
            name, whole = COLLECTIVES[operation]
            self.events.append((name, sum(t.nbytes for t in torch.utils._pytree.tree_leaves(args[whole]) if isinstance(t, Tensor))))
        elif operation in PRODUCTS:
            self.events.append((PRODUCT, 0))
        return operation(*args, **(kwargs or {}))

    def summary(self) -> dict[str, Any]:
        """Bytes by collective, and the share of the gradients' bytes that was issued before the last product, which computes a gradient."""
        total: Counter[str] = Counter()
        for name, size in self.events:
            total[name] += size
        last = max((index for index, event in enumerate(self.events) if event[0] == PRODUCT), default=0)
        early = sum(size for name, size in self.events[:last] if name in REDUCTIONS)
        reduced = sum(total[name] for name in REDUCTIONS)
        return {**{name: total[name] for name in ("all-reduce", "reduce-scatter", "all-gather")}, "early": early / max(1, reduced)}


def configuration(options: dict[str, Any], zero: int, *more: str) -> Any:
    """The checked configuration of the job, with further settings."""
    from tools.jobs import configured

    batch = options["ranks"] * options["micro_batches"] * options["sequences"]
    return configured(
        *(*MODEL, f"precision={options['dtype']}", f"parallel.zero_stage={zero}", "training.document_mask=false"),
        *(f"training.sequence_length={options['sequence']}", f"training.global_batch_size={batch}", "training.steps=1000"),
        *(f"training.micro_batch_size={options['sequences']}", *more),
        ranks=options["ranks"],
    )


def ours(options: dict[str, Any]) -> Callable[[Tensor, Tensor], Any]:
    from tools.jobs import build_trainer

    name, _, zero = options["implementation"].partition("-")
    more = []
    if name == "engine":
        path = Path(options["folder"], f"ds_config-{dist.get_rank()}.json")
        path.write_text(json.dumps(deepspeed_settings(options)))
        more = ["parallel.engine=deepspeed", f"parallel.deepspeed={path}"]
    config = configuration(options, int(zero), *more)
    trainer = build_trainer(config)
    return lambda tokens, targets: trainer.train(tokens, {"targets": targets})


def fsdp2(options: dict[str, Any]) -> Callable[[Tensor, Tensor], Any]:
    """fully_shard of every block and of the rest, the same dtype of products, fp32 reduction, and the same optimizer."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from pipeline.parallel.parallelize import DTYPES
    from tools.jobs import initial_model

    config = configuration(options, 0)
    model = initial_model(config)
    dtype = DTYPES[options["dtype"]]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = dist.device_mesh.init_device_mesh("cpu", (options["ranks"],))
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> None:
        for part, labels in zip(tokens.chunk(options["micro_batches"]), targets.chunk(options["micro_batches"]), strict=True):
            (model(part, targets=labels) / options["micro_batches"]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()

    return step


def deepspeed_settings(options: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration with its accumulation, fp32 communication and fp32 accumulation."""
    return {
        "train_micro_batch_size_per_gpu": options["sequences"],
        "gradient_accumulation_steps": options["micro_batches"],
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": int(options["implementation"][-1]), "overlap_comm": True},
        "bf16": {"enabled": options["dtype"] == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 60,
    }


def deepspeed(options: dict[str, Any]) -> Callable[[Tensor, Tensor], Any]:
    """A loop of DeepSpeed's own engine."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    import deepspeed as library

    from tools.jobs import initial_model

    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = configuration(options, 0)
    model = initial_model(config)
    settings = deepspeed_settings(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine, *_ = library.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)

    def step(tokens: Tensor, targets: Tensor) -> None:
        for part, labels in zip(tokens.chunk(options["micro_batches"]), targets.chunk(options["micro_batches"]), strict=True):
            engine.backward(engine(part, targets=labels))
            engine.step()

    return step


def measure(rank: int, options: dict[str, Any], folder: str) -> None:
    """Run one implementation on this rank; rank 0 writes the results."""
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options["ranks"])
        build = {"ours": ours, "engine": ours, "fsdp2": fsdp2, "deepspeed": deepspeed}[options["implementation"].partition("-")[0]]
        before = resident("VmRSS")
        step = build({**options, "folder": folder})
        generator = torch.Generator().manual_seed(rank)
        shape = (options["micro_batches"] * options["sequences"], options["sequence"])

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            while True:
                yield tuple(torch.randint(32000, shape, generator=generator) for _ in range(2))  # type: ignore[misc]

        data = batches()
        step(*next(data))
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the current size
        times = []
        for _ in range(options["steps"]):
            dist.barrier()
            started = time.perf_counter()
            step(*next(data))
            dist.barrier()
            times.append(time.perf_counter() - started)
        peak = resident("VmHWM") - before
        memory = TensorMemory()
        with memory.counting():
            step(*next(data))
        traffic = Traffic()
        with traffic:
            step(*next(data))
        dist.barrier()
        dist.destroy_process_group()  # gloo's threads, of which a process that just ends is aborted now and then
    if rank == 0:
        tokens = options["ranks"] * shape[0] * shape[1]
        result = {
            "peak": peak,
            "state": memory.state,
            "tensors": memory.peak,
            "tokens_per_second": tokens / sorted(times)[len(times) // 2],
            **traffic.summary(),
        }
        Path(folder, "result").write_text(json.dumps(result))


def main() -> None:
    options = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (options, folder), nprocs=options["ranks"])
        print(Path(folder, "result").read_text())


if __name__ == "__main__":
    main()
