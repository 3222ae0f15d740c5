"""Hardware as data: a file of conf/hardware/ for each GPU. Does not import torch."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import cache

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.common import knobs
from pipeline.common.errors import UserError
from pipeline.common.knobs import knob
from pipeline.config.cluster import ClusterConfig
from pipeline.config.paths import CONF_DIR
from pipeline.config.schema import PrecisionConfig


@dataclass(frozen=True)
class Peak:
    """The dense peak of the matrix products of a GPU, TFLOP/s, in a number format such as "bf16"."""

    tflops: float
    number_format: str
    gpu: str

    def __str__(self) -> str:
        return f"{self.tflops:g} TFLOP/s, the {self.number_format} peak of {self.gpu}"


@dataclass(frozen=True)
class Hardware:
    """A GPU and the node it is in. Rates of links are in one direction. The second half are constants that are fitted to measurements."""

    name: str = knob("", "name in the output")
    device: str = knob("", "regular expression that matches all of the GPU's name in CUDA (torch.cuda.get_device_name); empty for none")
    device_name: str = knob("", "such a name, which stage=rehearse shows; empty for a GPU that it cannot answer for")
    capability: str = knob("", 'compute capability in CUDA, such as "9.0"; empty for none')
    tflops: float = knob(0.0, "dense peak of matrix products in 16 bits", unit="TFLOP/s", above=0)
    tflops_fp8: float = knob(0.0, "dense peak in 8 bits; 0 for none", unit="TFLOP/s", at_least=0)
    tflops_fp32: float = knob(0.0, "peak of matrix products in fp32", unit="TFLOP/s", above=0)
    multiprocessors: int = knob(0, "streaming multiprocessors or compute units", at_least=1)
    memory_gb: float = knob(0.0, "memory of a GPU", unit="10^9 bytes", above=0)
    memory_tb_s: float = knob(0.0, "memory bandwidth", unit="TB/s", above=0)
    gpus_per_node: int = knob(8, "GPUs of a node, each with a rank", at_least=1)
    link_gb_s: float = knob(0.0, "bandwidth of a GPU to all others of its node", unit="GB/s", above=0)
    switch: bool = knob(True, "whether a pair of GPUs can use the bandwidth of all links of a GPU")
    network_gb_s: float = knob(0.0, "share of a GPU in the bandwidth between nodes", unit="GB/s", above=0)
    watts: float = knob(0.0, "power of a GPU", unit="W", above=0)
    node_watts: float = knob(0.0, "power of the rest of a node, for each GPU", unit="W", at_least=0)
    product_share: float = knob(0.71, "share of the peak that large matrix products sustain", above=0, at_most=1)
    attention_share: float = knob(0.48, "share of the peak that the fused attention kernel sustains at head width 128", above=0, at_most=1)
    memory_share: float = knob(0.72, "share of the memory bandwidth that memory-bound kernels sustain", above=0, at_most=1)
    link_share: float = knob(0.8, "share of the bandwidth within a node that collectives sustain", above=0, at_most=1)
    network_share: float = knob(0.68, "share of the bandwidth between nodes that collectives sustain", above=0, at_most=1)
    kernel_us: float = knob(4.0, "time of the smallest kernel", unit="microseconds", at_least=0)
    link_us: float = knob(8.0, "time of the smallest collective within a node", unit="microseconds", at_least=0)
    network_us: float = knob(20.0, "time of the smallest collective between two nodes", unit="microseconds", at_least=0)
    ring_us: float = knob(4.8, "time of a step of a ring of nodes, beyond its bytes", unit="microseconds", at_least=0)
    source: str = knob("", "where the figures come from")

    def peak(self, precision: PrecisionConfig) -> Peak:
        """Return the peak in the precision of a training. With fp8 it is that in 8 bits, though attention and the head compute in bf16."""
        if precision.fp8 != "none" and self.tflops_fp8:
            return Peak(self.tflops_fp8, "fp8", self.name)
        return Peak(self.tflops_fp32 if precision.dtype == "fp32" else self.tflops, precision.dtype, self.name)


def names() -> list[str]:
    """The files of conf/hardware/."""
    return sorted(path.stem for path in (CONF_DIR / "hardware").glob("*.yaml"))


@cache
def load(name: str, key: str = "cluster.hardware") -> Hardware:
    """Read conf/hardware/NAME.yaml.

    Raises:
        UserError: there is no such file, which is said of `key`, or it does not describe a GPU.
    """
    path = CONF_DIR / "hardware" / f"{name}.yaml"
    if not path.is_file():
        fix = f"add conf/hardware/{name}.yaml with the keys of another file, or choose one of these"
        raise UserError.of(key, name, f"must be one of {', '.join(names())}", fix)
    try:
        composed = OmegaConf.merge(OmegaConf.structured(Hardware), OmegaConf.load(path))
        hardware = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise UserError.of(str(path), "?", str(error).splitlines()[0], "use the keys of pipeline/config/hardware.py") from error
    assert isinstance(hardware, Hardware)
    UserError.raise_for(knobs.range_violations(hardware, f"{path}: "))
    return hardware


@cache
def of_device(device_name: str) -> Hardware | None:
    """Return the hardware whose `device` matches a name of torch.cuda.get_device_name, ignoring case; None if no file does."""
    files = map(load, names())
    return next((file for file in files if file.device and re.fullmatch(file.device, device_name, re.IGNORECASE)), None)


def of_cluster(cluster: ClusterConfig) -> Hardware:
    """Return the hardware of a cluster, with its nodes and network.

    Raises:
        UserError: cluster.hardware is not set, or names no file.
    """
    if cluster.hardware is None:
        fix = f"set it to one of {', '.join(names())}, or add a file to conf/hardware/"
        raise UserError.of("cluster.hardware", "null", "stage=plan requires the GPU of the nodes", fix)
    return with_node(load(cluster.hardware), gpus_per_node=max(1, cluster.tasks_per_node), network_gb_s=cluster.network_gb_s)


def with_node(hardware: Hardware, *, gpus_per_node: int = 0, network_gb_s: float = 0.0) -> Hardware:
    """Return the hardware with the node and network of a cluster, where they are set (not 0)."""
    return dataclasses.replace(
        hardware,
        gpus_per_node=gpus_per_node or hardware.gpus_per_node,
        network_gb_s=network_gb_s or hardware.network_gb_s,
    )
