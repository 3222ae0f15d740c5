"""The contenders of tools/bench_train. Run as a script with an Options object in JSON, this is one of them; prints its numbers as JSON."""

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

# All libraries, whichever contender this is, so that everybody's memory is counted from the same start.
import deepspeed  # noqa: F401
import hydra
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, TrainerCallback, TrainingArguments
from transformers import Trainer as StockTrainer

from pipeline import artifact
from pipeline.checkpoint.native import TrainState
from pipeline.config import check, compose
from pipeline.config.layout import Layout
from pipeline.config.schema import RunConfig
from pipeline.data import tar
from pipeline.data.load.loader import TokenDataset
from pipeline.data.load.objectives.causal import Causal
from pipeline.errors import UserError
from pipeline.layers.stack import Stack
from pipeline.models import registry
from pipeline.models.init import initialize
from pipeline.parallel import mesh as meshes
from pipeline.parallel.parallelize import DTYPES, compiles
from pipeline.planner.flops import flops_per_token
from pipeline.progress import set_up_logging
from pipeline.training import gradients, loop
from pipeline.training.metrics import Metrics
from pipeline.training.optimizer import adamw, decay_groups
from pipeline.training.trainer import Trainer

WARMUP_STEPS = 3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Options:
    """What one process does. `contender` is a row of the table, or "machine"."""

    contender: str
    model: str
    dtype: str
    batch: int
    sequence: int
    steps: int
    clock: str

    @property
    def now(self) -> Callable[[], float]:
        """The clock, in seconds."""
        return {"wall": time.perf_counter, "cpu": time.process_time}[self.clock]


class Watch:
    """Times the steps after the warm-up. Marks are times of the host on a CPU, and events in the device's queue on a GPU."""

    def __init__(self, options: Options) -> None:
        self._now, self._steps, self._tokens = options.now, options.steps, options.batch * options.sequence
        self._done = 0
        self._before = resident_bytes("VmRSS")
        self._spans: list[tuple[Any, Any]] = []
        self.result: dict[str, float] = {}

    def tick(self) -> None:
        """A step has been queued."""
        self._done += 1
        if self._done == WARMUP_STEPS:
            synchronize()
            self._spans.clear()
            self._start = self._now()
        if self._done == WARMUP_STEPS + self._steps:
            synchronize()
            seconds = self._now() - self._start
            memory = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else resident_bytes("VmHWM") - self._before
            self.result = {"tokens_per_second": self._steps * self._tokens / seconds, "memory": memory}
            if self._spans:
                self.result["not_model"] = 1 - sum(self._elapsed(*span) for span in self._spans) / seconds

    def count(self, owner: Any, name: str) -> None:
        """Let every later call of `owner.name` count as model."""
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self._mark()
            try:
                return inner(*args, **kwargs)
            finally:
                self._spans.append((start, self._mark()))

        setattr(owner, name, timed)

    def _mark(self) -> Any:
        if DEVICE.type == "cpu":
            return self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _elapsed(self, start: Any, end: Any) -> float:
        """Seconds between two marks."""
        return end - start if DEVICE.type == "cpu" else start.elapsed_time(end) / 1e3


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def resident_bytes(field: str) -> int:
    """This process's memory by the kernel's count: VmRSS now, VmHWM at its highest."""
    line = next(line for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def configured(options: Options, folder: str) -> RunConfig:
    """The checked configuration of ours; the others read sizes and optimizer from it. The learning rate is constant.

    Raises:
        UserError: the model does not take such sequences.
    """
    compose.register()
    overrides = {
        "stage": "pretrain",
        "model": options.model,
        "precision": options.dtype,
        "training.steps": WARMUP_STEPS + options.steps,
        "training.global_batch_size": options.batch,
        "training.micro_batch_size": options.batch,
        "training.sequence_length": options.sequence,
        "optimizer.lr": 1e-4,
        "optimizer.min_lr_ratio": 1,
        "optimizer.warmup_steps": 0,
        "parallel.zero_stage": int(options.contender == "ours-zero1"),
        "checkpoint.every": 0,
        "tracking.wandb": "disabled",
        "data.tokens": f"{folder}/tokens",
        "run_dir": f"{folder}/run",
    }
    with hydra.initialize_config_dir(str(compose.CONF_DIR), version_base="1.3"):
        config = compose.typed(hydra.compose("config", [f"{key}={value}" for key, value in overrides.items()]))
    check.check(config, world_size=1)
    return config


def write_tokens(config: RunConfig) -> None:
    """A folder as stage=tokenize writes it, with random tokens: one sample for every place in a batch of the run."""
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


def train_ours(config: RunConfig, watch: Watch) -> float:
    """The body of stage=pretrain, with a clock in it. Like the other two, returns the mean loss over all steps."""

    class Timed(Trainer):
        def train(self, *args: Any) -> Any:
            result = super().train(*args)
            watch.tick()
            return result

    training = config.training
    samples = Causal(TokenDataset(Path(config.data.tokens), "train", training.sequence_length, training.seed))
    mesh = meshes.build(Layout.of(config, 1), meshes.start(0, 1, 0, ""))
    for owner, name in ((torch.autograd, "backward"), (torch.optim.AdamW, "step"), (gradients, "global_norm"), (torch, "_foreach_copy_")):
        watch.count(owner, name)
    trainer = Timed(config, mesh)
    for stage in trainer.model.parts():
        watch.count(stage, "forward")
    Path(config.run_dir).mkdir()
    with Metrics(config, 0, TrainState(), training.sequence_length, 0.0, None) as metrics:
        loop.train(config, trainer, samples, None, TrainState(), metrics)
    meshes.stop()
    lines = (Path(config.run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return statistics.mean(json.loads(line)["loss"] for line in lines)


def train_plainly(config: RunConfig, watch: Watch, *, stock: bool) -> float:
    """The loop that one writes by hand."""
    dtype, samples = DTYPES[config.precision.dtype], batches(config)
    model: Any = stock_model(config, dtype).to(DEVICE) if stock else our_model(config).to(DEVICE, dtype)
    if compiles(config, DEVICE):
        for block in stock_blocks(model) if stock else model.blocks.values():
            block.compile()
    weights = list(model.parameters())
    masters = weights if dtype == torch.float32 else [weight.detach().float() for weight in weights]
    optimizer = adamw(decay_groups(masters, config.optimizer.weight_decay), config.optimizer, config.optimizer.lr)
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
        watch.tick()
    return float(torch.stack(losses).mean())


def train_with_trainer(config: RunConfig, watch: Watch) -> float:
    """The Trainer of transformers, with its defaults where nothing else is asked for."""

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.tick()

    optimizer = config.optimizer
    arguments = TrainingArguments(
        output_dir=config.run_dir,
        max_steps=config.training.steps,
        per_device_train_batch_size=config.training.global_batch_size,
        bf16=config.precision.dtype == "bf16",
        use_cpu=DEVICE.type == "cpu",
        torch_compile=compiles(config, DEVICE),
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
        remove_unused_columns=False,  # keeps shift_labels, without which the last position would have no label
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    rows = [row for batch in batches(config) for row in batch]
    dataset = [{"input_ids": row[:-1], "labels": row[1:], "shift_labels": row[1:]} for row in rows]
    trainer = StockTrainer(stock_model(config, torch.float32), arguments, train_dataset=dataset, callbacks=[Clock()])
    return float(trainer.train().training_loss)


def batches(config: RunConfig) -> list[Tensor]:
    """What the loader of ours yields: int64 (batch, sequence + 1) for every step."""
    training = config.training
    dataset = TokenDataset(Path(config.data.tokens), "train", training.sequence_length, training.seed)
    samples = np.arange(training.steps * training.global_batch_size).reshape(training.steps, -1)
    return [torch.from_numpy(dataset.samples(batch)).long() for batch in samples]


def our_model(config: RunConfig) -> Stack:
    """The whole model in fp32 on the CPU, with the weights that ours starts from."""
    model = registry.build(config.model)
    initialize(model, config.model, config.training.seed)
    return model


def stock_model(config: RunConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The transformers class with the same weights."""
    adapter, weights = registry.adapter(config.model), our_model(config).state_dict()
    described = AutoConfig.for_model(**adapter.config_json(config.model), use_cache=False)
    model = AutoModelForCausalLM.from_config(described, dtype=dtype, attn_implementation="sdpa")
    theirs = {row.hf_name: row.to_hf([weights[name] for name in row.names]) for row in registry.stock_rows(config.model)[0]}
    lacking = model.load_state_dict(theirs, strict=False)
    assert not lacking.unexpected_keys
    assert set(lacking.missing_keys) <= {"lm_head.weight"}, lacking.missing_keys  # a tied head has no tensor of its own
    return model


def stock_blocks(model: PreTrainedModel) -> Any:
    """The decoder blocks, whatever the class calls them."""
    return next(child for child in model.base_model.children() if isinstance(child, torch.nn.ModuleList))


def measure_machine(config: RunConfig, now: Callable[[], float]) -> dict[str, Any]:
    """What the table's head says: device, the fastest square matrix product in FLOP/s, and the model's sizes."""
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
    """One contender's tokens_per_second, memory in bytes, mean loss, and for ours the share not_model.

    Raises:
        UserError: see configured.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = configured(options, folder)
        if options.contender == "machine":
            return measure_machine(config, options.now)
        write_tokens(config)
        watch = Watch(options)
        if options.contender == "trainer":
            loss = train_with_trainer(config, watch)
        elif options.contender.startswith("plain"):
            loss = train_plainly(config, watch, stock=options.contender == "plain-hf")
        else:
            loss = train_ours(config, watch)
        return {**watch.result, "loss": loss}


if __name__ == "__main__":
    set_up_logging(rank=1, world_size=1)  # warnings only
    try:
        print(json.dumps(run(Options(**json.loads(sys.argv[1])))))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
