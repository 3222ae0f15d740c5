"""Which network NCCL chose: logs in the formats of several versions, and what is refused."""

import pytest

from pipeline.preflight.node_result import Network, parse, refused

#: Since NCCL 2.27, on InfiniBand with GPUDirect RDMA; the ranks of a node have one file each.
INFINIBAND = """
node7:811:811 [0] NCCL INFO Bootstrap: Using ib0:10.3.0.7<0>
node7:811:811 [0] NCCL INFO NCCL version 2.28.3+cuda12.9
node7:811:840 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.3.0.7<0>
node7:811:840 [0] NCCL INFO Initialized NET plugin IB
node7:811:840 [0] NCCL INFO Assigned NET plugin IB to comm
node7:811:840 [0] NCCL INFO Using network IB
node7:811:852 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node7:811:852 [0] NCCL INFO Channel 00/0 : 7[3] -> 0[0] [receive] via NET/IB/0/GDRDMA
node7:814:853 [3] NCCL INFO Channel 01/0 : 3[3] -> 4[0] [send] via NET/IB/1(2)/GDRDMA
"""
#: Sockets on one of two connections.
MIXED = INFINIBAND + "node7:814:853 [3] NCCL INFO Channel 02/0 : 3[3] -> 4[0] [send] via NET/Socket/3\n"
#: Slingshot with the plugin of libfabric, before NCCL 2.27.
SLINGSHOT = """
nid01:91:91 [0] NCCL INFO cudaDriverVersion 12040
NCCL version 2.21.5+cuda12.4
nid01:91:120 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.9.2
nid01:91:120 [0] NCCL INFO NET/OFI Selected Provider is cxi (found 4 nics)
nid01:91:120 [0] NCCL INFO Using network AWS Libfabric
nid01:91:131 [0] NCCL INFO Channel 00/0 : 4[0] -> 0[0] [receive] via NET/AWS Libfabric/0/GDRDMA(PCI)/Shared
"""
#: The same machine without the plugin.
FALLEN_BACK = """
nid01:91:91 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so.
nid01:91:120 [0] NCCL INFO NET/IB : No device found.
nid01:91:120 [0] NCCL INFO NET/Socket : Using [0]hsn0:10.253.1.1<0> [1]hsn1:10.253.1.2<0>
nid01:91:120 [0] NCCL INFO Using network Socket
nid01:91:131 [0] NCCL INFO Channel 00/0 : 4[0] -> 0[0] [receive] via NET/Socket/0
"""
#: libfabric whose provider is TCP.
TCP_PROVIDER = SLINGSHOT.replace(
    "Selected Provider is cxi (found 4 nics)", "Selected provider is tcp;ofi_rxm, fabric is 10.0.0.0/8 (found 1 nics)"
)
#: RCCL of a test that ended before its connections; it names devices only.
OLD = """
g1:5:5 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
g1:5:5 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB eth0:10.0.0.1<0>
RCCL version 2.20.5+hip6.2
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (INFINIBAND, Network("IB", None, True, "2.28.3+cuda12.9")),
        (MIXED, Network("Socket", None, False, "2.28.3+cuda12.9")),
        (SLINGSHOT, Network("AWS Libfabric", "cxi", True, "2.21.5+cuda12.4")),
        (FALLEN_BACK, Network("Socket", None, False, None)),
        (TCP_PROVIDER, Network("AWS Libfabric", "tcp;ofi_rxm", True, "2.21.5+cuda12.4")),
        (INFINIBAND.partition("Using network")[0], Network("IB", None, None, "2.28.3+cuda12.9")),
        (OLD, Network("IB", None, None, "2.20.5+hip6.2")),
        (INFINIBAND.replace("NET/IB/", "NET/IBext_v8/"), Network("IBext_v8", None, True, "2.28.3+cuda12.9")),
        ("", Network()),
    ],
    ids=["infiniband", "one socket", "slingshot", "fallen back", "tcp below libfabric", "no connections", "old", "plugin", "empty"],
)
def test_the_network_of_a_log(log, expected):
    assert parse(log) == expected


@pytest.mark.parametrize(
    ("log", "fabric", "problem"),
    [
        (INFINIBAND, "IB", None),
        (INFINIBAND.replace("NET/IB/", "NET/IBext_v8/"), "ib", None),
        (SLINGSHOT, "AWS Libfabric", None),
        (SLINGSHOT.replace("AWS Libfabric", "Libfabric"), "AWS Libfabric", None),
        (SLINGSHOT, "cxi", None),
        (SLINGSHOT, "IB", "NCCL uses AWS Libfabric (cxi), GPUDirect RDMA between nodes, not IB"),
        (MIXED, "IB", "NCCL uses Socket, without GPUDirect RDMA between nodes, not IB"),
        (FALLEN_BACK, "AWS Libfabric", "NCCL uses Socket, without GPUDirect RDMA between nodes, not AWS Libfabric"),
        (FALLEN_BACK, None, None),
        (FALLEN_BACK, "Socket", None),
        (TCP_PROVIDER, "AWS Libfabric", "NCCL uses AWS Libfabric (tcp;ofi_rxm), GPUDirect RDMA between nodes, not AWS Libfabric"),
        ("", "IB", None),
    ],
)
def test_what_the_profile_promises(log, fabric, problem):
    assert refused(parse(log), fabric) == problem
