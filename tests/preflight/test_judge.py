"""Which nodes are bad: the judge by a table, one change to the results of eight healthy nodes at a time."""

import copy
import dataclasses

import pytest

from pipeline.config.cluster import ClusterConfig
from pipeline.preflight import judge

NODES = [f"n{i}" for i in range(8)]
CLUSTER = ClusterConfig(gpus_per_node=2, fabric="IB", host_suffix="i")


def healthy() -> dict:
    results = {}
    for index, node in enumerate(NODES):
        names = [f"{NODES[(index + step) % 8]}i" for step in (0, 1, 2)] + ["n0i"]
        gpu = {
            "name": "H100",
            "uuid": "GPU-1",
            "memory_gb": 85.5,
            "sm_mhz": 1500.0,
            "max_sm_mhz": 1980.0,
            "ecc": 0,
            "faults": [],
            "throttled": [],
        }
        rank = {"device": "H100", "gpus_seen": 2, "memory_gb": [85.0, 84.5], "matmul_ms": 1.5 + 0.01 * index, "error": None}
        results[node] = {
            "node": node, "step": "1.0.0", "phase": "complete", "error": None, "host": f"{node}.cluster",
            "smi": {"driver": "550", "gpus": [dict(gpu), {**gpu, "uuid": "GPU-2"}]},
            "ranks": [{**rank, "rank": 2 * index}, {**rank, "rank": 2 * index + 1}], "missing_ranks": [],
            "names": dict.fromkeys([*names, f"{node}.cluster"]),
            "file_system": {
                "folder": "/scratch/run", "seconds": 0.02, "free_gb": 900.0, "total_gb": 1000.0, "free_inodes": 10**6, "quota": [],
                "error": None,
            },
            "versions": {"python": "3.12.1", "torch": "2.13.0", "nccl": "2.28.3", "deepspeed": "0.19.8", "commit": "abc"},
            "inside_gb_s": 300.0, "between_gb_s": {NODES[index - 1]: 90.0 + index, NODES[(index + 1) % 8]: 90.0}, "all_gb_s": 85.0,
            "clock": [1000.0 + 0.001 * index + round_ for round_ in range(5)],
            "network": {"name": "IB", "provider": None, "direct": True, "version": "2.28.3"},
        }  # fmt: skip
    return results


def test_healthy_nodes():
    findings = judge.judge(healthy(), NODES, CLUSTER)
    assert judge.bad_nodes(findings) == {}
    assert judge.is_complete(healthy(), NODES)
    checks = {finding.check for finding in findings}
    assert checks >= {"GPUs", "GPU 1", "GPU memory", "matrix product", "all-reduce inside", "all-reduce between", "network", "host names"}
    assert checks >= {"file system", "clock", "versions"}


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("smi", "gpus"), [], "has 1 GPUs, not 2"),
        (("smi",), {"error": "nvidia-smi: Unable to determine the device handle"}, "nvidia-smi: Unable to determine"),
        (("smi", "gpus", 1, "ecc"), 4, "GPU 1 (GPU-2): 4 uncorrected ECC errors"),
        (("smi", "gpus", 0, "faults"), ["a row that could not be remapped"], "GPU 0 (GPU-1): has a row that could not be remapped"),
        (("smi", "gpus", 0, "throttled"), ["hw_slowdown"], "clocks are reduced: hw_slowdown"),
        (("smi", "gpus", 0, "max_sm_mhz"), 1410.0, "its highest clock is 1410 MHz, that of others 1980 MHz"),
        (("ranks", 1, "memory_gb"), [85.0, 60.0], "the GPU of rank 7 has 60 of 85 GB free: another process uses it"),
        (("ranks", 0, "memory_gb"), [42.0, 41.9], "the GPU of rank 6 has 42 GB, those of others 85 GB"),
        (("ranks", 0, "matmul_ms"), 2.1, "a matrix product on rank 6 takes 2.1 ms, 1.36 times the median"),
        (("ranks", 0, "matmul_ms"), 1.9, None),
        (("ranks", 0, "error"), "RuntimeError: CUDA error: uncorrectable ECC error encountered", "rank 6: RuntimeError: CUDA error"),
        (("missing_ranks",), [7], "rank 7 gave no result"),
        (("inside_gb_s",), 200.0, "all-reduce inside the node: 200 GB/s, the median is 300"),
        (("inside_gb_s",), 250.0, None),
        (("between_gb_s",), {"n2": 20.0, "n4": 21.0}, "all-reduce with a neighbor: 21 GB/s, the median is 90"),
        (("between_gb_s",), {"n2": 20.0, "n4": 90.0}, None),
        (("network", "name"), "Socket", "NCCL uses Socket, GPUDirect RDMA between nodes, not IB"),
        (
            ("file_system", "error"),
            "No space left on device",
            "cannot be written, flushed and read back: No space left on device (900 of 1000 GB",
        ),
        (("file_system", "free_gb"), 0.5, "0.5 of 1000 GB and 1000000 inodes are free, less than cluster.free_gb=1"),
        (("file_system", "free_inodes"), 12, "900 of 1000 GB and 12 inodes are free; 1000 inodes are required"),
        (("file_system", "free_inodes"), None, None),
        (("file_system", "quota"), ["/scratch 900* 800 850"], "quota exceeded: /scratch 900* 800 850"),
        (("file_system", "seconds"), 7.0, "1 MB was written in 7 s, the median is 0.02 s"),
        (("file_system", "seconds"), 3.0, None),
        (("file_system",), {"error": "no answer within 60 s"}, "no answer within 60 s"),
        (("clock",), [1007.0, 1008.0, 1009.0, 1010.0, 1011.0], "its clock differs by +7 s from the median"),
        (("clock",), [1009.0, 1001.0, 1002.0, 1003.0, 1004.0], None),
        (("versions", "torch"), "2.11.0", "torch is 2.11.0, on most nodes 2.13.0"),
        (("versions", "commit"), None, "commit is None, on most nodes abc"),
        (("names", "n4i"), "Name or service not known", "does not resolve the host name n4i (Name or service not known), which others do"),
        (("names", "n3.cluster"), "Name or service not known", "its host name n3.cluster is not resolved (Name or service not known)"),
        (("names",), {"error": "no answer within 50 s"}, "name server: no answer within 50 s"),
        (("phase",), "local", "did not get beyond 'local', as others did (it hangs, or was killed)"),
    ],
)
def test_one_node_with_one_fault(path, value, reason):
    results = healthy()
    target = results["n3"]
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    if path == ("smi", "gpus"):  # as on machines without nvidia-smi
        results["n3"]["smi"] = None
        results["n3"]["ranks"][0] |= {"gpus_seen": 1, "gpu": "GPU-1"}
        results["n3"]["ranks"][1] |= {"gpus_seen": 1, "gpu": "GPU-1"}  # two ranks on one
    bad = judge.bad_nodes(judge.judge(results, NODES, CLUSTER))
    assert list(bad) == ([] if reason is None else ["n3"]), bad
    assert reason is None or reason in bad["n3"]


def test_gpus_of_which_each_rank_sees_one():
    """srun --gpus-per-task=1: nvidia-smi shows the first rank its own GPU, and the others theirs."""
    results = healthy()
    for result in results.values():
        first, second = result["smi"]["gpus"]
        result["smi"]["gpus"] = [first]
        result["ranks"][1]["smi"] = {"driver": "550", "gpus": [second]}
        for rank in result["ranks"]:
            rank["gpus_seen"] = 1
    assert judge.bad_nodes(judge.judge(results, NODES, CLUSTER)) == {}
    results["n6"]["ranks"][1]["smi"]["gpus"][0]["ecc"] = 1
    assert judge.bad_nodes(judge.judge(results, NODES, CLUSTER)) == {"n6": "GPU 1 (GPU-2): 1 uncorrected ECC errors"}


def test_the_slow_node_of_slow_pairs():
    """Both pairs of a node are slow, and each of its neighbors has another pair, which is not."""
    results = healthy()
    results["n3"]["between_gb_s"] = {"n2": 9.0, "n4": 9.1}
    results["n2"]["between_gb_s"]["n3"] = 9.0
    results["n4"]["between_gb_s"]["n3"] = 9.1
    assert judge.bad_nodes(judge.judge(results, NODES, CLUSTER)).keys() == {"n3"}


def test_a_name_that_nobody_resolves_is_its_nodes_fault():
    results = healthy()
    for node in ("n3", "n2", "n1"):
        results[node]["names"]["n3i"] = "Name or service not known"
    bad = judge.bad_nodes(judge.judge(results, NODES, CLUSTER))
    assert bad == {"n3": "its host name n3i is not resolved (Name or service not known)"}


def test_a_node_without_a_result():
    results = healthy()
    del results["n5"]
    assert judge.bad_nodes(judge.judge(results, NODES, CLUSTER)) == {
        "n5": "gave no result: its processes did not start, hang or were killed"
    }
    assert not judge.is_complete(results, NODES)


def test_where_all_stopped_at_the_same_place_no_node_is_named():
    results = {node: {**result, "phase": "connected"} for node, result in healthy().items()}
    assert judge.bad_nodes(judge.judge(results, NODES, CLUSTER)) == {}
    assert not judge.is_complete(results, NODES)


@pytest.mark.parametrize(("count", "common"), [(4, []), (5, [("GPU memory", 5), ("network", 5)]), (8, [("GPU memory", 8), ("network", 8)])])
def test_what_most_nodes_fail_is_no_fault_of_the_nodes(count, common):
    """However many GPUs of a node fail."""
    results = healthy()
    for node in NODES[:count]:
        results[node]["network"]["name"] = "Socket"
        for rank in results[node]["ranks"]:
            rank["memory_gb"] = [85.0, 20.0]
    found = judge.common_problems(judge.judge(results, NODES, CLUSTER), NODES)
    assert [(check, number) for check, number, _ in found] == common


def test_the_table_of_many_nodes_has_the_bad_ones():
    nodes = [f"m{i}" for i in range(1000)]
    results = {node: {**copy.deepcopy(healthy()["n1"]), "node": node, "names": {}} for node in nodes}
    results["m77"]["ranks"][0]["matmul_ms"] = 9.0
    del results["m500"]
    findings = judge.judge(results, nodes, dataclasses.replace(CLUSTER, fabric=None))
    bad = judge.bad_nodes(findings)
    lines = judge.table(findings, nodes, bad).splitlines()
    assert len(lines) < 25
    assert lines[0].split() == ["node", "check", "value", "median", "verdict"]
    assert [line.split()[0] for line in lines[1:3]] == ["m77", "m500"]
    assert "9 ms" in lines[1]
    assert judge.verdict(nodes, bad).startswith("preflight: 2 of 1000 nodes bad: ")
