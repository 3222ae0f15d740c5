"""The duplicates to drop, saved by part: a rank reads those of the parts that it processes."""

from __future__ import annotations

import numpy as np

from pipeline.common.atomic_files import atomic_file
from pipeline.data.dedup.clusters import ORIGIN, Clusters
from pipeline.data.shard.spilled_documents import Pool

SUFFIX = ".drop"
_ROW = np.dtype([("number", "<i8"), *ORIGIN.descr])


def save(pool: Pool, found: Clusters) -> None:
    """Save the drops of the parts of this rank; a part without any has no file."""
    rows = np.empty(len(found.drop), dtype=_ROW)
    rows["number"], rows["kept"], rows["kind"] = found.drop, found.origin["kept"], found.origin["kind"]
    bounds = np.searchsorted(found.drop, pool.starts)
    for part in pool.mine:
        if bounds[part] < bounds[part + 1]:
            with atomic_file(pool.stem(part).with_suffix(SUFFIX)) as handle:
                handle.write(rows[bounds[part] : bounds[part + 1]].tobytes())


def load(pool: Pool) -> tuple[np.ndarray, np.ndarray]:
    """The drops of the parts of this rank: `drop` and `origin` of Clusters."""
    paths = [pool.stem(part).with_suffix(SUFFIX) for part in pool.mine]
    rows = np.concatenate([np.empty(0, _ROW), *(np.fromfile(path, dtype=_ROW) for path in paths if path.exists())])
    origin = np.empty(len(rows), dtype=ORIGIN)
    origin["kept"], origin["kind"] = rows["kept"], rows["kind"]
    return rows["number"].copy(), origin
