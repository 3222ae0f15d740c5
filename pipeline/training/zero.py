"""DeepSpeed ZeRO 1, 2 and 3 behind the Engine interface. The only file that imports DeepSpeed.

The pipeline schedule's backward passes run inside `coalesce_grad_reduction`: ZeRO leaves the gradients whole until its end, so
sums over tensor ranks and tied embeddings are done there, then ZeRO reduces over the data ranks and steps.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipeline.checkpoint.fragment import Fragment
from pipeline.config.schema import RunConfig
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel
from pipeline.training import gradients
from pipeline.training.engine import MOMENTS, Engine, StepResult, create_moments, fixed_fragments
from pipeline.training.optimizer import adamw, decay_groups, learning_rate


class _Mpu:
    """The mesh as DeepSpeed asks for it: one "model parallel" group of all pipeline x tensor ranks, so that norms cover the whole model."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_model_parallel_group(self) -> ProcessGroup:
        return self._mesh.model

    def get_model_parallel_rank(self) -> int:
        return self._mesh.model.rank()

    def get_model_parallel_world_size(self) -> int:
        return self._mesh.model.size()

    def get_tensor_model_parallel_group(self) -> ProcessGroup:
        return self._mesh.tensor

    def get_tensor_model_parallel_rank(self) -> int:
        return self._mesh.coordinates.tensor

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._mesh.layout.tensor

    def get_data_parallel_group(self) -> ProcessGroup:
        return self._mesh.data

    def get_data_parallel_rank(self) -> int:
        return self._mesh.data.rank()

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.data.size()


def _deepspeed(device: torch.device) -> Any:
    """The deepspeed module, quiet and without the shared-memory operator that it would compile on a CPU."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # DeepSpeed refuses to start without it
    # DeepSpeed calls collectives by names that torch has newer ones for: two lines a rank in every job's log.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _settings(config: RunConfig, mesh: Mesh) -> dict[str, Any]:
    """DeepSpeed's configuration. To it a global batch is one micro-batch: the schedule does the accumulation."""
    return {
        "train_micro_batch_size_per_gpu": config.training.global_batch_size // mesh.layout.batch_shards,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.gradient_clipping,
        "zero_optimization": {"stage": config.parallel.zero_stage, "overlap_comm": False},
        "bf16": {"enabled": config.precision.dtype == "bf16", "check_grad_overflow": True},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 60,
    }


class ZeroEngine(Engine):
    """State sharded over the data ranks by DeepSpeed."""

    def __init__(self, config: RunConfig, model: LocalModel, mesh: Mesh) -> None:
        self.model = model
        self._config, self._mesh = config, mesh
        for parameter in model.pieces:
            parameter.grad_dtype = torch.float32
            # What the global norm counts: ZeRO 3 asks the first mark alone; ZeRO 1 and 2 the second too, since they count all else of
            # tensor rank 0.
            primary = gradients.is_primary_copy(model.pieces[parameter], mesh)
            parameter.model_parallel = primary  # type: ignore[attr-defined]
            parameter.ds_pipe_replicated = not primary  # type: ignore[attr-defined]
        optimizer = adamw(decay_groups(model.pieces, config.optimizer.weight_decay), config.optimizer, config.optimizer.lr)
        self._engine, self._zero, *_ = _deepspeed(mesh.device).initialize(
            model=model, optimizer=optimizer, config=_settings(config, mesh), mpu=_Mpu(mesh), dist_init_required=False
        )
        self._updates = 0

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """See Engine."""
        with self._engine.coalesce_grad_reduction():
            yield
            gradients.finalize_gradients(self.model, self._mesh, sequence_parallel=self._config.parallel.sequence_parallel)

    def step(self) -> StepResult:
        """See Engine. DeepSpeed waits for the device here, so the values are known on the host."""
        rate = learning_rate(self._updates, self._config.optimizer, self._config.training)
        for group in self._zero.param_groups:
            group["lr"] = rate
        self._engine.step()
        skipped = bool(self._zero.overflow)
        self._updates += not skipped
        norm = self._engine.get_global_grad_norm()
        return StepResult(torch.as_tensor(norm).detach().float().cpu(), torch.tensor(float(skipped)), torch.tensor(rate))

    def fragments(self) -> list[Fragment]:
        """See Engine."""
        create_moments(self._zero.optimizer, self._masters())
        learned = [fragment for parameter in self.model.pieces for fragment in self._fragment(parameter)]
        return learned + fixed_fragments(self.model, self._mesh)

    def _masters(self) -> list[Tensor]:
        """The flat fp32 partitions that AdamW works on."""
        stage3 = self._config.parallel.zero_stage == 3
        return list(self._zero.fp32_partitioned_groups_flat if stage3 else self._zero.single_partition_of_fp32_groups)

    def _fragment(self, parameter: nn.Parameter) -> list[Fragment]:
        """What this rank holds of a parameter: one run of elements, or nothing."""
        piece = self.model.pieces[parameter]
        owned = gradients.is_primary_copy(piece, self._mesh)
        if self._config.parallel.zero_stage == 3:
            return self._fragment_of_partition(parameter, owned)
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return []
        where, group = mapping.hp_fragment_address, mapping.param_group_index
        state = self._zero.optimizer.state[self._masters()[group]]
        views = {name: state[name].narrow(0, where.start, where.numel) for name in MOMENTS}
        return [Fragment(piece, mapping.lp_fragment_address.start, {"weight": mapping.hp_fragment, **views}, owned)]

    def _fragment_of_partition(self, parameter: nn.Parameter, owned: bool) -> list[Fragment]:
        """ZeRO 3: equal partitions of the flattened piece, the last ones padded."""
        whole: int = parameter.ds_numel  # type: ignore[attr-defined]
        width: int = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
        start = self._mesh.data.rank() * width
        count = min(width, whole - start)
        if count <= 0:
            return []
        names = {"weight": None} | {name: name for name in MOMENTS}
        views = {
            name: self._zero._get_fp32_opt_state_partition(parameter, release_swap_buffers=True, optim_state_key=key)[0][:count]
            for name, key in names.items()
        }
        return [Fragment(self.model.pieces[parameter], start, views, owned)]

    def updates(self) -> int:
        """See Engine."""
        return self._updates

    @torch.no_grad()
    def loaded(self, updates: int) -> None:
        """See Engine."""
        self._updates = updates
        for master in self._masters():
            self._zero.optimizer.state[master]["step"].fill_(updates)
        if self._config.parallel.zero_stage == 3:
            for group in range(len(self._masters())):
                self._zero._reassign_or_swap_out_partitioned_parameters(group)
        else:
            self._zero.update_lp_params()
