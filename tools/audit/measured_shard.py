"""A real run of stage=shard whose counts the model is compared with."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import orjson

from pipeline.config.data import DedupConfig
from pipeline.data.shard import text_shards
from tools.audit.counted_shard import COUNTS, PASSES
from tools.audit.shard_model import Corpus, Counts, Model

PROGRAM = Path(__file__).resolve().with_name("counted_shard.py")


def run(folder: Path, ranks: int, settings: list[str]) -> list[dict[str, Any]]:
    """Run the stage on some ranks of this machine, into FOLDER/shards; returns what every rank counted."""
    counted = folder / "counts"
    counted.mkdir(parents=True)
    command = [str(Path(sys.executable).with_name("mpirun")), "-n", str(ranks), sys.executable, str(PROGRAM), str(counted)]
    root = str(PROGRAM.parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
    subprocess.run([*command, *settings, f"data.shards={folder}/shards"], env=environment, check=True, cwd=root)
    return [json.loads((counted / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def measured(counted: list[dict[str, Any]]) -> dict[str, Counts]:
    """The counts of every pass, from those of the ranks."""
    passes = {}
    for name in PASSES:
        of_ranks = [rank["passes"][name] for rank in counted]
        sums = {count: sum(rank[count] for rank in of_ranks) for count in COUNTS}
        most = {"memory": max(rank["memory"] for rank in of_ranks), "most_opens": max(rank["opens"] for rank in of_ranks)}
        if name != "spans" or sums["opens"]:
            passes[name] = Counts(**{**sums, **most})
    return passes


def model_of(shards: Path, counted: list[dict[str, Any]], settings: list[str], sampled: int = 4) -> Model:
    """The model of the corpus of a run: its sizes from report and manifest, the numbers of similar texts as the ranks counted them.

    Args:
        shards: the output of the run.
        sampled: shards in which the mean size of the metadata records is measured.
    """
    report = json.loads((shards / "report.json").read_text())
    manifest = json.loads((shards / "manifest.json").read_text())
    keys = dict(setting.split("=", 1) for setting in settings)
    dropped = {kind: [0, 0] for kind in ("exact", "near")}
    for reasons in report["lost"].values():
        for reason, (documents, size) in reasons.items():
            for kind, total in dropped.items():
                if reason == f"dedup: {kind} duplicate":
                    total[:] = total[0] + documents, total[1] + size
    written = [entry for entry in manifest["files"].values() if "split" in entry]
    documents, text = (sum(entry[name] for entry in written) for name in ("documents", "text_bytes"))
    names = [name for name, entry in manifest["files"].items() if "split" in entry][:: max(1, len(written) // sampled)]
    metas = [len(orjson.dumps(meta)) for name in names for _, meta in text_shards.documents(shards / name)]
    gone = sum(total[0] for total in dropped.values())
    seen: Counter[str] = Counter()
    for rank in counted:
        seen.update(rank["corpus"])
    lost = sum(total[1] for total in dropped.values()) + 6 * seen["cut_words"] // len(counted)
    files = list(Path(keys["data.input"].strip("[]")).iterdir())
    sizes = tuple(file.stat().st_size for file in sorted(files))
    part = float(keys["data.part_megabytes"]) * 1e6 if "data.part_megabytes" in keys else None
    corpus = Corpus(
        input_bytes=sum(sizes),
        sizes=sizes,
        files=len(files),
        documents=documents + gone,
        text=text + lost,
        meta=round(sum(metas) / len(metas) * (documents + gone)),
        exact=dropped["exact"][0],
        near=dropped["near"][0],
        dropped_text=lost,
        **{name: seen[name] for name in ("pairs", "bucket_pairs", "edges", "texts", "texts_bytes", "fetched", "shown_bytes")},
        **{name: seen[name] for name in ("anchors", "windows", "asked")},
        cuts=seen["cuts"] // len(counted),
        report_bytes=sum((shards / name).stat().st_size for name in ("report.json", "report.html")),
        lookups=seen["lookups"] // len(counted),
        searches=seen["searches"] // len(counted),
        shard_bytes=float(keys.get("data.shard_megabytes", 128)) * 1e6,
        part_bytes=None if part is None else round(part),
    )
    dedup = DedupConfig()
    if "dedup.spans" in keys:
        dedup = DedupConfig(spans=int(keys["dedup.spans"]), span_megabytes=float(keys.get("dedup.span_megabytes", dedup.span_megabytes)))
    model = Model(corpus, len(counted), dedup)
    return Model(Corpus(**{**vars(corpus), "note_bytes": math.ceil(seen["note_bytes"] / model.parts)}), len(counted), dedup)
