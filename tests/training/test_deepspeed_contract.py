"""What we use of the installed DeepSpeed is there: keys of its configuration, and every name of its code."""

import ast
import inspect
import re
from pathlib import Path
from pkgutil import resolve_name

from pipeline.config.deepspeed_json import KEYS
from tests.test_private_names import imported, qualified

PIPELINE = Path(__file__).resolve().parents[2] / "pipeline"


#: What the engine reads of objects of DeepSpeed: class -> attributes.
ATTRIBUTES = {
    "deepspeed.runtime.engine.DeepSpeedEngine": (
        "backward",
        "step",
        "was_step_applied",
        "get_global_grad_norm",
        "gradient_accumulation_steps",
    ),
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": ("update_lp_params",),
}
#: What it reads of objects of DeepSpeed that are set where they are built: file -> assignments.
SET = {
    "deepspeed.runtime.engine": ("self.basic_optimizer = ",),
    "deepspeed.runtime.zero.stage3": ("self.fp32_partitioned_groups_flat = ", "self.persistent_parameters = "),
    "deepspeed.runtime.fp16.loss_scaler": ("self.cur_scale = ", "self.cur_iter = ", "self.last_overflow_iter = "),
    "deepspeed.utils.mixed_precision_linkage": ("._hp_mapping = ",),
    "deepspeed.utils.tensor_fragment": ("lp_fragment_address: ", "hp_fragment_address: ", "param_group_index: "),
}


def test_what_the_engine_reads_exists():
    for name, attributes in ATTRIBUTES.items():
        assert set(attributes) <= set(dir(resolve_name(name))), name
    for module, assignments in SET.items():
        source = inspect.getsource(resolve_name(module))
        assert all(text in source for text in assignments), (module, [text for text in assignments if text not in source])


def test_every_known_key_is_read_by_deepspeed():
    package = Path(resolve_name("deepspeed").__file__).parent
    text = "".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    assert [key for key in KEYS if f'"{key}"' not in text and f"'{key}'" not in text and f"    {key}: " not in text] == []


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
    assert {"deepspeed.utils.zero_to_fp32.parse_optim_states"} <= found
    for name in sorted(found):
        resolve_name(name)
