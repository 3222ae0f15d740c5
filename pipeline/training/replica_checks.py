"""While training: what several ranks hold a copy of is the same on all of them, and every weight is trained.

The ranks exchange one 64-bit digest for each weight and kind (weight_copies.py): first the sums over the partitions of ZeRO, then, along
every mesh axis with copies, the largest and the smallest digest in one collective. Bytes and time do not grow with the number of ranks.

Weights that do not change, or never have a gradient, are named, and training goes on. A loss whose weight is zero for a while, or an
expert without tokens, has such weights by right; a module that is left out of the loss by mistake has them too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from pipeline.checkpoint.native import EMA
from pipeline.common import events
from pipeline.common.errors import UserError
from pipeline.config.optimizer import OPTIMIZERS
from pipeline.config.schema import RunConfig
from pipeline.parallel.mesh import gather_objects, reduce_over
from pipeline.parallel.pieces import Piece
from pipeline.training.callback import Callback, Step
from pipeline.training.trainer import Trainer
from pipeline.training.weight_copies import FORWARD, ROUNDED, PieceDigest, digest, disagreements, gathered, on_any_rank, on_host, parts_of
from pipeline.training.weight_update import StepResult

log = logging.getLogger("pipeline")

KEY = "training.check_replicas_every"
#: Most weights that a message names.
_NAMED = 5


@dataclass(frozen=True)
class _Entry:
    """A digest that is exchanged: of a kind, of a piece of this rank.

    Attributes:
        kind: as in PieceDigest.
        partitioned: whether ZeRO divides the weight that is saved.
    """

    kind: str
    piece: Piece
    trained: bool
    partitioned: bool

    @property
    def key(self) -> tuple[str, str, tuple[tuple[int, int], ...]]:
        """As the ranks order their digests. Ranks of an axis with copies have the same entries."""
        return self.piece.name, self.kind, self.piece.box


class ReplicaChecks(Callback):
    """Compares the copies of weights, optimizer state and numbers of a step: every training.check_replicas_every steps, before every save.

    Args:
        hosts: host name of each rank.
    """

    def __init__(self, config: RunConfig, trainer: Trainer, hosts: Sequence[str]) -> None:
        self._every = config.training.check_replicas_every
        self._trainer, self._mesh, self._hosts = trainer, trainer.mesh, hosts
        kinds = ("weight", *OPTIMIZERS[config.optimizer.name].state, *([EMA] if config.training.ema else []))
        model, zero = trainer.model, config.parallel.zero_stage > 0
        entries = [_Entry(kind, p, trained=True, partitioned=zero) for p in model.pieces.values() for kind in (FORWARD, ROUNDED, *kinds)]
        entries += [_Entry("weight", piece, trained=False, partitioned=False) for piece in model.fixed.values()]
        entries += [_Entry("weight", piece, trained=False, partitioned=True) for piece in model.sharded.values()]
        self._entries = sorted(entries, key=lambda entry: entry.key)
        # A state in host memory, which the CPU would hash before every save, is checked when a check is scheduled.
        on_device = [entry for entry in self._entries if entry.kind == FORWARD or not entry.trained]
        self._at_saves = on_device if config.parallel.offload == "optimizer" else self._entries
        self._untrained = UntrainedWeights(config, trainer)
        self._equal_until: int | None = None

    def after_step(self, step: Step) -> None:
        """Check the state after a step if it is due. Collective.

        Raises:
            UserError: copies differ. No checkpoint of this state is to be written.
        """
        number = step.state.step
        if self._every and number % self._every == 0:
            digests = self._check(number, step.result, self._entries)
            weights = [index for index, entry in enumerate(self._entries) if entry.trained and entry.kind == "weight"]
            self._untrained.check(number, [self._entries[index].piece.name for index in weights], digests[weights], step.result)

    def before_save(self, step: Step) -> None:
        """Check the state that is saved, unless after_step has; raises as that."""
        if self._every and step.state.step % self._every:
            self._check(step.state.step, step.result, self._at_saves)

    def _check(self, step: int, result: StepResult, entries: list[_Entry]) -> Tensor:
        """Compare entries after a step, and return their digests, int64 (entries,). Collective; raises as after_step."""
        digests = self._digests(entries)
        unequal = self._unequal(entries, digests)
        of_step = [value.to(self._mesh.device, torch.float64) for value in (result.gradient_norm, result.lr, result.skipped)]
        numbers = torch.cat([torch.stack(of_step), self._trainer.engine.counters()])
        copies, scalars = on_any_rank(self._mesh, torch.stack([unequal.any(), self._numbers_differ(numbers)]))
        if copies or scalars:
            raise self._error(step, entries, unequal, numbers, scalars=scalars)
        self._equal_until = step
        return digests

    def _digests(self, entries: list[_Entry]) -> Tensor:
        """The digests of entries, int64 (entries,): those of partitions are of this rank's elements."""
        sums: dict[tuple[str, str, tuple[tuple[int, int], ...]], Tensor] = {}
        for part in parts_of(self._trainer.engine, state=entries is self._entries):
            key = part.name, part.kind, part.box
            value = torch.as_tensor(part.digest, device=self._mesh.device)  # that of an offloaded optimizer is on the host
            sums[key] = sums[key] + value if key in sums else value
        zero = torch.zeros((), dtype=torch.int64, device=self._mesh.device)
        return torch.stack([sums.pop(entry.key, zero) for entry in entries])

    def _unequal(self, entries: list[_Entry], digests: Tensor) -> Tensor:
        """Which entries differ from another copy, bool (entries,). Replaces the digests of partitions by those of their weights."""
        mesh, unequal = self._mesh, torch.zeros(len(entries), dtype=torch.bool, device=self._mesh.device)
        divided = [entry.partitioned and entry.kind != FORWARD for entry in entries]
        experts = [entry.piece.is_sliced_along("expert") for entry in entries]
        for group, has_experts in ((mesh.dense, False), (mesh.data, True)):
            members = [index for index, expert in enumerate(experts) if expert == has_experts]
            shards, replicas = mesh.zero_groups(experts=has_experts)
            _sum(shards, digests, [index for index in members if divided[index]])
            if replicas is not None:
                _compare(replicas, digests, [index for index in members if divided[index]], unequal)
            _compare(group, digests, [index for index in members if not divided[index]], unequal)
        _compare(mesh.tensor, digests, [i for i, entry in enumerate(entries) if not entry.piece.is_sliced_along("tensor")], unequal)
        for shared, ends in (("tied_embedding", mesh.tied_embedding), ("pipeline", mesh.pipeline)):
            if ends is not None:
                _compare(ends, digests, [i for i, entry in enumerate(entries) if entry.piece.shared == shared], unequal)
        places = {entry.key: index for index, entry in enumerate(entries)}
        rounded = [i for i, entry in enumerate(entries) if entry.kind == ROUNDED]
        forward = [places[entries[i].piece.name, FORWARD, entries[i].piece.box] for i in rounded]
        unequal[rounded] |= digests[rounded] != digests[forward]
        return unequal

    def _numbers_differ(self, numbers: Tensor) -> Tensor:
        """Whether gradient norm, learning rate, skipped steps or counters differ between ranks, 0-dim. fp64 (numbers,)."""
        bits, unequal = numbers.view(torch.int64), torch.zeros(len(numbers), dtype=torch.bool, device=numbers.device)
        for group in self._mesh.all_ranks:
            _compare(group, bits, list(range(len(bits))), unequal)
        return unequal.any()

    def _error(self, step: int, entries: list[_Entry], unequal: Tensor, numbers: Tensor, *, scalars: bool) -> UserError:
        """What to say of copies that differ; every rank returns the same. Collective."""
        names = gathered([entry.piece.name for entry, wrong in zip(entries, unequal.tolist(), strict=True) if wrong])
        kept = set(names[:_NAMED])
        mine = [part for part in parts_of(self._trainer.engine) if part.name in kept]
        if scalars:
            labels = ("gradient norm", "learning rate", "skipped step", "updates", "loss scale", "steps without overflow")
            mine += [PieceDigest("number", label, (), 1, 1, digest(value)) for label, value in zip(labels, numbers, strict=True)]
        pairs = disagreements(self._mesh.layout, gather_objects(on_host(mine)))
        lines = [f"{difference} (on {' and '.join(dict.fromkeys(self._hosts[rank] for rank in difference.ranks))})" for difference in pairs]
        more = f"; and {len(names) - len(kept)} other weights" if len(names) > len(kept) else ""
        last = "no step of this job was checked before" if self._equal_until is None else f"all were equal after step {self._equal_until}"
        rule = f"copies differ after step {step}: {'; '.join(lines)}{more}; {last}, and no checkpoint of step {step} was written"
        fix = (
            "if a GPU of these nodes is broken, run again without its node (sbatch --exclude): the newest checkpoint is continued; if it "
            f"happens on other nodes too, try stage=certify; {KEY}=0 does not look"
        )
        return UserError.of(KEY, self._every, rule, fix)


def _sum(group: ProcessGroup, digests: Tensor, which: list[int]) -> None:
    """Add up some digests over a group, in place."""
    if group.size() > 1 and which:
        values = digests[which]
        dist.all_reduce(values, group=group)
        digests[which] = values


def _compare(group: ProcessGroup, digests: Tensor, which: list[int], unequal: Tensor) -> None:
    """Set `unequal` where some digests are not the same on all ranks of a group: their maximum is not their minimum."""
    if group.size() > 1 and which:
        values = torch.stack([digests[which], ~digests[which]])  # ~ turns the order of integers around
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
        unequal[which] |= values[0] != ~values[1]


#: Updates before a weight without a gradient is named: a weight behind one that is initially zero gets its first gradient later.
_EARLIEST = 10
#: Smallest learning rate of a step for which weights must have changed: smaller updates may be less than the rounding of a weight.
_LEAST_RATE = 1e-6


class UntrainedWeights:
    """Names the weights that did not change since the last check, and those that never had a gradient."""

    def __init__(self, config: RunConfig, trainer: Trainer) -> None:
        self._run_dir, self._trainer, self._mesh = Path(config.run_dir), trainer, trainer.mesh
        self._moment = OPTIMIZERS[config.optimizer.name].state[0]
        self._before: tuple[int, Tensor] | None = None

    def check(self, step: int, names: Sequence[str], digests: Tensor, result: StepResult) -> None:
        """Check the weights after a step. Collective.

        Args:
            names: of this rank's weights, in the same order on all data and tensor ranks.
            digests: of their master weights, int64 (weights,).
        """
        before, self._before = self._before, (step, digests)
        if before is None or float(result.lr) < _LEAST_RATE or bool(result.skipped) or self._trainer.engine.updates() < _EARLIEST:
            return
        last, values = before
        alive = torch.stack([values != digests, self._have_moments(names)]).long()
        reduce_over((self._mesh.dense, self._mesh.tensor), alive, dist.ReduceOp.MAX)
        untrained = (alive == 0).any().long()
        reduce_over(self._mesh.all_ranks, untrained, dist.ReduceOp.MAX)
        if int(untrained):
            self._tell(step, last, [[name for name, lives in zip(names, row, strict=True) if not lives] for row in alive.tolist()])

    def _have_moments(self, names: Sequence[str]) -> Tensor:
        """Whether this rank has first moments of a weight other than zero, bool (weights,)."""
        nonzero = dict.fromkeys(names, torch.zeros((), dtype=torch.bool, device=self._mesh.device))
        for fragment in self._trainer.engine.fragments():
            moments = fragment.tensors.get(self._moment)
            if isinstance(moments, Tensor):
                nonzero[fragment.piece.name] = nonzero[fragment.piece.name] | moments.any().to(self._mesh.device)
        return torch.stack([nonzero[name] for name in names])

    def _tell(self, step: int, last: int, mine: list[list[str]]) -> None:
        """Record what all ranks found. Collective."""
        ranks = gather_objects(mine)
        if self._mesh.rank != 0:
            return
        for row, finding in enumerate((f"did not change since step {last}", "never had a gradient")):
            weights = list(dict.fromkeys(name for rank in ranks for name in rank[row]))
            if weights:
                more = f" and {len(weights) - _NAMED} others" if len(weights) > _NAMED else ""
                log.warning("step %d: trained weights that %s: %s%s", step, finding, ", ".join(weights[:_NAMED]), more)
                events.record(self._run_dir, "untrained", step=step, what=finding, weights=weights)
