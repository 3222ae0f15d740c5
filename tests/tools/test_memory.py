"""tools/memory: the plan of a run that has started, beside what it reserved."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.helpers import ROOT
from tests.world import composition


def test_the_plan_beside_what_was_reserved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(ROOT / "tools/memory"))["main"]
    assert main([str(tmp_path)]) == 2
    assert "has no config.yaml" in capsys.readouterr().err
    OmegaConf.save(composition(("stage=pretrain", "model=llama-tiny", "cluster.hardware=h100")), tmp_path / "config.yaml")
    assert main([str(tmp_path)]) == 2
    assert "wait until it has begun" in capsys.readouterr().err
    (tmp_path / "events.jsonl").write_text(json.dumps({"time": 1.0, "event": "run_start", "ranks": 8, "step": 0}) + "\n")
    assert main([str(tmp_path)]) == 0
    assert "the run had no GPU" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0, "memory_gb": 4.0}\n{"step": 2, "loss": 3.0, "memory_gb": 3.0}\n')
    assert main([str(tmp_path)]) == 0
    first, *table, last = capsys.readouterr().out.splitlines()
    assert first == f"{tmp_path}: 8 ranks, H100 SXM 80 GB"
    (total,) = (line.split()[1] for line in table if line.split()[0] == "total")
    used, _, ratio, *_ = last.split()[-5:]
    assert float(used) == 4.0
    assert float(ratio) == pytest.approx(4 / float(total), abs=0.02)
    assert main([str(tmp_path), "--hardware", "h101"]) == 2
    assert "--hardware=h101: must be one of" in capsys.readouterr().err
    OmegaConf.save(composition(("stage=pretrain", "model=llama-tiny")), tmp_path / "config.yaml")
    assert main([str(tmp_path)]) == 2
    assert "--hardware=None: is required" in capsys.readouterr().err
