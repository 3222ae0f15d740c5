"""What context parallelism does not support is refused. Training with it: test_layouts.py."""

import pytest

from tests.helpers import pipeline


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["training.sequence_length=36"], ["training.sequence_length=36", "2 x parallel.context=4", "multiple of 8"]),
        (["parallel.tensor=2", "training.sequence_length=24"], ["parallel.tensor=2", "multiple of 16"]),
        (["training.sequence_warmup=[{until_step: 2, value: 12}]"], ["training.sequence_warmup.0.value=12", "multiple of 8"]),
        (["parallel.context_kind=ulysses", "model.kv_heads=2"], ["parallel.context=4", "model.kv_heads=2", "context_kind=ring"]),
        (["model=bert-tiny"], ["parallel.context=4", "model.family=bert"]),
    ],
)
def test_unsupported_combinations_are_refused(tmp_path, arguments, said):
    given = ["model=llama-tiny", "parallel.context=4", "dry_run=true", "dry_run.world_size=8", "training.sequence_length=32", *arguments]
    message = pipeline(*given, f"run_dir={tmp_path / 'run'}", expect=2)
    assert all(text in message for text in [*said, "fix:"]), message
