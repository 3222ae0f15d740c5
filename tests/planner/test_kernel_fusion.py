"""What a part saves and allocates, from recordings that are written down by hand."""

from __future__ import annotations

from pipeline.planner.kernel_fusion import Fused, fuse
from pipeline.planner.operations import Collective, Operation, Phase, Product
from pipeline.planner.recorder import Kernel, Recording, Storage

PRODUCT = Product("blocks.0.weight", "forward", 1, 1, 1)
GATHER = Collective("all_gather", "tensor", "forward", 40)


class Script:
    """Writes a recording, call by call. A storage is named by a letter; the call that writes it allocates it."""

    def __init__(self) -> None:
        self.recording, self._keys = Recording(), dict[str, int]()

    def call(
        self,
        part: str,
        reads: str = "",
        *,
        operation: Operation | None = None,
        phase: Phase = "forward",
        amount: int | None = None,
        frees: str = "",
        graph: int | None = 0,
        **writes: int,
    ) -> Script:
        """Append a kernel.

        Args:
            part: of the model.
            reads: letters of the storages that it reads.
            operation: as of Kernel.
            phase: as of Kernel.
            amount: bytes that it reads of each; all when None.
            frees: letters of the storages that are freed after it.
            graph: as of Kernel.
            writes: letter -> bytes of the storages that it allocates and writes.
        """
        kernels, storages = self.recording.kernels, self.recording.storages
        for letter, size in writes.items():
            self._keys[letter] = len(self._keys)
            storages[self._keys[letter]] = Storage(size, part, phase, len(kernels), len(kernels))
        read = {self._keys[letter]: storages[self._keys[letter]].bytes if amount is None else amount for letter in reads}
        written = {self._keys[letter]: size for letter, size in writes.items()}
        kernels.append(Kernel(part, phase, "add" if operation is None else type(operation).__name__, operation, read, written, graph))
        for letter in frees:
            storages[self._keys[letter]].died = len(kernels)
        return self

    def backward(
        self,
        part: str,
        reads: str,
        *,
        operation: Operation | None = None,
        amount: int | None = None,
        graph: int | None = 0,
        **writes: int,
    ) -> Script:
        """Append a kernel of the backward pass."""
        return self.call(part, reads, operation=operation, phase="backward", amount=amount, graph=graph, **writes)

    def fused(self, *, compiled: bool) -> Fused:
        """The memory of the parts."""
        return fuse(self.recording, fused=compiled)


def test_a_tensor_is_free_once_its_last_reader_has_run():
    script = Script().call("0", a=100).call("0", "a", frees="a", b=50).call("0", "b", c=70)
    assert script.fused(compiled=False).peak["0"] == (150, 0), "the third call has b and c, no longer a"


def test_the_peaks_of_both_passes_are_beyond_what_is_saved_between_them():
    script = Script().call("0", a=30).call("0", "a", frees="b", b=100)
    fused = script.backward("0", "a", c=500).fused(compiled=False)
    assert fused.saved["0"] == {"elementwise (add)": 30}
    assert fused.peak["0"] == (100, 500)


def test_a_block_saves_only_the_slice_of_its_input_that_it_reads():
    """The rest stays with the part that made it: other blocks of the same kind do not have it."""
    script = Script().call("embed", a=1000).call("0", "a", amount=10, b=10).backward("0", "a", amount=10, c=10)
    assert script.fused(compiled=False).saved == {"0": {"elementwise (add)": 10}, "embed": {"elementwise (add)": 990}}


def test_memory_bound_kernels_of_a_compiled_block_are_one_and_those_of_the_head_are_not():
    """Only blocks are compiled: the head writes what its kernels pass on, and saves what its backward pass reads."""
    for part, peak, saved in (("0", 70, 20), ("head", 90, 50)):
        script = Script().call(part, operation=PRODUCT, a=20).call(part, "a", b=50).call(part, "b", frees="b", c=70)
        script.call(part, "c", operation=PRODUCT, frees="c", d=0).call(part, "a", e=30)
        fused = script.backward(part, "ae", f=0).fused(compiled=True)
        assert (fused.peak[part][0], sum(fused.saved[part].values())) == (peak, saved)


def test_what_only_a_repeated_gathering_reads_is_computed_again():
    """A product of the backward pass needs its operand in memory; the gathering of a slice is as free to begin with the norm again."""
    for operation, saved in ((GATHER, 20), (PRODUCT, 30)):
        script = Script().call("0", operation=PRODUCT, a=20).call("0", "a", b=10).call("0", "b", operation=GATHER, c=40)
        script.call("0", "c", operation=PRODUCT, frees="c", d=0).backward("0", "b", operation=operation, e=40)
        fused = script.backward("0", "e", operation=PRODUCT, f=0).backward("0", "a", g=0).fused(compiled=True)
        assert sum(fused.saved["0"].values()) == saved


def test_what_is_not_compiled_in_a_block_saves_and_writes_as_without_the_compiler():
    for graph, peak, saved in ((0, 70, 20), (None, 90, 50)):
        script = Script().call("0", operation=PRODUCT, a=20).call("0", "a", graph=graph, b=50).call("0", "b", graph=graph, frees="b", c=70)
        script.call("0", "c", operation=PRODUCT, frees="c", d=0).call("0", "a", e=30)
        fused = script.backward("0", "ae", graph=graph, f=0).fused(compiled=True)
        assert (fused.peak["0"][0], sum(fused.saved["0"].values())) == (peak, saved)


def test_a_graph_computes_nothing_of_another_one_again():
    """The second graph reads a result of the first one, and computes again what follows from it only if that is kept."""
    for graph, saved in ((0, 20), (1, 70)):
        script = Script().call("0", operation=PRODUCT, a=20).call("0", "a", b=50).call("0", "b", graph=graph, c=70)
        assert (
            sum(script.backward("0", "c", graph=graph, d=0).backward("0", "ab", e=0).fused(compiled=True).saved["0"].values())
            == saved + 20 * graph
        )
    script = Script().call("0", operation=PRODUCT, a=20).call("0", "a", b=50)
    assert sum(script.backward("0", "ab", graph=1, c=0).fused(compiled=True).saved["0"].values()) == 70, "an input of its backward pass"
