"""How far planned times and memory are from measured ones: their ranges, and the correction by runs of a site (cluster.correction).

The correction is one factor for the GPU of the site and one for its network. `stage=plan stage.run=RUN_DIR cluster.correction=FILE` adds
a run to FILE, and every plan with that `cluster.correction` takes the factors from there. They are the maximum a posteriori estimate of a
linear model of the logarithms of measured over planned time, with normal priors around 1: one run moves them a part of the way, more runs
further.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import yaml  # type: ignore[import-untyped] # PyYAML has no types
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.common.atomic_files import atomic_file, make_folder
from pipeline.common.errors import UserError
from pipeline.config.hardware import Hardware
from pipeline.config.schema import RunConfig

#: Standard deviations of the logarithms: of the factors of GPU and network between sites, and of a run beside them (layout, model, jitter).
#: Of the size that published runs have whose source is left out of the fit (tools/study/README.md).
COMPUTE, FABRIC, RUN = 0.15, 0.2, 0.15
#: Factor of the network's time for the derivative of a planned time.
SLOWER = 1.1
#: A run that takes longer or shorter than planned by more than this factor is not limited by GPU and network.
FARTHEST = 3.0


@dataclass(frozen=True)
class Anchor:
    """A measured run.

    Attributes:
        planned_s: seconds of a step as planned without correction.
        fabric_share: by how many percent the planned time grows when the network is one percent slower.
    """

    run: str = ""
    ranks: int = 1
    planned_s: float = 1.0
    measured_s: float = 1.0
    fabric_share: float = 0.0

    @classmethod
    def of(cls, measured: float, hardware: Hardware, seconds: Callable[[Hardware], float], run: str = "", ranks: int = 1) -> Anchor:
        """Return the anchor of a run.

        Args:
            hardware: of the run, without correction.
            seconds: the planned seconds of its step on some hardware.
        """
        planned = seconds(hardware)
        share = math.log(seconds(corrected(hardware, 1.0, SLOWER)) / planned) / math.log(SLOWER)
        return cls(run, ranks, planned, measured, min(1.0, max(0.0, share)))


@dataclass(frozen=True)
class SiteCorrection:
    """The content of a file of cluster.correction.

    Attributes:
        hardware: file of conf/hardware/ that the factors correct.
        compute: factor of the time of all kernels.
        fabric: factor of the time of all collectives.
    """

    hardware: str = ""
    compute: float = 1.0
    fabric: float = 1.0
    runs: list[Anchor] = field(default_factory=list)


def corrected(hardware: Hardware, compute: float, fabric: float) -> Hardware:
    """Return hardware whose kernels and collectives take these factors of their time. Equal factors are that of a step.

    Args:
        compute: factor of the time of matrix products, attention and memory-bound kernels.
        fabric: factor of the time of collectives, within and between nodes.
    """
    return replace(
        hardware,
        product_share=hardware.product_share / compute,
        attention_share=hardware.attention_share / compute,
        memory_share=hardware.memory_share / compute,
        kernel_us=hardware.kernel_us * compute,
        link_share=hardware.link_share / fabric,
        network_share=hardware.network_share / fabric,
        link_us=hardware.link_us * fabric,
        network_us=hardware.network_us * fabric,
        ring_us=hardware.ring_us * fabric,
    )


def fitted(anchors: Sequence[Anchor]) -> tuple[float, float]:
    """Return the factors of compute and fabric; 1 and 1 without anchors.

    Ridge regression of log(measured / planned) = (1 - fabric_share) log(compute) + fabric_share log(fabric), as the normal equations of
    two unknowns.
    """
    shares = [(1 - anchor.fabric_share, anchor.fabric_share) for anchor in anchors]
    residuals = [math.log(anchor.measured_s / anchor.planned_s) for anchor in anchors]
    a = sum(c * c for c, _ in shares) / RUN**2 + 1 / COMPUTE**2
    b = sum(c * f for c, f in shares) / RUN**2
    d = sum(f * f for _, f in shares) / RUN**2 + 1 / FABRIC**2
    u = sum(c * r for (c, _), r in zip(shares, residuals, strict=True)) / RUN**2
    v = sum(f * r for (_, f), r in zip(shares, residuals, strict=True)) / RUN**2
    determinant = a * d - b * b
    return math.exp((d * u - b * v) / determinant), math.exp((a * v - b * u) / determinant)


def added(before: SiteCorrection | None, hardware: str, anchor: Anchor) -> SiteCorrection:
    """Return a correction with one more run; an earlier entry of the same run directory is replaced.

    Raises:
        UserError: the run takes far longer or shorter than planned.
    """
    ratio = anchor.measured_s / anchor.planned_s
    if not 1 / FARTHEST <= ratio <= FARTHEST:
        rule = f"takes {anchor.measured_s:.4g} s a step, {ratio:.3g} x the planned time: something else than GPU and network limits it"
        fix = "look for the cause with stage=report, or name the GPU of the run with cluster.hardware"
        raise UserError.of("stage.run", anchor.run, rule, fix)
    runs = [*(run for run in (before.runs if before else []) if run.run != anchor.run), anchor]
    return SiteCorrection(hardware, *fitted(runs), runs)


def read(path: Path) -> SiteCorrection:
    """Read a file of cluster.correction.

    Raises:
        UserError: it is not there, or is damaged.
    """
    fix = "write it with stage=plan stage.run=RUN_DIR, or remove cluster.correction"
    if not path.is_file():
        raise UserError.of("cluster.correction", path, "is not a file", fix)
    try:
        content = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SiteCorrection), OmegaConf.load(path)))
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, OSError) as error:
        raise UserError.of("cluster.correction", path, f"cannot be read: {str(error).splitlines()[0]}", fix) from error
    assert isinstance(content, SiteCorrection)
    if not (content.compute > 0 and content.fabric > 0 and content.hardware):
        raise UserError.of("cluster.correction", path, "has no GPU, or factors that are not positive", fix)
    return content


def write(path: Path, correction: SiteCorrection) -> None:
    """Write a file of cluster.correction, complete or not at all."""
    make_folder(path.parent, "cluster.correction")
    values = {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in asdict(correction).items()}
    with atomic_file(path, "w") as file:
        file.write(OmegaConf.to_yaml(OmegaConf.create(values)))


def apply(hardware: Hardware, name: str, path: str) -> Hardware:
    """Return hardware with the correction of a file.

    Args:
        name: its file of conf/hardware/.
        path: cluster.correction.

    Raises:
        UserError: the file cannot be read, or was measured on another GPU.
    """
    correction = read(Path(path))
    if correction.hardware != name:
        rule = f"was measured on {correction.hardware}, and cluster.hardware is {name}"
        raise UserError.of("cluster.correction", path, rule, "use a file of runs on this GPU, or remove cluster.correction")
    return corrected(hardware, correction.compute, correction.fabric)


#: Share of the runs of publications that are left out of the fit in the ranges.
COVERED = 0.8
#: Measured over planned time between which they are, without measured runs of the site, and with one to three (cluster.correction): the
#: factors of tools/study/README.md. The first contain 81 % of the dense runs in 16 bits of 16 sources that were collected later, each
#: equal, and 91 % of publications that are left out of the fit; they do not hold for mixtures of experts of other frameworks.
TIME, CORRECTED_TIME = (0.67, 1.5), (0.82, 1.22)
#: The same for memory: a tenth each is outside of the 112 runs of the two publications that print theirs (tools/plan_score), which count
#: the same. Rehearsals of this engine with an allocator that keeps what it cannot join reserve up to 1.4 x the planned memory.
MEMORY = (0.91, 1.4)


def time_factors(config: RunConfig) -> tuple[float, float]:
    """Return the factors of the range of a planned time."""
    return TIME if config.cluster.correction is None else CORRECTED_TIME


def time_range(seconds: float, config: RunConfig) -> tuple[float, float]:
    """Return the range of a planned time, in its unit."""
    low, high = time_factors(config)
    return seconds * low, seconds * high


def memory_range(size: float) -> tuple[float, float]:
    """Return the range of a planned memory, in its unit."""
    return size * MEMORY[0], size * MEMORY[1]


def factors_text(config: RunConfig) -> str:
    """Return a sentence about the ranges of all times and memory of a table."""
    time, memory = (f"{low:.2f} to {high:.2f} x" for low, high in (time_factors(config), MEMORY))
    return f"ranges that contain {COVERED:.0%} of unseen runs: {time} each time, {memory} the memory"
