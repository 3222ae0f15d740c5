"""Files of an export: one tensor in memory, read again, kept when the job is killed; the single file and the comparison of logits."""

import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.common import artifact
from pipeline.common.atomic_files import report_disk_full
from pipeline.common.errors import CheckFailed, UserError
from pipeline.common.mpi import SingleProcessComm
from pipeline.conversion import consolidated_export, huggingface_export, safetensors_file, stock_logits
from pipeline.conversion.export_files import ExportWriter, OutputFile, export_folder, share, write_manifest
from pipeline.models import config_classes, registry
from tests.conversion.test_huggingface_export import InMemory, random_model
from tests.models.small_decoders import CONFIGS

CONFIG = CONFIGS["llama-grouped"]
SHARD = 60_000


class Counted(InMemory):
    """Weights that count what is read, and are interrupted at a read."""

    def __init__(self, model: torch.nn.Module, killed_at: int | None = None) -> None:
        super().__init__(model)
        self.read: list[str] = []
        self._killed_at = killed_at

    def tensor(self, name: str) -> torch.Tensor:
        if len(self.read) == self._killed_at:
            raise KeyboardInterrupt
        self.read.append(name)
        return super().tensor(name)


def export(output: Path, weights: InMemory, settings: dict[str, object], dtype: torch.dtype = torch.float32) -> None:
    with export_folder(output, settings, SingleProcessComm()) as (folder, writer):
        parameters = huggingface_export.write_weights(folder, weights, CONFIG, dtype=dtype, shard_bytes=SHARD, writer=writer)
        huggingface_export.write_configs(folder, CONFIG, dtype=dtype, end_of_document_id=0)
        write_manifest(folder, writer, settings, {"parameters": parameters})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_killed_export_keeps_its_complete_files(tmp_path):
    model = random_model(CONFIG)
    export(tmp_path / "undisturbed", InMemory(model), {"dtype": "fp32"})
    total = len(InMemory(model).weights)
    killed = Counted(model, killed_at=total // 2)
    with pytest.raises(KeyboardInterrupt):
        export(tmp_path / "hf", killed, {"dtype": "fp32"})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hf.partial", "undisturbed"]
    again = Counted(model)
    export(tmp_path / "hf", again, {"dtype": "fp32"})
    assert 0 < len(again.read) < total
    assert len(again.read) + len(killed.read) < total + 10  # the tensors of one file twice
    assert contents(tmp_path / "hf") == contents(tmp_path / "undisturbed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "undisturbed"]
    artifact.verify_files(tmp_path / "hf", artifact.read(tmp_path / "hf", key="stage.output", stage="convert"))


def test_an_output_behind_a_link_is_written_where_the_link_leads(tmp_path):
    """For example to a larger disk."""
    (tmp_path / "large" / "hf").mkdir(parents=True)
    (tmp_path / "hf").symlink_to(tmp_path / "large" / "hf")
    export(tmp_path / "hf", InMemory(random_model(CONFIG)), {"dtype": "fp32"})
    assert (tmp_path / "hf").is_symlink()
    assert (tmp_path / "large" / "hf" / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "large"], "nothing is left beside the link"
    assert [path.name for path in (tmp_path / "large").iterdir()] == ["hf"]


def tofile(path: Path, tensor: torch.Tensor) -> None:
    with open(path, "wb") as file:
        tensor.numpy().tofile(file)


WRITERS = {
    "safetensors": lambda path, tensor: save_file({"weight": tensor}, path),
    "gguf": tofile,
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())
def test_a_full_disk_is_reported_whichever_library_writes(write, tmp_path):
    """Each has an error of its own for it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with pytest.raises(UserError, match="cannot be written: "), report_disk_full(tmp_path):
            write(tmp_path / "file", torch.zeros(300_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_truncated_file_is_written_again(tmp_path):
    model = random_model(CONFIG)
    export(tmp_path / "undisturbed", InMemory(model), {})
    with pytest.raises(KeyboardInterrupt):
        export(tmp_path / "hf", Counted(model, killed_at=12), {})
    complete = next((tmp_path / ".hf.partial" / "files").glob("*.safetensors"))
    complete.write_bytes(complete.read_bytes()[:-1])
    export(tmp_path / "hf", InMemory(model), {})
    assert contents(tmp_path / "hf") == contents(tmp_path / "undisturbed")


def test_files_of_other_settings_are_not_kept(tmp_path):
    model = random_model(CONFIG)
    with pytest.raises(KeyboardInterrupt):
        export(tmp_path / "hf", Counted(model, killed_at=12), {"dtype": "bf16"}, torch.bfloat16)
    export(tmp_path / "hf", InMemory(model), {"dtype": "fp32"})
    export(tmp_path / "undisturbed", InMemory(model), {"dtype": "fp32"})
    assert contents(tmp_path / "hf") == contents(tmp_path / "undisturbed")


def test_a_file_that_does_not_hold_the_weights_fails_by_name(tmp_path, monkeypatch):
    def damaged(path, shapes, dtype, tensor, metadata, write=safetensors_file.write):
        checksum = write(path, shapes, dtype, tensor, metadata)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        return checksum

    monkeypatch.setattr(safetensors_file, "write", damaged)
    with pytest.raises(CheckFailed, match=r"model\.embed_tokens\.weight differs from the checkpoint in model-00001-of-\d+\.safetensors"):
        export(tmp_path / "hf", InMemory(random_model(CONFIG)), {})
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_several_dtypes_is_that_of_the_package(tmp_path):
    """Written with one tensor in memory; tensors with an odd number of bytes are behind those that must be aligned."""
    dtypes = (torch.int8, torch.float16, torch.int64, torch.bfloat16, torch.int32, torch.float32)
    values = {f"{end}.{dtype}": torch.arange(15 * end, 15 * end + 15).view(3, 5).to(dtype) for end in (2, 1) for dtype in dtypes}
    values["empty"] = torch.empty(0, 4)
    save_file(values, tmp_path / "theirs", metadata={"format": "pt"})
    names = safetensors_file.write_mixed(tmp_path / "ours", iter(values.items()), {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    found = [(name, value.clone()) for name, value in safetensors_file.tensors(tmp_path / "ours")]
    assert [name for name, _ in found] == names
    assert all(value.dtype == values[name].dtype and torch.equal(value, values[name]) for name, value in found)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_missing_tensor_fails_by_name(tmp_path):
    def write(path, written):
        path.write_bytes(b"")
        written("norm.weight", "1f", 4)
        return None, None

    with pytest.raises(CheckFailed, match=r"norm\.weight is missing in weights\.bin"):
        ExportWriter().write(tmp_path, [OutputFile("weights.bin", 4, write, lambda path: [])])  # noqa: ARG005
    assert list(tmp_path.iterdir()) == []


def test_a_value_beyond_fp16_is_refused(tmp_path):
    model = random_model(CONFIG)
    export(tmp_path / "fits", InMemory(model), {}, torch.float16)
    assert load_file(next((tmp_path / "fits").glob("*.safetensors"))).popitem()[1].dtype == torch.float16
    with torch.no_grad():
        model.blocks["1"].mlp.up.weight[3, 3] = 1e5
    with pytest.raises(UserError, match=r"stage.dtype=fp16: cannot hold blocks.1.mlp.up.weight: it has values up to 1e\+05"):
        export(tmp_path / "hf", InMemory(model), {}, torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["fits"]


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_ranks_have_equal_shares_of_the_files(ranks):
    files = [OutputFile(f"{size}", size, lambda *_: (None, None), lambda *_: []) for size in (50, 50, 50, 40, 30, 10, 5)]
    shares = share(files, ranks)
    assert sorted(file.name for part in shares for file in part) == sorted(file.name for file in files)
    assert len(shares) == ranks
    loads = [sum(file.bytes for file in part) for part in shares]
    assert max(loads) <= sum(loads) / ranks + 50


class OfOneFile:
    """A checkpoint in memory, of which the single file is written."""

    def __init__(self, model: torch.nn.Module, config) -> None:
        self._weights = InMemory(model)
        self.names, self.shape, self.tensor = self._weights.names, self._weights.shape, self._weights.tensor
        self.config, self.step = {"model": config.__dict__}, 7


@pytest.mark.parametrize("name", ["llama-tied", "mixtral", "bloom", "deepseek"])
def test_one_file_loads_into_our_model(name, tmp_path):
    model = random_model(CONFIGS[name]).eval()
    consolidated_export.write(tmp_path, OfOneFile(model, CONFIGS[name]), dtype=torch.float32, writer=ExportWriter())
    described = json.loads((tmp_path / "params.json").read_text())
    config = config_classes.from_dict(described["model"])
    assert (config, described["step"], described["dtype"]) == (CONFIGS[name], 7, "float32")
    again = registry.build(config)
    missing, unexpected = again.load_state_dict(load_file(tmp_path / "consolidated.safetensors"), strict=False)
    assert unexpected == []
    assert missing == ["head.weight"] * config.tie_embeddings
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens), model(tokens))


def test_logits_find_weights_in_the_wrong_place(tmp_path, caplog):
    """Digests agree when a weight has the name of another; the logits of the stock class do not."""
    model = random_model(CONFIG)
    huggingface_export.write_weights(tmp_path, InMemory(model), CONFIG, dtype=torch.bfloat16, shard_bytes=10**9)
    huggingface_export.write_configs(tmp_path, CONFIG, dtype=torch.bfloat16, end_of_document_id=0)
    with caplog.at_level("INFO", logger="pipeline"):
        stock_logits.compare(tmp_path, InMemory(model), CONFIG, torch.bfloat16)
    assert "the logits of LlamaForCausalLM differ by at most" in caplog.text
    swapped = InMemory(model)
    first, second = (f"blocks.0.mlp.{name}.weight" for name in ("gate", "up"))
    swapped.weights[first], swapped.weights[second] = swapped.weights[second], swapped.weights[first]
    with pytest.raises(CheckFailed, match="LlamaForCausalLM computes other logits from the export than the checkpoint"):
        stock_logits.compare(tmp_path, swapped, CONFIG, torch.bfloat16)
