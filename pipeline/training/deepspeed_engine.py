"""DeepSpeed's engine behind the Engine interface (parallel.engine=deepspeed): its ZeRO 0 to 3, its optimizers and schedules.

DeepSpeed is used by its public interface: `deepspeed.initialize`, its engine's forward, backward and step, `deepspeed.zero.Init`, and its
access to the fp32 state of a weight. Other names are listed in tests/training/test_deepspeed_contract.py. Only this file knows DeepSpeed's
engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipeline.checkpoint.fragments import Fragment
from pipeline.common.errors import UserError
from pipeline.config import deepspeed_json
from pipeline.config.optimizer import OPTIMIZERS, OptimizerConfig
from pipeline.config.parallel import ParallelConfig
from pipeline.config.schema import PrecisionConfig
from pipeline.config.training import TrainingConfig
from pipeline.models.vectors import is_matrix
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel
from pipeline.parallel.pieces import Piece
from pipeline.parallel.tensor_parallel import sums_over_tensor
from pipeline.training import gradient_clipping
from pipeline.training.buckets import is_primary_copy, replica_of
from pipeline.training.engine import Engine, fixed_fragments
from pipeline.training.loss_scale import LossScale
from pipeline.training.lr_schedule import learning_rate
from pipeline.training.matrix_rule import MatrixRule
from pipeline.training.weight_averaging import WeightAverage
from pipeline.training.weight_update import StepResult


def _import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed, and make it use the process groups of this job."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    import deepspeed

    if device.type == "cpu":  # it would compile its collectives of a node when the first one is called
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.comm.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


def _units(mesh: Mesh) -> SimpleNamespace:
    """The process groups of a mesh in the interface of Megatron's `mpu`, by which DeepSpeed asks for them."""
    return SimpleNamespace(
        get_data_parallel_group=lambda: mesh.dense,
        get_data_parallel_rank=mesh.dense.rank,
        get_data_parallel_world_size=mesh.dense.size,
        get_model_parallel_group=lambda: mesh.tensor,
        get_model_parallel_rank=mesh.tensor.rank,
        get_model_parallel_world_size=mesh.tensor.size,
    )


class DeepSpeedEngine(Engine):
    """Data and tensor parallelism with DeepSpeed's engine; arguments as of build_engine."""

    def __init__(
        self,
        model: LocalModel,
        mesh: Mesh,
        optimizer: OptimizerConfig,
        training: TrainingConfig,
        parallel: ParallelConfig,
        precision: PrecisionConfig,
        rule: MatrixRule,  # noqa: ARG002 - no optimizer of DeepSpeed reads it
    ) -> None:
        self._deepspeed = deepspeed = _import_deepspeed(mesh.device)
        self._linear = torch.nn.functional.linear
        self.model, self._mesh, self._stage = model, mesh, parallel.zero_stage
        self._optimizer, self._training = optimizer, training
        self.separate = False
        settings = deepspeed_json.filled(parallel, training, optimizer, precision, mesh.layout)
        stage = model.stages["0"]
        for parameter, piece in model.pieces.items():
            parameter.tensor_model_parallel = piece.is_sliced_along("tensor")  # type: ignore[attr-defined] # counts on each rank in the norm
            if mesh.layout.tensor > 1 and sums_over_tensor(piece, sequence=parallel.sequence_parallel):
                parameter.register_hook(partial(_summed, mesh.tensor))
        units = _units(mesh)
        # The optimizer and the schedule of a file are those of DeepSpeed, which steps both.
        ours = "optimizer" not in settings
        betas = optimizer.beta1, optimizer.beta2
        try:
            deepspeed.DeepSpeedConfig(settings, units)
            if self._stage == 3:
                self._partition(stage, settings, units)
            self._engine, _, _, self._schedule = deepspeed.initialize(
                model=stage,
                optimizer=torch.optim.AdamW(self._groups(), lr=optimizer.lr, betas=betas, eps=optimizer.eps, fused=True) if ours else None,
                model_parameters=None if ours else list(model.pieces),
                config=settings,
                mpu=units,
                dist_init_required=False,
            )
        except (ValueError, TypeError, AssertionError) as error:
            if parallel.deepspeed is None:  # a mistake of ours
                raise
            raise UserError.of(deepspeed_json.KEY, parallel.deepspeed, f"is refused by DeepSpeed: {error}", "correct the file") from error
        self._base = self._engine.basic_optimizer
        self._sets_rate = ours and self._schedule is None
        self.stages = nn.ModuleDict({"0": self._engine})
        self.loss_scale = _DynamicScale(self._engine, precision)
        self._updates, self._micro_batches = 0, 0
        self._after_update: Any = lambda _: None
        self._masters: list[tuple[nn.Parameter, dict[str, Tensor]]] = []
        self._average = WeightAverage(training, [])
        self._learned()
        self._average = WeightAverage(training, [whole["weight"] for _, whole in self._masters])

    def _partition(self, stage: nn.Module, settings: dict[str, Any], units: SimpleNamespace) -> None:
        """Allocate the weights and divide them over the data ranks, block by block: a rank could not hold all of them (ZeRO 3).

        The groups of ZeRO++'s secondary partitions are made once, by the only call then.
        """
        blocks = list(stage.get_submodule("blocks").children())
        self._deepspeed.utils.set_z3_leaf_modules(stage, list({type(block) for block in blocks}))
        at_once = settings["zero_optimization"].get("zero_hpz_partition_size", 1) > 1
        for module in (stage,) if at_once else (*blocks, stage):
            for parameter in module.parameters():
                self.model.materialize(parameter)
            dtype = next(module.parameters()).dtype
            self._deepspeed.zero.Init(
                module=module, data_parallel_group=self._mesh.dense, config_dict_or_path=settings, dtype=dtype, mpu=units
            )

    def _groups(self) -> list[dict[str, Any]]:
        """Parameter groups: matrices decay."""
        decay = self._optimizer.weight_decay
        members: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for parameter, piece in self.model.pieces.items():
            members[is_matrix(piece.name, piece.full_shape)].append(parameter)
        return [{"params": held, "weight_decay": decay if decays else 0.0} for decays, held in members.items() if held]

    @contextmanager
    def accumulate(self, micro_batches: int, *, measure: bool = False) -> Iterator[None]:
        """See Engine."""
        assert not measure, "the rules refuse training.noise_scale_every"
        assert micro_batches == self._engine.gradient_accumulation_steps()
        self._micro_batches = micro_batches
        yield

    def backward(self, loss: Tensor) -> None:
        """See Engine; the loss is that of a micro-batch divided by their number."""
        self._micro_batches -= 1
        self._engine.backward(loss, scale_wrt_gas=False)
        if self._micro_batches:
            self._engine.step()  # counts the micro-batch

    def step(self, discarded: Tensor | None = None) -> StepResult:
        """See Engine."""
        assert discarded is None, "experts of several ranks are the native engine's"
        groups = self._base.param_groups
        if self._sets_rate:
            for group in groups:
                group["lr"] = learning_rate(self._updates, self._optimizer, self._training)
        rate = float(groups[0]["lr"])
        norm = self._norm_without_zero() if self._stage == 0 else None
        self._engine.step()
        if (theirs := self._engine.get_global_grad_norm()) is not None:
            norm = self._scalar(theirs)
        skipped = not self._engine.was_step_applied()
        self._updates += 0 if skipped else 1
        flag = self._scalar(float(skipped))
        self._after_update(flag)
        self._average.update(flag.to(self._masters[0][1]["weight"].device))  # which may be in host memory
        return StepResult(self._scalar(float("nan")) if norm is None else norm, flag, self._scalar(rate))

    def _norm_without_zero(self) -> Tensor:
        """The global norm of the gradients, which are those of the weights: DeepSpeed returns none in fp32 without ZeRO."""
        primary = [p.grad for p, piece in self.model.pieces.items() if p.grad is not None and is_primary_copy(piece, self._mesh)]
        return gradient_clipping.global_norm(primary, (self._mesh.tensor,), self._mesh.device)

    def _scalar(self, value: float | Tensor) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float32, device=self._mesh.device).detach().reshape(())

    def fragments(self) -> list[Fragment]:
        """See Engine."""
        return self._learned() + fixed_fragments(self.model, self._mesh)

    def close(self) -> None:
        """See Engine."""
        self._engine.destroy()
        torch.nn.functional.linear = self._linear  # ZeRO 3 of DeepSpeed has replaced it, for all models of the process

    def _learned(self) -> list[Fragment]:
        """This rank's fragments of the trained weights, with the state of the optimizer."""
        self._create_state()
        self._masters = []
        fragments: list[Fragment] = []
        for parameter, piece in self.model.pieces.items():
            start, whole = self._held(parameter)
            elements = min(whole["weight"].numel(), piece.elements - start) if whole else 0
            if elements > 0:
                self._masters.append((parameter, whole))
                both = {**whole, **self._average.tensors(len(fragments))}
                tensors = {kind: values[:elements] for kind, values in both.items()}
                fragments.append(Fragment(piece, start, {**tensors}, *self._replica_of(piece)))
        return fragments

    def _held(self, parameter: nn.Parameter) -> tuple[int, dict[str, Tensor]]:
        """First element and fp32 tensors, flat, of what this rank holds of a weight; none if it holds nothing of it."""
        kinds, utils = OPTIMIZERS[self._optimizer.name].state, self._deepspeed.utils
        if self._stage == 3:
            weight = utils.safe_get_local_fp32_param(parameter)
            state = {kind: utils.safe_get_local_optimizer_state(parameter, kind) for kind in kinds}
            return self._mesh.dense.rank() * weight.numel(), {"weight": weight, **state}
        if not hasattr(parameter, "_hp_mapping"):  # fp32 without ZeRO: the weights are their own master weights
            return 0, {"weight": parameter.detach().view(-1), **{kind: self._base.state[parameter][kind].view(-1) for kind in kinds}}
        mapping = parameter._hp_mapping
        if mapping is None:
            return 0, {}
        (flat,) = self._base.param_groups[mapping.param_group_index]["params"]
        address, place = mapping.lp_fragment_address, mapping.hp_fragment_address
        tensors = {"weight": flat.detach(), **{kind: self._base.state[flat][kind] for kind in kinds}}
        return address.start, {kind: values.narrow(0, place.start, place.numel) for kind, values in tensors.items()}

    def _replica_of(self, piece: Piece) -> tuple[int, int, str]:
        """See replica_of."""
        replica, replicas, axes = replica_of(piece, self._mesh)
        if self._stage == 0:
            return replica, replicas, axes
        tensor = self._mesh.layout.tensor  # the data ranks hold other elements
        return (self._mesh.tensor.rank(), tensor, "tensor") if tensor > 1 and not piece.is_sliced_along("tensor") else (0, 1, "")

    def _create_state(self) -> None:
        """Create what the optimizer keeps before its first step, so that a checkpoint can be loaded into it."""
        for flat in self._flat_masters():
            state = self._base.state[flat]
            if not state:
                state["step"] = self._step_count(0, flat)
                state.update({kind: torch.zeros_like(flat) for kind in OPTIMIZERS[self._optimizer.name].state})

    def _flat_masters(self) -> list[Tensor]:
        """The tensors that the optimizer updates."""
        if self._stage == 3:
            return list(self._engine.optimizer.fp32_partitioned_groups_flat)
        return [parameter for group in self._base.param_groups for parameter in group["params"]]

    def _step_count(self, updates: int, flat: Tensor) -> int | Tensor:
        """A number of updates as the optimizer counts them: PyTorch's in a tensor beside the weights, DeepSpeed's as a number."""
        return torch.full((), float(updates), device=flat.device) if type(self._base).__module__.startswith("torch.") else updates

    @torch.no_grad()
    def forward_weights(self) -> Iterator[tuple[Piece, Tensor]]:
        """See Engine."""
        for parameter, piece in self.model.pieces.items():
            with self._deepspeed.zero.GatheredParameters([parameter], enabled=self._stage == 3):
                yield piece, parameter.detach()

    def after_update(self, call: Any) -> None:
        """See Engine."""
        self._after_update = call

    def gradient_point(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """See Engine."""
        return tensors["weight"]

    @torch.no_grad()
    def round_weights(self, *, trained: bool = False) -> None:  # noqa: ARG002 - the forward pass reads the master weights alone
        """See Engine."""
        optimizer = self._engine.optimizer
        if self._stage < 3:
            if hasattr(optimizer, "update_lp_params"):
                optimizer.update_lp_params()
            return
        for parameter, whole in self._masters:
            for kind, values in whole.items():  # with an offloaded state, they are copies of it
                put = partial(self._deepspeed.utils.safe_set_local_optimizer_state, optim_state_key=kind)
                (self._deepspeed.utils.safe_set_local_fp32_param if kind == "weight" else put)(parameter, values)
            parameter.ds_tensor.data.copy_(whole["weight"])  # type: ignore[attr-defined] # DeepSpeed's partition of the weight
        if kept := optimizer.persistent_parameters:
            kept[0].partition(kept)
            kept[0].all_gather(kept)

    def updates(self) -> int:
        """See Engine."""
        return self._updates

    def counters(self) -> Tensor:
        """See Engine."""
        return torch.tensor([self._updates, *self.loss_scale.state()], dtype=torch.float64, device=self._mesh.device)

    @torch.no_grad()
    def loaded(self, updates: int) -> None:
        """See Engine."""
        self._updates = updates
        for flat in self._flat_masters():
            self._base.state[flat]["step"] = self._step_count(updates, flat)
        if self._schedule is not None and updates:
            self._schedule.step(updates - 1)  # it counts the updates from 0
        self.round_weights()


class _DynamicScale(LossScale):
    """DeepSpeed's loss scale of fp16, which its backward pass applies: `factor` is None."""

    def __init__(self, engine: Any, precision: PrecisionConfig) -> None:
        self.factor = None
        self._scaler: Any = engine.optimizer.loss_scaler if precision.dtype == "fp16" else None

    def state(self) -> tuple[float, int]:
        """See LossScale."""
        if self._scaler is None:
            return 0.0, 0
        if not hasattr(self._scaler, "cur_iter"):  # the scale is constant
            return float(self._scaler.cur_scale), 0
        return float(self._scaler.cur_scale), max(self._scaler.cur_iter - self._scaler.last_overflow_iter - 1, 0)

    def load(self, factor: float, finite_steps: int) -> None:
        """See LossScale."""
        if hasattr(self._scaler, "cur_iter") and factor > 0:
            self._scaler.cur_scale = factor
            self._scaler.last_overflow_iter = self._scaler.cur_iter - finite_steps - 1


def _summed(group: ProcessGroup, gradient: Tensor) -> Tensor:
    """The sum of a gradient over the tensor ranks, each of which has that of its part of the sequence."""
    total = gradient.clone()
    dist.all_reduce(total, group=group)
    return total
