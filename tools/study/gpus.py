"""The GPU, node and network of a published run."""

from __future__ import annotations

import re
from dataclasses import replace

from pipeline.config import hardware as hardware_files
from pipeline.config.hardware import Hardware
from tools.study.cells import Contradiction, integer, number, text_of
from tools.study.frameworks import FITTED

#: Words in the cell `gpu` -> file of conf/hardware/; the first that is found counts. Parts of one generation are near each other.
GPUS = {
    r"gb[23]00": "gb200",
    r"\bb[23]00": "b200",
    r"gh200|grace[ -]hopper": "gh200",
    r"h200": "h200",
    r"h[18]00.*pci": "h100-pcie",
    r"h[18]00": "h100",
    r"a[18]00.*pci": "a100-pcie",
    r"a[18]00": "a100-80",
    r"v100": "v100-32",
    r"mi250": "mi250x",
    r"mi3[0-9]{2}": "mi300x",
}
#: File -> memory in GB -> file of the part with that memory.
MEMORIES = {
    "a100-80": {40: "a100-40", 64: "a100-64"},
    "h100": {64: "h100-64", 94: "h100-96", 96: "h100-96"},
    "v100-32": {16: "v100-16"},
}
#: What is sold as one of these GPUs with slower links, GB/s.
EXPORT_LINKS = {"h800": 200.0, "a800": 200.0}
#: Systems that a row names in its text -> bandwidth of a node to others in one direction, GB/s, and its GPUs (their documentation).
SYSTEMS = {
    r"jean[ -]zay": (50.0, 0),
    r"leonardo": (50.0, 4),
    r"lumi(-g)?": (100.0, 8),
    r"frontier": (100.0, 8),
    r"juwels( booster)?": (100.0, 4),
    r"jupiter": (100.0, 4),
    r"selene": (200.0, 8),
    r"perlmutter": (100.0, 4),
    r"polaris": (50.0, 4),
    r"alps": (100.0, 4),
    r"isambard": (100.0, 4),
    r"mare ?nostrum ?5?": (100.0, 4),
    r"p4de?": (50.0, 8),  # AWS
    r"p5e?n?": (400.0, 8),
}
#: Fabric -> Gbit/s of a port.
PORTS = {"edr": 100, "hdr": 200, "ndr": 400, "xdr": 800, "slingshot": 200, "omni-?path": 100, "opa": 100}


def file_of(row: dict[str, str]) -> str:
    """Return the file of conf/hardware/ for the GPU of a row.

    Raises:
        Contradiction: there is none.
    """
    name = row["gpu"].lower()
    found = next((file for word, file in GPUS.items() if re.search(word, name)), None)
    if found is None:
        raise Contradiction(f"gpu={row['gpu']} is not one of {', '.join(hardware_files.names())}")
    memory = _memory(row) or (64 if "custom" in name else None)
    return MEMORIES.get(found, {}).get(round(memory or 0), found)


def _memory(row: dict[str, str]) -> float | None:
    """The memory of a GPU in GB, from its own cell or the name of the GPU."""
    if memory := number(row, "gpu_mem_gb"):
        return memory
    named = re.search(r"(\d+) ?g", row["gpu"].lower().replace("gb200", "").replace("gb300", ""))
    return float(named[1]) if named else None


def hardware_of(row: dict[str, str], assumed: list[str]) -> Hardware:
    """Return the hardware of a row.

    Args:
        row: cells by column.
        assumed: list to which assumptions are added.

    Raises:
        Contradiction: no file of conf/hardware/ describes its GPU.
    """
    found, memory, name = file_of(row), _memory(row), row["gpu"].lower()
    hardware = hardware_files.load(found)
    if exact := re.search(r"b300|mi3(?!00)[0-9]{2}|mi300a", name):
        assumed.append(f"gpu={exact[0]} as {found}")
    text = text_of(row)
    system = next((values for word, values in SYSTEMS.items() if re.search(rf"\b({word})\b", text.lower())), None)
    node = integer(row, "gpus_per_node", system[1] if system and system[1] else hardware.gpus_per_node, assumed)
    per_gpu = system[0] / node if system else _written_network(text, node)
    if not per_gpu and integer(row, "gpus", 1, []) > node:
        assumed.append(f"network={hardware.network_gb_s:g} GB/s a GPU")
    if found.startswith(("a100", "h100", "h200")) and "pcie" not in found:  # boards of four GPUs have no switch
        hardware = replace(hardware, switch=node >= 8)
    if memory and found not in ("a100-64", "gb200", "b200") and abs(memory * 2**30 / 1e9 - hardware.memory_gb) > 4:
        hardware = replace(hardware, memory_gb=memory * 2**30 / 1e9)
    if found == "gb200":
        node = hardware.gpus_per_node  # one NVLink domain, of which a tray of four GPUs is a part
    if links := [rate for word, rate in EXPORT_LINKS.items() if word in name]:
        hardware = replace(hardware, link_gb_s=links[0])
    if re.search(r"jean[ -]zay|omni-?path", text.lower()):
        hardware = replace(hardware, network_share=FITTED.omni_path)
    return hardware_files.with_node(hardware, gpus_per_node=node, network_gb_s=per_gpu)


def _written_network(text: str, node: int) -> float:
    """The bandwidth between nodes in GB/s for each GPU that a row's text states, as `8x HDR200` or `1600 Gbps`, of a node; 0 if none is."""
    ports = "|".join(PORTS)
    if found := re.search(rf"(\d) ?x ?({ports})(?:[ -]?(\d+))?\b", text.lower()):
        port = next(rate for word, rate in PORTS.items() if re.fullmatch(word, found[2]))
        return int(found[1]) * int(found[3] or port) / 8 / node
    if adapters := re.search(r"(\d) ?x ?(\d{2,3}) ?Gb?\b", text):
        return int(adapters[1]) * int(adapters[2]) / 8 / node
    if stated := re.search(r"(\d[\d,]*) ?(?:Gbps|Gbit/s|Gb/s)(?! *(?:NVLink|nvlink))( *(?:per|/|a) *GPU)?", text):
        return int(stated[1].replace(",", "")) / 8 / (1 if stated[2] else node)
    return 0.0
