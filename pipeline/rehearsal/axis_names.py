"""Names of the mesh axes that groups of ranks belong to."""

from __future__ import annotations

from pipeline.parallel.mesh import Mesh

#: Groups of parallel.zero_group -> names: ranks that shard the same weights, and ranks with the same shard; last those of experts.
ZERO = {
    "dense_shards": "ZeRO group",
    "dense_replicas": "ZeRO replicas",
    "data_shards": "expert shards",
    "data_replicas": "expert copies",
}
#: Axes of the mesh, in the order in which one is named for a group that several of them have.
AXES = ("tensor", "context", "expert", "dense", "data", "pipeline", "tied_embedding", "tensor_expert", *ZERO)


def axis_names(mesh: Mesh) -> dict[tuple[int, ...], str]:
    """Return the ranks of each group of the mesh -> the name of its axis; `data` if dense and data have the same ranks."""
    groups = ((name, getattr(mesh, name)) for name in reversed(AXES))
    names = {**ZERO, "tensor_expert": "expert"}
    if mesh.layout.expert == 1:
        names["dense"] = "data"
    return {group.ranks: names.get(name, name) for name, group in groups if group is not None}
