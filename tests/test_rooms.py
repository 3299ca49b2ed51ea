"""The rooms of the house: which imports which, what may add on the wire, and what `import tp_invariant` starts."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import tp_invariant
import tp_invariant.kernels

PACKAGE = Path(tp_invariant.__file__).parent
KERNELS = Path(tp_invariant.kernels.__file__).parent
FILES = sorted(PACKAGE.glob("*.py"))
KERNEL_FILES = sorted(KERNELS.glob("*.py"))

# Each room and what it may import of this package: only rooms above it. A new room takes its place here.
ALLOWED = {
    "version": set(),
    "mode": set(),
    "bits": set(),
    "layout": set(),
    "compiled": set(),
    "identity": set(),
    "gemm": {"compiled", "identity", "layout", "kernels"},
    "liveness": set(),
    "watch": {"liveness"},
    "environment": {"mode", "version"},
    "call_records": {"liveness"},
    "wire": {"call_records", "liveness"},
    "collectives": {"compiled", "layout", "wire"},
    "weight_schedule": set(),
    "weight_cache": {"collectives", "weight_schedule"},
    "cost_model": set(),
    "exchange_store": set(),
    "peer_memory": {"collectives", "exchange_store", "watch", "wire", "kernels"},
    "copy_protocol": set(),
    "peer_copies": {"collectives", "copy_protocol", "peer_memory"},
    "small_gathers": {"collectives", "layout", "peer_copies", "peer_memory", "wire", "kernels"},
    "token_gathers": {"collectives", "peer_copies", "small_gathers"},
    "parameters": {"collectives", "layout"},
    "main_grad": set(),
    "agreement": {
        "call_records",
        "collectives",
        "compiled",
        "environment",
        "layout",
        "liveness",
        "mode",
        "watch",
        "wire",
    },
    "regions": {"agreement", "collectives", "compiled", "layout"},
    "same_weights": {"agreement", "bits", "collectives"},
    "vocab": {"collectives", "compiled"},
    "elementwise": {"mode"},
    "attention_checks": set(),
    "attention": {"attention_checks", "kernels"},
    "attention_choice": {"attention", "attention_checks", "elementwise", "gemm", "mode"},
    "batch_invariant_ops": {"gemm", "kernels"},
    "batch_invariant_dispatch": {"batch_invariant_ops", "elementwise", "kernels"},
    "determinism_settings": set(),
    "determinism": {"determinism_settings"},
    "plans": set(),
    "feature_blocks": set(),
    "shape_probe": set(),
    "hugging_face_masks": {"attention"},
    "grad_leaves": {"collectives", "layout", "parameters", "kernels"},
    "same_gradients": {"agreement", "collectives", "mode", "kernels"},
    "micro_batch_tree": {"agreement", "collectives", "layout", "liveness", "main_grad", "wire"},
    "data_parallel": {"agreement", "collectives", "layout", "main_grad", "micro_batch_tree", "wire"},
    "graph_arguments": set(),
    "graphed_call": {"batch_invariant_dispatch", "collectives", "graph_arguments", "mode"},
    "graph_checks": {"collectives", "graphed_call", "wire"},
    "graphs": {"graph_arguments", "graph_checks", "graphed_call", "token_gathers", "weight_cache"},
    "full_state": {"agreement", "bits", "collectives", "layout", "parameters", "same_weights", "wire"},
    "full_optimizer_state": {"bits", "full_state", "parameters"},
    "checkpoint_files": set(),
    "checkpoint_plan": {"checkpoint_files", "full_state"},
    "checkpoint": {
        "bits",
        "checkpoint_files",
        "checkpoint_plan",
        "collectives",
        "full_optimizer_state",
        "full_state",
        "liveness",
        "wire",
    },
    "digest_log": {"agreement", "bits", "collectives", "full_state", "layout", "mode", "parameters", "version"},
    "diff": {"digest_log"},
    "hashed_inputs": set(),
    "cli": {"version"},
    "options": set(),
    "owners": {
        "collectives",
        "cost_model",
        "gemm",
        "layout",
        "options",
        "peer_copies",
        "small_gathers",
        "weight_cache",
    },
    "functions": {"collectives", "compiled", "gemm", "layout", "main_grad", "owners", "token_gathers", "weight_cache"},
    "stock": {"call_records", "collectives", "compiled", "functions", "wire"},
    "norm": {"collectives", "compiled", "functions", "layout", "options", "small_gathers", "stock", "kernels"},
    "cross_entropy": {
        "agreement",
        "collectives",
        "compiled",
        "functions",
        "gemm",
        "layout",
        "mode",
        "options",
        "stock",
        "vocab",
        "kernels",
    },
    "linear_checks": {
        "agreement",
        "collectives",
        "compiled",
        "cost_model",
        "functions",
        "gemm",
        "layout",
        "main_grad",
        "mode",
        "options",
        "parameters",
        "stock",
        "weight_cache",
    },
    "batch_invariant": {"attention_choice", "batch_invariant_dispatch", "functions", "gemm"},
    "grad_norm": {"collectives", "grad_leaves", "main_grad", "mode", "parameters", "same_gradients", "stock"},
    "fingerprint": {
        "attention",
        "bits",
        "collectives",
        "cross_entropy",
        "gemm",
        "hashed_inputs",
        "layout",
        "mode",
        "norm",
        "version",
        "kernels",
    },
    "processes": set(),
    "rank_pool": {"mode", "processes"},
    "rank_process": {"agreement", "gemm", "mode", "owners", "processes", "rank_pool", "token_gathers"},
    "testing": {"bits", "gemm", "mode", "parameters", "rank_pool"},
    "verify_case": {"bits", "gemm", "testing"},
    "doctor_facts": {
        "attention_choice",
        "collectives",
        "determinism",
        "mode",
        "owners",
        "peer_copies",
        "testing",
        "version",
        "kernels",
    },
    "amx": {"processes"},
    "doctor_claims": {
        "amx",
        "attention_choice",
        "bits",
        "collectives",
        "cross_entropy",
        "doctor_facts",
        "fingerprint",
        "gemm",
        "layout",
        "mode",
        "norm",
        "testing",
        "kernels",
    },
    "doctor": {"doctor_claims", "doctor_facts"},
    "ties": set(),
    "vocab_embedding": {
        "agreement",
        "call_records",
        "collectives",
        "compiled",
        "functions",
        "gemm",
        "layout",
        "mode",
        "parameters",
        "stock",
        "ties",
        "vocab",
        "kernels",
    },
    "linear": {
        "agreement",
        "call_records",
        "collectives",
        "compiled",
        "functions",
        "gemm",
        "layout",
        "linear_checks",
        "mode",
        "options",
        "owners",
        "parameters",
        "regions",
        "stock",
        "ties",
    },
    "layernorm_linear": {"functions", "gemm", "layout", "linear", "norm", "options", "parameters", "regions"},
    "parallel_norm": {
        "agreement",
        "call_records",
        "collectives",
        "compiled",
        "gemm",
        "layout",
        "mode",
        "norm",
        "options",
        "parameters",
        "ties",
    },
    "hugging_face": {"attention_choice", "cross_entropy", "hugging_face_masks", "linear", "mode"},
    "survey": {
        "collectives",
        "elementwise",
        "feature_blocks",
        "gemm",
        "hugging_face",
        "linear",
        "parallel_norm",
        "parameters",
        "plans",
        "shape_probe",
        "vocab_embedding",
    },
    "verify_layers": {
        "collectives",
        "layernorm_linear",
        "layout",
        "linear",
        "mode",
        "options",
        "testing",
        "verify_case",
    },
    "verify_parts": {
        "attention_choice",
        "collectives",
        "cross_entropy",
        "data_parallel",
        "grad_norm",
        "layout",
        "mode",
        "options",
        "parallel_norm",
        "parameters",
        "testing",
        "verify_case",
        "vocab_embedding",
    },
    "gradient_flow": {
        "bits",
        "collectives",
        "cross_entropy",
        "functions",
        "norm",
        "parameters",
        "regions",
        "stock",
        "vocab_embedding",
    },
    "plan_check": {
        "bits",
        "collectives",
        "full_state",
        "gradient_flow",
        "layout",
        "linear",
        "parallel_norm",
        "parameters",
        "vocab_embedding",
        "weight_cache",
        "wire",
    },
    "convert": {
        "agreement",
        "attention_choice",
        "collectives",
        "gemm",
        "gradient_flow",
        "hugging_face",
        "identity",
        "plan_check",
        "plans",
        "regions",
        "same_weights",
        "survey",
        "ties",
    },
    "verify_training": {
        "bits",
        "checkpoint",
        "convert",
        "cross_entropy",
        "full_optimizer_state",
        "full_state",
        "gemm",
        "grad_norm",
        "mode",
        "plans",
        "testing",
        "verify_case",
    },
    "verify_checks": {
        "gemm",
        "options",
        "owners",
        "testing",
        "verify_case",
        "verify_layers",
        "verify_parts",
        "verify_training",
    },
    "verify": {"amx", "processes", "testing", "verify_case", "verify_checks"},
    "__init__": {
        "attention",
        "batch_invariant",
        "checkpoint",
        "convert",
        "cross_entropy",
        "data_parallel",
        "determinism",
        "digest_log",
        "full_optimizer_state",
        "full_state",
        "gemm",
        "grad_norm",
        "graphs",
        "hugging_face",
        "layernorm_linear",
        "linear",
        "liveness",
        "mode",
        "parallel_norm",
        "plans",
        "testing",
        "version",
        "vocab_embedding",
    },
}
NOT_ROOMS = {"kernels", "examples"}


def imports_of(path):
    """(level, module) of every import in a file, wherever it stands; `from . import x` counts as importing x."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level and node.module is None:
                yield from ((node.level, alias.name) for alias in node.names)
            else:
                yield node.level, node.module


def own_imports(path):
    """The rooms that a file of the package imports."""
    rooms = set()
    for level, module in imports_of(path):
        assert level <= 1, f"{path.name} reaches above the package"
        if level == 1:
            rooms.add(module.partition(".")[0])
        elif module.partition(".")[0] == "tp_invariant":
            rooms.add([*module.split("."), "__init__"][1])
    return rooms


def names_in(path):
    """Every name in a file's code; comments and strings do not count."""
    with tokenize.open(path) as file:
        return {token.string for token in tokenize.generate_tokens(file.readline) if token.type == tokenize.NAME}


# --- imports go one way ---------------------------------------------------------------------------------------------


def test_every_room_is_in_the_table():
    assert {path.stem for path in FILES} == set(ALLOWED)


def test_the_table_goes_one_way():
    above = set(NOT_ROOMS)
    for room, allowed in ALLOWED.items():
        assert allowed <= above, f"{room} may import {allowed - above}, which stand at its own height or below it"
        above.add(room)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_imports_are_those_of_the_table(path):
    assert own_imports(path) <= ALLOWED[path.stem]


def test_the_reader_of_imports_sees_all_kinds(tmp_path):
    lines = ["from . import a", "from .b import c", "import tp_invariant.d", "from tp_invariant import x"]
    (tmp_path / "room.py").write_text("\n".join([*lines, "def f():", "    from .e.g import h"]))
    assert own_imports(tmp_path / "room.py") == {"a", "b", "d", "e", "__init__"}


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda path: path.stem)
def test_kernels_know_only_kernels(path):
    for level, module in imports_of(path):
        assert level <= 1, f"kernels/{path.name} reaches above its folder: {module}"
        if level == 1:
            assert module in {p.stem for p in KERNEL_FILES}
        top = module.partition(".")[0]
        assert top != "tp_invariant", f"kernels/{path.name} imports {module}"
        assert not module.startswith("torch.distributed"), "kernels know nothing of ranks"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernels_are_imported_by_few_and_only_when_called(path):
    """Triton's kernels import triton, so `import tp_invariant` must not reach them."""
    tree = ast.parse(path.read_text())
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("kernels")]
    assert bool(nodes) == ("kernels" in ALLOWED[path.stem])
    assert not set(nodes) & set(tree.body)


# --- no arithmetic on the wire --------------------------------------------------------------------------------------

ADDING = ("all_reduce", "reduce_scatter", "allreduce", "ReduceOp")
NOT_ADDING = {"set_custom_reduce_scatter"}  # how FSDP is given ours, which moves bytes, in place of its own


@pytest.mark.parametrize("path", FILES + KERNEL_FILES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_only_stock_adds_on_the_wire(path):
    found = {name for name in names_in(path) if any(word in name for word in ADDING)} - NOT_ADDING
    if path == PACKAGE / "stock.py":
        assert {"all_reduce", "reduce_scatter_tensor"} <= found, "what this test looks for has other names now"
    else:
        assert not found


# --- what an import starts ------------------------------------------------------------------------------------------


def run_python(code, cwd):
    """What `code` prints as JSON, in a fresh interpreter that sees only what is installed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


IMPORT = """
import json, sys
import torch

def started(*args, **kwargs):
    raise AssertionError("import tp_invariant started CUDA")

torch.cuda._lazy_init = started
import tp_invariant
tops = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps({"tops": tops, "cuda": torch.cuda.is_initialized(), "dist": torch.distributed.is_initialized()}))
"""


def test_import_is_light(tmp_path):
    seen = run_python(IMPORT, tmp_path)
    heavy = {"triton", "hypothesis", "rich", "matplotlib", "cloudpickle", "pytest", "transformers"}
    assert not heavy & set(seen["tops"])
    assert seen["cuda"] is False
    assert seen["dist"] is False


KERNELS_SEEN = """
import importlib.util, json
import tp_invariant.kernels.reference
spec = importlib.util.find_spec("kernels")
origins = [] if spec is None else [str(spec.origin), *map(str, spec.submodule_search_locations or [])]
print(json.dumps({"top": origins, "ours": tp_invariant.kernels.__file__}))
"""


def test_kernels_are_no_top_level_module(tmp_path):
    """That name belongs to another package, which transformers looks for."""
    seen = run_python(KERNELS_SEEN, tmp_path)
    assert Path(seen["ours"]).parent.samefile(KERNELS)
    assert not [origin for origin in seen["top"] if origin.startswith(str(KERNELS.parent))]


def test_the_tests_import_the_same_kernels():
    assert "kernels" not in sys.modules
    assert importlib.util.find_spec("tp_invariant.kernels").origin == str(KERNELS / "__init__.py")


def test_public_names_exist():
    assert sorted(tp_invariant.__all__) == tp_invariant.__all__
    for name in tp_invariant.__all__:
        assert hasattr(tp_invariant, name)
