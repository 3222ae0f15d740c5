"""Every private name of another library that pipeline/ uses stands in one table, and the installed version has it as it is used.

A private name may change with any release; pyproject.toml says which releases are supported. Names that are imported from DeepSpeed are in
training/test_deepspeed_contract.py.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from tests.helpers import ROOT

_FORWARD = "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask scale"
_BACKWARD = "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
_CALLBACKS = ("event_record", "event_wait", "memory_allocation", "memory_deallocation")
_SYNCHRONIZATIONS = ("device_synchronization", "stream_synchronization", "event_synchronization")
_BACKWARD_CPU = "grad_out query key value out logsumexp dropout_p is_causal scale"
#: Name, from its module on -> the parameters that are passed, separated by spaces and in order if by position; "" if there are none.
NAMES = {
    "atexit._run_exitfuncs": "",
    "hydra._internal.utils.get_args_parser": "",
    "lm_eval.api.model.TemplateLM._loglikelihood_tokens": "",
    "torch._C.DispatchKey.CUDA": "",
    "torch._C.DispatchKeySet": "",
    "torch._C._activate_gpu_trace": "",  # of the CUDA build
    "torch._C._autograd._get_current_graph_task_keep_graph": "",
    "torch._C._autograd._get_sequence_nr": "",
    "torch._C._cuda_getCurrentRawStream": "",  # of the CUDA build
    "torch._C._current_autograd_node": "",
    "torch._C._distributed_c10d._dump_nccl_trace": "",  # of a build with NCCL
    "torch._compile._disable_dynamo": "fn",
    "torch._dynamo.utils.counters": "",
    "torch._foreach_add_": "",
    "torch._foreach_copy_": "",
    "torch._foreach_norm": "",
    "torch._fused_sdp_choice": "query key value",
    "torch._inductor.config._micro_pipeline_tp": "",
    "torch._inductor.config.post_grad_custom_post_pass": "",
    "torch._inductor.config.reorder_for_locality": "",
    "torch._inductor.config.reorder_for_peak_memory": "",
    "torch._inductor.custom_graph_pass.CustomGraphPass": "",
    "torch._inductor.custom_graph_pass.get_hash_for_files": "paths",
    "torch._logging._internal.getArtifactLogger": "module_qname artifact_name",
    "torch._ops.HigherOrderOperator": "",
    "torch._ops.OpOverload": "",
    "torch._prims.rng_prims.graphsafe_run_with_rng_state": "",
    "torch._scaled_grouped_mm": "self mat2 scale_a scale_b offs out_dtype use_fast_accum",
    "torch._subclasses.fake_tensor.FakeTensor": "",
    **{f"torch.cuda._gpu_trace.register_callback_for_{event}": "cb" for event in (*_CALLBACKS, *_SYNCHRONIZATIONS)},
    "torch.cuda.memory._record_memory_history": "enabled context max_entries",
    "torch.cuda.memory._snapshot": "",
    "torch.distributed.ProcessGroup._device_types": "",
    "torch.distributed.ProcessGroup._get_backend": "",
    "torch.distributed.ProcessGroup._set_sequence_number_for_group": "",
    "torch.distributed.ProcessGroupGloo._Options": "",
    "torch.distributed._symmetric_memory._test_mode": "group_names",
    "torch.distributed._symmetric_memory.enable_symm_mem_for_group": "group_name",
    "torch.distributed.checkpoint.filesystem._StorageInfo": "relative_path offset length",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": "",
    "torch.distributed.distributed_c10d._abort_process_group": "",
    "torch.distributed.distributed_c10d._get_default_store": "",
    "torch.distributed.distributed_c10d._get_group_size_by_name": "group_name",
    "torch.distributed.distributed_c10d._resolve_process_group": "",
    "torch.distributed.distributed_c10d._world.pg_map": "",
    "torch.distributed.pipelining.PipelineStage._warmup_backward_result": "self received_result",
    "torch.nn.Module._apply": "self fn recurse",
    "torch.ops._c10d_functional.all_gather_into_tensor": "input group_size group_name",
    "torch.ops._c10d_functional.all_reduce": "input reduce_op group_name",
    "torch.ops._c10d_functional.all_to_all_single": "input output_split_sizes input_split_sizes group_name",
    "torch.ops._c10d_functional.reduce_scatter_tensor": "input reduce_op group_size group_name",
    "torch.ops._c10d_functional.wait_tensor": "tensor",
    "torch.ops.aten._flash_attention_backward": f"{_BACKWARD} rng_state unused scale",
    "torch.ops.aten._flash_attention_forward": _FORWARD,
    "torch.ops.aten._grouped_mm": "",
    "torch.ops.aten._scaled_dot_product_cudnn_attention": "",
    "torch.ops.aten._scaled_dot_product_efficient_attention": "",
    "torch.ops.aten._scaled_dot_product_flash_attention": "query key value dropout_p is_causal return_debug_mask scale",
    "torch.ops.aten._scaled_dot_product_flash_attention_backward": f"{_BACKWARD} philox_seed philox_offset scale",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "query key value dropout_p is_causal scale",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": _BACKWARD_CPU,
    "torch.ops.aten._scaled_grouped_mm": "",
    "torch.ops.aten._scaled_mm": "",
    "torch.serialization._get_layout": "",
    "torch.testing._internal.distributed.fake_pg.FakeStore": "",
    "torch.utils._python_dispatch.TorchDispatchMode": "",
    "torch.utils._pytree.tree_leaves": "tree",
    "torch.utils.checkpoint._StopRecomputationError": "",
    "torch.utils.checkpoint._recomputation_hook": "",
}


def node() -> Any:
    return (torch.ones(1, requires_grad=True) * 2).grad_fn


def gloo() -> Any:
    return torch.distributed.ProcessGroupGloo._Options()


def job_return() -> Any:
    return importlib.import_module("hydra.core.utils").JobReturn()


def compiled(name: str) -> Any:
    """A module that is called with an attribute replaced, as it is by torch.compile."""
    module = torch.nn.Identity()
    setattr(module, name, lambda x: x + 1)
    assert module(1) == 2
    return module


#: Attribute of an object -> an object that has it.
ATTRIBUTES: dict[str, Callable[[], Any]] = {
    "_call_impl": torch.nn.Identity,
    "_compiled_call_impl": lambda: compiled("_compiled_call_impl"),
    "_devices": gloo,
    "_dynamo_marked_constant": lambda: torch.compiler.assume_constant_result(lambda: None),
    "_opname": lambda: torch.ops.aten.mm.default,
    "_parameters": torch.nn.Identity,
    "_post_accumulate_grad_hooks": lambda: torch.ones(1),
    "_return_value": job_return,
    "_schema": lambda: torch.ops.aten.mm.default,
    "_sequence_nr": node,
    "_threads": gloo,
    "_timeout": gloo,
    "_version": lambda: torch.ones(1),
    "_zero3_merge_trainable_params": lambda: importlib.import_module("deepspeed.utils.zero_to_fp32"),
}
#: Only builds for GPUs have them: they are of the table, and looked up where there is one.
OF_GPU_BUILDS = {"_activate_gpu_trace", "_cuda_getCurrentRawStream", "_dump_nccl_trace"}
#: Documented, though their names are private.
DOCUMENTED = {"os._exit", "sys._getframe"}
#: Attributes of DeepSpeed's objects, of training/test_deepspeed_contract.py.
OF_DEEPSPEED = {"_hp_mapping"}
#: Ours, those of another test, and those of stubs.
_NOT_HERE = ("pipeline", "deepspeed", "_typeshed")
_PRIVATE = re.compile(r"_[A-Za-z]\w*")


def is_private(name: str) -> bool:
    return any(_PRIVATE.fullmatch(part) for part in name.split("."))


def imported(tree: ast.Module) -> dict[str, str]:
    """Name in a module -> the name of another library that it stands for: of an import, or of `NAME = torch.ops.aten`."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
            names |= {alias.name.partition(".")[0]: alias.name.partition(".")[0] for alias in node.names if not alias.asname}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = qualified(node.value, names) or "pipeline"
    return names


def qualified(node: ast.expr, names: dict[str, str]) -> str | None:
    """The whole name of an expression of imported names and dots; the overload of an operator is left out."""
    first, dot, rest = ast.unparse(node).removesuffix(".default").partition(".")
    return f"{names[first]}{dot}{rest}" if first in names and re.fullmatch(r"[\w.]*", rest) else None


def defined(tree: ast.Module) -> set[str]:
    """The names of functions, classes, fields and attributes of `self` that a module defines."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


def used(tree: ast.Module) -> Iterator[str]:
    """Yield each private name of another library that a module uses: as in NAMES, or as in ATTRIBUTES."""
    own = defined(tree)
    names = {name: whole for name, whole in imported(tree).items() if whole.partition(".")[0] not in _NOT_HERE}
    yield from filter(is_private, names.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            whole = qualified(node, names)
            if whole and is_private(whole):
                yield whole
            elif not whole and is_private(node.attr) and node.attr not in own and ast.unparse(node.value) not in ("self", "super()"):
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and isinstance(node.args[1], ast.Constant):
            if is_private(node.args[1].value):
                yield f"{qualified(node.args[0], names)}.{node.args[1].value}"
        elif isinstance(node, ast.ClassDef):
            for base in filter(None, (qualified(base, names) for base in node.bases)):
                methods = [child.name for child in node.body if isinstance(child, ast.FunctionDef) and _PRIVATE.fullmatch(child.name)]
                yield from (f"{base}.{name}" for name in methods if hasattr(found(base), name))


def found(name: str) -> Any:
    """The object of a name, whose modules are imported."""
    if name.startswith("torch.ops."):
        torch.ops.import_module("torch.distributed._functional_collectives")
    return resolve_name(name)


def test_the_tables_have_every_private_name_and_no_other() -> None:
    files = sorted((ROOT / "pipeline").rglob("*.py"))
    names = {name for file in files for name in used(ast.parse(file.read_text(encoding="utf-8")))} - DOCUMENTED - OF_DEEPSPEED
    names -= {name for name in names if any(other.startswith(f"{name}.") for other in names)}  # modules on the way to a name
    assert names == NAMES.keys() | ATTRIBUTES.keys()


@pytest.mark.parametrize("name", [name for name in NAMES if name.rpartition(".")[2] not in OF_GPU_BUILDS or torch.version.cuda])
def test_a_name_exists_and_takes_what_is_passed(name: str) -> None:
    value, passed = found(name), NAMES[name].split()
    if name in ("torch._fused_sdp_choice", "torch._scaled_grouped_mm"):
        value = getattr(torch.ops.aten, name.rpartition(".")[2])  # the function has no signature, its operator has
    if isinstance(value, torch._ops.OpOverloadPacket):
        parameters = [argument.name for argument in value.default._schema.arguments]
    elif passed:
        parameters = [*inspect.signature(value).parameters]
    else:
        return
    assert set(passed) <= set(parameters)
    assert sorted(passed, key=parameters.index) == passed


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_object_has_the_attribute(name: str) -> None:
    assert hasattr(ATTRIBUTES[name](), name)
