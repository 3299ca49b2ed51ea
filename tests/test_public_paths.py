"""Paths that users' programs import still work; one of them is a function and a folder."""

import importlib
import subprocess
import sys

import pytest

import tp_invariant as tpi
from tp_invariant.gemm.weights import weight_cache

PATHS = {  # what the README and the pages name
    "batch_invariant": "set_batch_invariant_mode batch_invariant is_batch_invariant_mode_enabled "
    "enable_batch_invariant_mode disable_batch_invariant_mode",
    "checkpoint": "save load",
    "data_parallel": "FixedOrderReduceScatter MicroBatchTree Stage TokenCount fix_reduction_order fixed_order_hook "
    "stages_of",
    "determinism": "Report Row checkpoint_kwargs deterministic enable report",
    "gemm": "GemmFn autotune bundled bundled_gemm_fn gemm set_default_gemm_fn",
    "graphs": "GraphedLayers graph_layers",
    "hugging_face": "register_attention",
    "kernels.tensor_core": "HOPPER Recipe matmul model",
    "owners": "OWNER_MAPS explain_choice weight_cache",
    "parameters": "mark_sharded",
    "plans": "Part own_plan",
    "regions": "gather_sequence scatter_sequence",
    "testing": "RankError assert_bitwise_equal assert_slice_invariant assert_tp_invariant digest full_grads "
    "full_parameters raw_bytes run_ranks",
}


@pytest.mark.parametrize("path", PATHS)
def test_modules_and_their_names(path):
    module = importlib.import_module(f"tp_invariant.{path}")
    for name in PATHS[path].split():
        assert hasattr(module, name), name
        assert name in module.__all__, name
    assert all(hasattr(module, name) for name in module.__all__)


def test_an_alias_holds_the_very_objects():
    assert tpi.owners.weight_cache is weight_cache
    for path in ("owners", "parameters", "plans", "regions", "kernels.tensor_core"):
        alias = importlib.import_module(f"tp_invariant.{path}")
        for name in alias.__all__:
            found = getattr(alias, name)
            home = getattr(found, "__module__", "")
            if isinstance(home, str) and home.startswith("tp_invariant."):
                assert home != alias.__name__ and getattr(importlib.import_module(home), name, found) is found


# --- in a process of its own, whose imports are these alone ----------------------------------------------------------

ATTRIBUTES = [  # without an import of their own: `tpi.regions.gather_sequence`
    f"tpi.{path}.{name}"
    for path, names in PATHS.items()
    if path not in ("batch_invariant", "kernels.tensor_core")  # a function; imported by whoever asks for it
    for name in names.split()
]
PACKAGE = "import tp_invariant as tpi"
FOLDER = "from tp_invariant.batch_invariant import is_batch_invariant_mode_enabled, set_batch_invariant_mode"
ORDERS = {
    "the package first": [PACKAGE, *ATTRIBUTES, FOLDER],
    "the folder first": ["import tp_invariant.batch_invariant.ops", FOLDER, PACKAGE],
}
WORKS = [
    "with tpi.batch_invariant(): assert is_batch_invariant_mode_enabled()",
    "with set_batch_invariant_mode(True): assert is_batch_invariant_mode_enabled()",
    "assert not is_batch_invariant_mode_enabled()",
    "from tp_invariant import batch_invariant",
    "assert batch_invariant is tpi.batch_invariant",
]


def test_batch_invariant_is_a_function_and_a_folder():
    """In either order of import; and the other modules are attributes of the package."""
    pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    processes = {}
    for order, first in ORDERS.items():  # both at once
        lines = [*first, *WORKS, "import tp_invariant.batch_invariant.dispatch", *WORKS]
        processes[order] = subprocess.Popen([sys.executable, "-c", "\n".join(lines)], **pipes)
    for order, process in processes.items():
        _, said = process.communicate(timeout=500)
        assert process.returncode == 0, f"{order}: {said}"
