"""Stock DeepSpeed, transformers and our trainer train the same Llama, on ranks of a world, and pass it on by universal checkpoints."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.conversion.foreign_folders import OVERRIDES, llama, rank_variables, samples

LR, DECAY, CLIPPING = 0.01, 0.1, 1.0
#: Our configuration of the same training: rates are constant, and vectors have no weight decay.
TRAINING = (
    *("stage=pretrain", "precision=fp32", *OVERRIDES, "training.sequence_length=23", "training.global_batch_size=2"),
    *("training.micro_batch_size=1", "training.steps=20", f"optimizer.lr={LR}", f"optimizer.weight_decay={DECAY}"),
    *("optimizer.schedule=constant", "optimizer.warmup_steps=0", f"optimizer.gradient_clipping={CLIPPING}"),
    *("optimizer.beta1=0.9", "optimizer.beta2=0.95", "optimizer.eps=1e-8"),
)


class KernelAdamW(torch.optim.Optimizer):
    """AdamW with the state of DeepSpeed's FusedAdam and CPU Adam: a number for the step. Their kernels take minutes to compile."""

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, _closure: None = None) -> None:
        for group in self.param_groups:
            one, two = group["betas"]
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                state = self.state[weight]
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
                state["step"] += 1
                mean = state["exp_avg"].lerp_(weight.grad, 1 - one) / (1 - one ** int(state["step"]))
                square = state["exp_avg_sq"].lerp_(weight.grad**2, 1 - two) / (1 - two ** int(state["step"]))
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * mean / (square.sqrt() + group["eps"]))


def engine(model: Any, stage: int, optimizer: type[torch.optim.Optimizer], *, universal: bool) -> Any:
    """Return DeepSpeed's engine of the model. Collective."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which is compiled when it is first used
    groups = [
        {"params": [weight for weight in model.parameters() if weight.dim() > 1], "weight_decay": DECAY},
        {"params": [weight for weight in model.parameters() if weight.dim() == 1], "weight_decay": 0.0},
    ]
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": stage, "sub_group_size": 5000},  # several groups of ZeRO 3, which share one step
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": universal},
    }
    made = optimizer(groups, lr=LR, betas=(0.9, 0.95))
    # A schedule whose rate is zero in the steps before those that are loaded.
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda update: float(update > 5)) if universal else None
    return deepspeed.initialize(model=model, optimizer=made, lr_scheduler=schedule, config=settings, dist_init_required=False)[0]


def tokens_of(step: int) -> Tensor:
    """The global batch of a step, (2, 24)."""
    return samples().roll(step, dims=1)


def train(running: Any, first: int, last: int) -> float:
    """Train steps in DeepSpeed's engine, and return the last loss of this rank."""
    loss = torch.zeros(())
    for step in range(first, last):
        tokens = tokens_of(step)[dist.get_rank() : dist.get_rank() + 1]
        loss = running(input_ids=tokens, labels=tokens).loss
        running.backward(loss)
        running.step()
    return float(loss.detach())


def weights_of(running: Any) -> dict[str, Tensor]:
    """The fp32 weights of an engine. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(weight).clone() for name, weight in running.module.named_parameters()}


def write_universal(folder: Path, stage: int, kernel: bool, tied: bool, steps: int = 3) -> dict[str, Tensor]:
    """Train in DeepSpeed's engine, convert its checkpoint, and return the weights after two more steps. Collective."""
    from deepspeed.checkpoint import ds_to_universal

    with rank_variables():
        torch.manual_seed(0)
        model = llama(tie_word_embeddings=tied).train()
        running = engine(model, stage, KernelAdamW if kernel else torch.optim.AdamW, universal=False)
        train(running, 0, steps)
        running.save_checkpoint(str(folder))
        dist.barrier()
        if dist.get_rank() == 0:
            ds_to_universal.main(
                argparse.Namespace(
                    input_folder=str(folder / f"global_step{steps}"),
                    output_folder=str(folder / f"global_step{steps}_universal"),
                    num_extract_workers=1,
                    num_merge_workers=1,
                    keep_temp_folder=False,
                    strict=True,
                    inject_missing_state=True,
                )
            )
        train(running, steps, steps + 2)
        return weights_of(running)


def continue_in_deepspeed(folder: Path, stage: int, kernel: bool, tied: bool, first: int, last: int) -> dict[str, Tensor]:
    """Load a universal checkpoint into DeepSpeed's engine of another model, and train steps; return the weights. Collective."""
    with rank_variables():
        torch.manual_seed(7)
        model = llama(tie_word_embeddings=tied).train()
        with torch.no_grad():
            for weight in model.parameters():
                weight.uniform_(-1, 1)  # everything is loaded
        running = engine(model, stage, KernelAdamW if kernel else torch.optim.AdamW, universal=True)
        path, _ = running.load_checkpoint(str(folder))
        assert path is not None
        assert running.global_steps == first
        train(running, first, last)
        return weights_of(running)


def adapters(run_dir: Path) -> str:
    """The error of a run with adapters in the run directory of an imported checkpoint with moments. Collective."""
    from pipeline.checkpoint import native
    from pipeline.common.errors import UserError
    from pipeline.training import resume
    from tests.world import trainer

    config, mine = trainer(*TRAINING, f"run_dir={run_dir}", "lora.rank=2")
    try:
        resume.resume(config, mine, native.find(run_dir, "latest"), None)  # type: ignore[arg-type]
    except UserError as error:
        return str(error)
    return ""


def continue_here(run_dir: Path, first: int, saved: int, last: int, *overrides: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Resume our newest checkpoint, train to `last`, and save `saved`; return the weights of both. Collective."""
    from pipeline.checkpoint import native, save
    from pipeline.training import resume
    from tests.world import causal, share, trainer, unsharded

    config, mine = trainer(*TRAINING, f"run_dir={run_dir}", *overrides)
    state = resume.resume(config, mine, native.find(run_dir, "latest"), None)  # type: ignore[arg-type] # no sample was consumed
    assert (state.step, state.updates, state.samples) == (first, first, 0)
    found = {}
    for step in range(first, last):
        tokens, batch = causal(tokens_of(step))
        values = share(mine, tokens, batch["targets"])
        mine.train(values[0], {"targets": values[1]}, step=step)
        if step + 1 in (saved, last):
            found[step + 1] = unsharded(mine)
        if step + 1 == saved:
            state = dataclasses.replace(state, step=saved, updates=mine.engine.updates(), samples=2 * saved)
            save.save(run_dir, native.Index(state, dataclasses.asdict(config)), mine.engine.fragments(), keep=9)
    return found[saved], found[last]
