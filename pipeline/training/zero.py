"""DeepSpeed ZeRO 1, 2 and 3 behind the Engine interface. The only file that imports DeepSpeed.

The pipeline schedule's backward passes run inside `coalesce_grad_reduction`: ZeRO does not reduce gradients until its end.
The sums over tensor ranks and tied embeddings run there; then ZeRO reduces over the data ranks and updates the weights.
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
from pipeline.training.engine import Engine, StepResult, fixed_fragments
from pipeline.training.lr_schedule import learning_rate
from pipeline.training.optimizers import OPTIMIZERS, build_optimizer, create_state


class _Mpu:
    """DeepSpeed's interface to the process groups. Its model-parallel group has all pipeline x tensor ranks: norms cover the full model."""

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
    """Import deepspeed without its warnings, and without the shared-memory operator that it would compile on a CPU."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # DeepSpeed makes this GPU the current one; the launcher counts all GPUs of the node
    # DeepSpeed uses deprecated names of collectives: two lines per rank in every job's log.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _settings(config: RunConfig, mesh: Mesh) -> dict[str, Any]:
    """DeepSpeed's configuration. It sees a global batch as one micro-batch: the pipeline schedule accumulates gradients."""
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
    """ZeRO 1, 2 and 3: DeepSpeed shards the state over the data ranks."""

    def __init__(self, config: RunConfig, model: LocalModel, mesh: Mesh) -> None:
        self.model = model
        self._config, self._mesh = config, mesh
        for parameter in model.pieces:
            parameter.grad_dtype = torch.float32
            # These attributes decide what the global norm includes. ZeRO 3 reads only the first; ZeRO 1 and 2 also read the second, since
            # they include every other parameter of tensor rank 0.
            primary = gradients.is_primary_copy(model.pieces[parameter], mesh)
            parameter.model_parallel = primary  # type: ignore[attr-defined]
            parameter.ds_pipe_replicated = not primary  # type: ignore[attr-defined]
        self._kind = OPTIMIZERS[config.optimizer.name]
        optimizer = build_optimizer(model.pieces, config.optimizer, config.optimizer.lr)
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
        """See Engine. DeepSpeed synchronizes with the device here, so the values are on the host."""
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
        create_state(self._zero.optimizer, self._kind, self._masters())
        learned = [fragment for parameter in self.model.pieces for fragment in self._fragment(parameter)]
        return learned + fixed_fragments(self.model, self._mesh, self._kind)

    def _masters(self) -> list[Tensor]:
        """The flat fp32 partitions that the optimizer updates."""
        stage3 = self._config.parallel.zero_stage == 3
        return list(self._zero.fp32_partitioned_groups_flat if stage3 else self._zero.single_partition_of_fp32_groups)

    def _fragment(self, parameter: nn.Parameter) -> list[Fragment]:
        """This rank's elements of a parameter: one contiguous range, or none."""
        piece = self.model.pieces[parameter]
        owned = gradients.is_primary_copy(piece, self._mesh)
        if self._config.parallel.zero_stage == 3:
            return self._fragment_of_partition(parameter, owned)
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return []
        where, group = mapping.hp_fragment_address, mapping.param_group_index
        state = self._zero.optimizer.state[self._masters()[group]]
        views = {name: state[name].narrow(0, where.start, where.numel) for name in self._kind.state}
        return [Fragment(piece, mapping.lp_fragment_address.start, {"weight": mapping.hp_fragment, **views}, owned)]

    def _fragment_of_partition(self, parameter: nn.Parameter, owned: bool) -> list[Fragment]:
        """ZeRO 3: equal partitions of the flattened piece; the last ones are padded."""
        whole: int = parameter.ds_numel  # type: ignore[attr-defined]
        width: int = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
        start = self._mesh.data.rank() * width
        count = min(width, whole - start)
        if count <= 0:
            return []
        names = {"weight": None} | {name: name for name in self._kind.state}
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
