"""A pass of torch.compile over the graph of a block: gatherings start before the products that do not need them.

In the backward pass the input of a tensor-parallel region is gathered again for the gradient of the weight. Autograd queues this directly
before the product that reads it, which then waits for all of it. Its input is known much earlier.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_CAT, _SPLIT, _RESHAPE = torch.ops.aten.cat.default, torch.ops.aten.split.Tensor, torch.ops.aten.reshape.default
_COLLECTIVES = ("_c10d_functional", "symm_mem")
_PRODUCTS = ("mm", "addmm", "bmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")


class EarlyGathers(CustomGraphPass):
    """Moves gatherings, and removes the copies of gathered sequences where a micro-batch is one sequence.

    A gathering moves to the first product since the collective before it, so that all ranks queue their collectives in the same order as
    without the pass. It stays where it is if its input depends on such a product.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Change the graph of a forward or a backward pass in place."""
        for gather in graph.find_nodes(op="call_function", target=_GATHER):
            _start_early(gather, list(graph.nodes))
        for node in graph.find_nodes(op="call_function", target=_CAT):
            _remove_copy(node)

    def uuid(self) -> bytes:
        """Part of the key under which inductor keeps compiled graphs."""
        return get_hash_for_files((__file__,))


def _start_early(gather: fx.Node, nodes: list[fx.Node]) -> None:
    """Move a gathering, and what its input is computed from, before the first product since the collective before it."""
    place = {node: index for index, node in enumerate(nodes)}
    product = None
    for node in reversed(nodes[: place[gather]]):
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _COLLECTIVES:
            break
        if _is_product(node):
            product = node
    if product is None:
        return
    moved = sorted(_computed_since(product, gather, place), key=place.__getitem__)
    if not any(map(_is_product, moved)):
        for node in moved:
            product.prepend(node)


def _computed_since(product: fx.Node, node: fx.Node, place: dict[fx.Node, int]) -> set[fx.Node]:
    """The node and all nodes from the product on that it depends on."""
    computed: set[fx.Node] = set()
    left = [node]
    while left:
        node = left.pop()
        if node not in computed and place[node] >= place[product]:
            computed.add(node)
            left += node.all_input_nodes
    return computed


def _remove_copy(cat: fx.Node) -> None:
    """Replace the concatenation of all slices of a tensor by a view of it, if its elements are in the same order.

    Of a graph for several shapes (after a sequence warm-up, say) nothing is known of the order, and the copy stays.
    """
    pieces, dim = cat.args[0], cat.args[1] if len(cat.args) > 1 else 0
    assert isinstance(pieces, list | tuple)
    splits = {piece.args[0] if isinstance(piece, fx.Node) and piece.target is operator.getitem else None for piece in pieces}
    split = splits.pop()
    if splits or not isinstance(split, fx.Node) or split.target is not _SPLIT:
        return
    source, size, split_dim = (*split.args, 0)[:3]
    assert isinstance(source, fx.Node)
    shape = source.meta["val"].shape
    if not all(isinstance(number, int) for number in (size, shape[0], shape[split_dim])):
        return
    complete = [piece.args[1] for piece in pieces] == list(range(-(-shape[split_dim] // size)))  # type: ignore[union-attr]
    if complete and {dim, split_dim} == {0, 1} and (size if split_dim == 0 else shape[0]) == 1:
        with cat.graph.inserting_before(cat):
            view = cat.graph.call_function(_RESHAPE, (source, list(cat.meta["val"].shape)))
        view.meta.update(cat.meta)
        cat.replace_all_uses_with(view)
        cat.graph.erase_node(cat)


def _is_product(node: fx.Node) -> bool:
    """Whether a node takes long: a matrix product or attention."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = node.target._opname
    return name in _PRODUCTS or "attention" in name
