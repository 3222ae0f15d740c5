"""What we use of the installed DeepSpeed is there: keys of its configuration, its schedules, and every name of its code."""

import ast
import inspect
import logging
import re
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch

from pipeline.config.deepspeed_json import read
from pipeline.config.deepspeed_keys import OFF, ONLY, SECTIONS, SETS, WITHOUT_EFFECT
from pipeline.config.deepspeed_sections import READERS
from pipeline.config.optimizer import OptimizerConfig
from pipeline.config.training import TrainingConfig
from pipeline.training.lr_schedule import learning_rate
from tests.test_private_names import imported, qualified

#: Methods of DeepSpeed's optimizer that we replace or extend.
REPLACED = {
    *("flatten_dense_tensors_aligned", "get_partition_info", "initialize_optimizer_states", "create_gradient_handling_hooks"),
    *("_configure_moe_settings", "_create_param_mapping", "_link_all_hp_params", "_lazy_init_hp_params_optimizer_state"),
}
#: What we read or set of it.
ATTRIBUTES = {
    *("bit16_groups_flat", "parallel_partitioned_bit16_groups", "single_partition_of_fp32_groups"),
    *("real_dp_process_group", "partition_count", "optimizer"),
}
PIPELINE = Path(__file__).resolve().parents[2] / "pipeline"


def names(model):
    """The keys of a section of DeepSpeed's configuration, with the older names of some."""
    return {name for key, field in model.model_fields.items() for name in (key, field.alias) if name}


def test_every_key_of_deepspeed_is_known():
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.zero import config, offload_config

    known = {*SETS, *WITHOUT_EFFECT, *ONLY, *OFF, *SECTIONS}
    sections = {
        "zero_optimization": config.DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
    }
    unknown = {f"{section}.{name}" for section, model in sections.items() for name in names(model)} - known
    assert not unknown
    for section, model in {"bf16": precision_config.DeepSpeedBF16Config, "fp16": precision_config.DeepSpeedFP16Config}.items():
        read_here = {key.removeprefix(f"{section}.") for key, _, _ in READERS[section]({section: dict.fromkeys(names(model), False)})}
        refused = [
            key
            for key, _, meaning in READERS[section]({section: dict.fromkeys(names(model), 0)})
            if getattr(meaning, "rule", "") == "no such key"
        ]
        assert read_here == names(model) - {"enabled"}
        assert not refused


@pytest.mark.parametrize(
    ("kind", "parameters", "lead"),
    [
        ("WarmupLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 5}, 2),
        ("WarmupDecayLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 5, "total_num_steps": 20}, 2),
        ("WarmupCosineLR", {"warmup_num_steps": 5, "total_num_steps": 20, "cos_min_ratio": 0.1}, 1),
    ],
)
def test_learning_rates_are_those_of_the_scheduler(kind, parameters, lead, tmp_path):
    """DeepSpeed's update n has the rate of our update n - 2; in the cosine's decay, that of n - 1."""
    from deepspeed.runtime import lr_schedules

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    scheduler = getattr(lr_schedules, kind)(optimizer, warmup_type="linear", **parameters)
    stock = []
    for _ in range(20):
        stock.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    path = tmp_path / f"{kind}.json"
    path.write_text(
        f'{{"optimizer": {{"type": "Adam", "params": {{"lr": 0.01}}}}, "scheduler": {{"type": "{kind}", "params": '
        + str({**parameters, "warmup_type": "linear"}).replace("'", '"')
        + "}}"
    )
    settings = {key: value for key, (value, _) in read(str(path)).values.items()}
    assert not read(str(path)).violations
    optimizers = {key.partition(".")[2]: value for key, value in settings.items() if key.startswith("optimizer.")}
    ours = [learning_rate(n, OptimizerConfig(**optimizers), TrainingConfig(steps=settings.get("training.steps", 20))) for n in range(20)]
    assert stock[:2] == [0, 0]
    assert stock[2:6] == pytest.approx(ours[:4])
    assert stock[6 + lead :] == pytest.approx(ours[6:-lead])


def ours_and_theirs():
    """Our optimizer, DeepSpeed's, and the source of the latter."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from pipeline.training.deepspeed_optimizer import BucketZeroOptimizer

    return BucketZeroOptimizer, DeepSpeedZeroOptimizer, inspect.getsource(DeepSpeedZeroOptimizer)


def test_what_we_replace_exists_and_is_called():
    ours, theirs, source = ours_and_theirs()
    functions = {name for name, value in vars(ours).items() if inspect.isfunction(value) and name != "__init__"}
    assert functions - {"round_weights"} == REPLACED
    for name in REPLACED:
        assert name in vars(theirs), name
        assert re.search(rf"self\.{name}\(", source), f"{name} is not called any more"
    assert list(inspect.signature(theirs.flatten_dense_tensors_aligned).parameters)[:3] == ["self", "tensor_list", "alignment"]


def test_what_we_read_is_set_by_deepspeed_and_by_nobody_else():
    ours, _theirs, source = ours_and_theirs()
    tree = ast.parse(inspect.cleandoc(inspect.getsource(inspect.getmodule(ours))))
    own = {"_buckets", "_shard_weights", "_offload", "_rounded", "_materialize", "_joint_layers", "weights", "masters"}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"}
    assert used - own == ATTRIBUTES
    for name in ATTRIBUTES:
        assert re.search(rf"self\.{name} = ", source), f"{name} is not set any more"


def test_a_partition_is_complete_when_we_replace_its_weights():
    """get_partition_info is called for every group, after its partitions, its fp32 partition and the optimizer's group are set."""
    init = inspect.getsource(ours_and_theirs()[1].__init__)
    order = [
        "self.bit16_groups_flat.append",
        "self.parallel_partitioned_bit16_groups.append",
        "self.single_partition_of_fp32_groups.append",
    ]
    order += ["param_group['params'] = [self.single_partition_of_fp32_groups", "self.get_partition_info("]
    places = [init.rfind(text) for text in order]
    assert -1 not in places
    assert places == sorted(places)
    parameters = inspect.signature(ours_and_theirs()[1].__init__).parameters
    call = next(n for n in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(ours_and_theirs()[0])))) if is_init(n))
    assert {keyword.arg for keyword in call.keywords} <= parameters.keys()


def is_init(node):
    """Whether this is the call of the parent's __init__."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__"


def mentioned():
    """Every name of DeepSpeed that the package uses."""
    for path in PIPELINE.rglob("*.py"):
        if "deepspeed" in (text := path.read_text(encoding="utf-8")):
            tree = ast.parse(text)
            names = {name: whole for name, whole in imported(tree).items() if whole.partition(".")[0] == "deepspeed"}
            yield from names.values()
            yield from filter(None, (qualified(node, names) for node in ast.walk(tree) if isinstance(node, ast.Attribute)))
            yield from re.findall(r'"(deepspeed(?:\.\w+){2,})"', text)


def test_every_name_of_deepspeed_exists():
    found = set(mentioned())
    assert {"deepspeed.ops.__compatible_ops__", "deepspeed.utils.zero_to_fp32.parse_optim_states"} <= found
    assert len(found) > 15
    for name in sorted(found):
        resolve_name(name)
    from deepspeed import comm

    assert {"auto_mpi_discovery", "verbose"} <= inspect.signature(comm.init_distributed).parameters.keys()
