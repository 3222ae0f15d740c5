"""The implementations that tools/bench_train compares. Run as a script with Options in JSON, measures one of them and prints JSON."""

from __future__ import annotations

import io
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Every implementation imports all libraries, so that memory is measured from the same baseline.
import deepspeed  # noqa: F401
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, TrainerCallback, TrainingArguments
from transformers import Trainer as StockTrainer

from pipeline.checkpoint.native import TrainState
from pipeline.checkpoint.saver import SyncSaver
from pipeline.common import artifact
from pipeline.common.errors import UserError
from pipeline.common.progress import set_up_logging
from pipeline.config.layout import Layout
from pipeline.config.schema import RunConfig
from pipeline.data import tar
from pipeline.data.load.objectives.causal import Causal
from pipeline.models import registry
from pipeline.parallel import mesh as meshes
from pipeline.parallel.parallelize import DTYPES, compile_enabled
from pipeline.planner.flops import flops_per_token
from pipeline.training import gradient_clipping, loop
from pipeline.training.batch_loader import BatchLoader
from pipeline.training.checkpoint_hooks import CheckpointHooks
from pipeline.training.elementwise_optimizers import EagerAdamW
from pipeline.training.metrics import Metrics
from pipeline.training.saves import Saves
from pipeline.training.step_control import StepControl
from pipeline.training.trainer import Trainer
from pipeline.training.watchdog import Watchdog
from tools.bench.harness import resident
from tools.bench.token_dataset import TokenDataset
from tools.jobs import configured, initial_model

WARMUP_STEPS = 3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Options:
    """The settings of one measured process.

    Attributes:
        implementation: a row of the table, or "machine" for measure_machine.
        model: a file of conf/model.
        dtype: fp32 or bf16.
        batch: sequences per step.
        sequence: tokens per sequence.
        steps: timed steps after the warmup.
        clock: "wall" or "cpu".
    """

    implementation: str
    model: str
    dtype: str
    batch: int
    sequence: int
    steps: int
    clock: str

    @property
    def now(self) -> Callable[[], float]:
        """The clock; returns seconds."""
        return {"wall": time.perf_counter, "cpu": time.process_time}[self.clock]


class Timer:
    """Times the steps after the warmup. Timestamps are host times on a CPU and CUDA events on a GPU."""

    def __init__(self, options: Options) -> None:
        self._now, self._steps, self._step_tokens = options.now, options.steps, options.batch * options.sequence
        self._finished_steps = 0
        self._initial_bytes = resident("VmRSS")
        self._spans: list[tuple[Any, Any]] = []
        self.result: dict[str, float] = {}

    def step(self) -> None:
        """Record the end of a step; on a GPU its kernels may still be queued."""
        self._finished_steps += 1
        if self._finished_steps == WARMUP_STEPS:
            synchronize()
            self._spans.clear()
            self._start = self._now()
        if self._finished_steps == WARMUP_STEPS + self._steps:
            synchronize()
            seconds = self._now() - self._start
            memory = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else resident("VmHWM") - self._initial_bytes
            self.result = {"tokens_per_second": self._steps * self._step_tokens / seconds, "memory": memory}
            if self._spans:
                self.result["not_model"] = 1 - sum(self._elapsed(*span) for span in self._spans) / seconds

    def count_as_model(self, owner: Any, name: str) -> None:
        """Patch `owner.name`: the time of every later call counts as model."""
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self._timestamp()
            try:
                return inner(*args, **kwargs)
            finally:
                self._spans.append((start, self._timestamp()))

        setattr(owner, name, timed)

    def _timestamp(self) -> Any:
        if DEVICE.type == "cpu":
            return self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _elapsed(self, start: Any, end: Any) -> float:
        return end - start if DEVICE.type == "cpu" else start.elapsed_time(end) / 1e3


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def compose_config(options: Options, folder: str, more: dict[str, Any] | None = None) -> RunConfig:
    """Return the checked configuration of ours; the other implementations read the sizes and the optimizer from it.

    The learning rate is constant. `more` has further settings, by key.

    Raises:
        UserError: the model does not support this sequence length.
    """
    overrides = {
        "model": options.model,
        "precision": options.dtype,
        "training.steps": WARMUP_STEPS + options.steps,
        "training.global_batch_size": options.batch,
        "training.micro_batch_size": options.batch,
        "training.sequence_length": options.sequence,
        "optimizer.lr": 1e-4,
        "optimizer.min_lr_ratio": 1,
        "optimizer.warmup_steps": 0,
        "parallel.zero_stage": int(options.implementation == "ours-zero1"),
        "checkpoint.every": 0,
        "tracking.wandb": "disabled",
        "data.tokens": f"{folder}/tokens",
        "run_dir": f"{folder}/run",
        **(more or {}),
    }
    return configured(*(f"{key}={value}" for key, value in overrides.items()))


def write_tokens(config: RunConfig) -> None:
    """Write random tokens in the format of stage=tokenize, exactly as many samples as the run consumes."""
    folder, training, vocabulary = Path(config.data.tokens), config.training, config.model.vocab_size
    folder.mkdir(parents=True)
    tokens = np.random.default_rng(0).integers(vocabulary, size=training.steps * training.global_batch_size * training.sequence_length + 1)
    tokens = tokens.astype("<u2" if vocabulary <= 1 << 16 else "<u4")
    array = io.BytesIO()
    np.save(array, tokens)
    shard = folder / "train-00000.tar"
    shard.write_bytes(tar.member("train-00000.tokens.npy", array.getvalue()) + tar.END)
    offset = tar.BLOCK + len(array.getvalue()) - tokens.nbytes
    entry = artifact.entry(shard, dtype=tokens.dtype.name, tokens=len(tokens), offset=offset, text_bytes=4 * len(tokens), split="train")
    totals = {"vocab_size": vocabulary, "end_of_document": 0}
    artifact.write(folder, artifact.Manifest("tokenize", {}, {shard.name: entry}, totals))


def train_ours(config: RunConfig, timer: Timer) -> float:
    """Run the training code of stage=pretrain with a timer. Like the other two, returns the mean loss over all steps, in nats per token."""

    class Timed(Trainer):
        def train(self, *args: Any) -> Any:
            result = super().train(*args)
            timer.step()
            return result

    training = config.training
    samples = Causal(TokenDataset(Path(config.data.tokens), "train", training.sequence_length, training.seed))
    mesh = meshes.build_mesh(Layout.of(config, 1), meshes.init_distributed(0, 1, 0, ""))
    for owner, name in (
        (torch.autograd, "backward"),
        (EagerAdamW, "step"),
        (gradient_clipping, "global_norm"),
        (torch, "_foreach_copy_"),
    ):
        timer.count_as_model(owner, name)
    trainer = Timed(config, mesh)
    for stage in trainer.model.stage_modules():
        timer.count_as_model(stage, "forward")
    (Path(config.run_dir) / "checkpoints").mkdir(parents=True)
    with Metrics(config, 0, TrainState()) as metrics, Watchdog(training.timeout_minutes) as watchdog:
        saves = Saves(config, trainer, samples, metrics, watchdog, CheckpointHooks(), SyncSaver(Path(config.run_dir), "rank"))
        loader = BatchLoader(samples, training, trainer.mesh, config.data.prefetch)
        loop.train(TrainState(), loader, trainer, [metrics, StepControl(config, 0), saves], watchdog.report)
    meshes.destroy_process_group()
    lines = (Path(config.run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return statistics.mean(json.loads(line)["loss"] for line in lines)


def train_plain(config: RunConfig, timer: Timer, *, stock: bool) -> float:
    """Train with a hand-written loop over our model or the stock class; returns the mean loss."""
    dtype, samples = DTYPES[config.precision.dtype], batches(config)
    model: Any = stock_model(config, dtype).to(DEVICE) if stock else initial_model(config).to(DEVICE, dtype)
    if compile_enabled(config.training, config.parallel, DEVICE):
        for block in stock_blocks(model) if stock else model.blocks.values():
            block.compile()
    weights = list(model.parameters())
    masters = weights if dtype == torch.float32 else [weight.detach().float() for weight in weights]
    decay = config.optimizer.weight_decay
    groups = [
        {"params": [master for master in masters if (master.dim() >= 2) is matrices], "weight_decay": decay if matrices else 0.0}
        for matrices in (True, False)
    ]
    optimizer = EagerAdamW([group for group in groups if group["params"]], config.optimizer, config.optimizer.lr)
    losses = []
    for batch in samples:
        tokens = batch.to(DEVICE, non_blocking=True)
        logits = model(tokens[:, :-1]).logits if stock else model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        del logits
        loss.backward()
        if masters is not weights:
            for master, weight in zip(masters, weights, strict=True):
                master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, config.optimizer.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        if masters is not weights:
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)
        losses.append(loss.detach())
        timer.step()
    return float(torch.stack(losses).mean())


def train_with_trainer(config: RunConfig, timer: Timer, model: torch.nn.Module | None = None) -> float:
    """Train with transformers' Trainer, with its defaults for everything that is not set here; returns the mean loss.

    The model is the stock class in fp32 when None.
    """

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            timer.step()

    optimizer = config.optimizer
    arguments = TrainingArguments(
        output_dir=config.run_dir,
        max_steps=config.training.steps,
        per_device_train_batch_size=config.training.global_batch_size,
        bf16=config.precision.dtype == "bf16",
        use_cpu=DEVICE.type == "cpu",
        torch_compile=compile_enabled(config.training, config.parallel, DEVICE),
        optim="adamw_torch_fused",
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant",
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.eps,
        max_grad_norm=optimizer.gradient_clipping,
        logging_steps=config.tracking.log_every,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,  # keeps shift_labels, without it the last position has no label
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    rows = [row for batch in batches(config) for row in batch]
    dataset = [{"input_ids": row[:-1], "labels": row[1:], "shift_labels": row[1:]} for row in rows]
    trainer = StockTrainer(model or stock_model(config, torch.float32), arguments, train_dataset=dataset, callbacks=[Clock()])
    return float(trainer.train().training_loss)


def batches(config: RunConfig) -> list[Tensor]:
    """Return the batches of our loader, one int64 tensor of shape (batch, sequence + 1) per step."""
    training = config.training
    dataset = TokenDataset(Path(config.data.tokens), "train", training.sequence_length, training.seed)
    samples = np.arange(training.steps * training.global_batch_size).reshape(training.steps, -1)
    return [torch.from_numpy(dataset.samples(batch)).long() for batch in samples]


def stock_model(config: RunConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the stock transformers class with the same weights."""
    mapping, weights = registry.mapping_of(config.model), initial_model(config).state_dict()
    stock_config = AutoConfig.for_model(**mapping.config_json(config.model), use_cache=False)
    model = AutoModelForCausalLM.from_config(stock_config, dtype=dtype, attn_implementation="sdpa")
    stock_weights = {row.hf_name: row.to_hf([weights[name] for name in row.names]) for row in registry.stock_tensors(config.model)[0]}
    incompatible = model.load_state_dict(stock_weights, strict=False)
    assert not incompatible.unexpected_keys
    assert set(incompatible.missing_keys) <= {"lm_head.weight"}, incompatible.missing_keys  # a tied head shares the tensor of the embedding
    return model


def stock_blocks(model: PreTrainedModel) -> Any:
    """Return the decoder blocks; their attribute name depends on the class."""
    return next(child for child in model.base_model.children() if isinstance(child, torch.nn.ModuleList))


def measure_machine(config: RunConfig, now: Callable[[], float]) -> dict[str, Any]:
    """Return the device, its peak FLOP/s in a square matrix product, and the parameters and FLOPs per token of the model."""
    size, products = (8192, 50) if DEVICE.type == "cuda" else (1536, 3)
    a, b = (torch.randn(size, size, device=DEVICE).to(DTYPES[config.precision.dtype]) for _ in range(2))
    seconds = []
    for _ in range(5):
        synchronize()
        start = now()
        for _ in range(products):
            a @ b
        synchronize()
        seconds.append((now() - start) / products)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in registry.build(config.model).parameters())
    return {
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} threads",
        "peak": 2 * size**3 / min(seconds),
        "parameters": parameters,
        "flops_per_token": flops_per_token(config.model, config.training.sequence_length),
    }


def run(options: Options) -> dict[str, Any]:
    """Return tokens_per_second, memory in bytes, mean loss, and for ours the share not_model.

    Raises:
        UserError: as compose_config.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = compose_config(options, folder)
        if options.implementation == "machine":
            return measure_machine(config, options.now)
        write_tokens(config)
        timer = Timer(options)
        if options.implementation == "trainer":
            loss = train_with_trainer(config, timer)
        elif options.implementation.startswith("plain"):
            loss = train_plain(config, timer, stock=options.implementation == "plain-hf")
        else:
            loss = train_ours(config, timer)
        return {**timer.result, "loss": loss}


def main(options: type[Options], run: Callable[[Any], dict[str, Any]]) -> int:
    set_up_logging(rank=1, world_size=1)  # warnings only
    try:
        print(json.dumps(run(options(**json.loads(sys.argv[1])))))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(Options, run))
