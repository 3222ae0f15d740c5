"""Names of the mesh axes that groups of ranks belong to."""

from __future__ import annotations

from pipeline.parallel.mesh import Mesh

#: Axes of the mesh, in the order in which one is named for a group that several of them have.
AXES = ("tensor", "context", "expert", "dense", "data", "pipeline", "tied_embedding")


def axis_names(mesh: Mesh) -> dict[tuple[int, ...], str]:
    """Return the ranks of each group of the mesh -> the name of its axis; `data` if dense and data have the same ranks."""
    groups = ((name, getattr(mesh, name)) for name in reversed(AXES))
    return {group.ranks: name if name != "dense" or mesh.layout.expert > 1 else "data" for name, group in groups if group is not None}
