"""The wings: which imports which, which may add on the wire, and what `import tp_invariant` loads."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import tp_invariant
import tp_invariant.kernels

ROOT = Path(__file__).parents[1]
PACKAGE = Path(tp_invariant.__file__).parent
KERNELS = Path(tp_invariant.kernels.__file__).parent


def sources(folder):
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


# kernels/ and examples/ may be links inside the package, or folders where it is installed
FILES = [path for path in sources(PACKAGE) if path.relative_to(PACKAGE).parts[0] not in ("kernels", "examples")]
KERNEL_FILES = sources(KERNELS)


def short(path):
    """ "layers.linear" """
    for folder, prefix in ((KERNELS, "kernels."), (PACKAGE, "")):
        if path.is_relative_to(folder):
            return prefix + ".".join(path.relative_to(folder).with_suffix("").parts)


def imports_of(path, module):
    """(node, absolute name) of every import anywhere in a file; `from x import y` counts as x.y."""
    package = module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= len(package), f"{module} reaches above the package"
            beginning = package[: len(package) - node.level + 1] if node.level else []
            for alias in node.names:
                yield node, ".".join([*beginning, *filter(None, [node.module]), alias.name])


def own_imports(path):
    return list(imports_of(path, f"tp_invariant.{short(path)}"))


def names_in(path):
    """Every name in a file's code, without comments and strings."""
    with tokenize.open(path) as file:
        return {token.string for token in tokenize.generate_tokens(file.readline) if token.type == tokenize.NAME}


# --- imports go one way ---------------------------------------------------------------------------------------------


def lint_imports(config, folder):
    """The status and output of import-linter; the status is 1 if a contract is broken."""
    program = "import sys; from importlinter import cli; sys.exit(cli.lint_imports(sys.argv[1], no_cache=True))"
    command = [sys.executable, "-c", program, str(config)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)
    return done.returncode, done.stdout + done.stderr


def test_a_wing_imports_only_from_those_below_it(tmp_path):
    status, said = lint_imports(ROOT / "pyproject.toml", tmp_path)
    assert status == 0, said
    assert re.search(r"\b1 kept, 0 broken", said), said


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            '    "layers",\n    "functional",\n',
            '    "functional",\n    "layers",\n',
            "tp_invariant.layers.linear -> tp_invariant.functional.linear",
        ),
        ('    "graphs",\n', "", "not listed as layers:\n\n- tp_invariant.graphs"),
    ],
    ids=("a wing above one that imports it", "a wing without a place"),
)
def test_the_contract_can_break(old, new, told, tmp_path):
    config = (ROOT / "pyproject.toml").read_text()
    assert old in config
    (tmp_path / "changed.toml").write_text(config.replace(old, new))
    status, said = lint_imports(tmp_path / "changed.toml", tmp_path)
    assert status == 1 and told in said, said


def test_the_reader_of_imports_sees_all_kinds(tmp_path):
    lines = ["from . import a", "from .b import c", "import tp_invariant.d", "from ..e import f", "from g import h"]
    (tmp_path / "module.py").write_text("\n".join([*lines, "def f():", "    from ...i.j import k"]))
    found = [name for _, name in imports_of(tmp_path / "module.py", "tp_invariant.x.y.module")]
    assert found == [
        "tp_invariant.x.y.a",
        "tp_invariant.x.y.b.c",
        "tp_invariant.d",
        "tp_invariant.x.e.f",
        "g.h",
        "tp_invariant.i.j.k",
    ]


@pytest.mark.parametrize("path", KERNEL_FILES, ids=short)
def test_kernels_know_nothing_of_ranks(path):
    for _, name in own_imports(path):
        assert not name.startswith("torch.distributed"), f"{short(path)} imports {name}"
        ours = ("tp_invariant.kernels.", "tp_invariant.core.torch_private")
        assert not name.startswith("tp_invariant") or name.startswith(ours)


@pytest.mark.parametrize("path", FILES, ids=short)
def test_kernels_are_imported_only_when_called(path):
    """Triton's kernels import triton, so `import tp_invariant` must not reach them."""
    top = {node.lineno for node in ast.parse(path.read_text()).body}
    early = [name for node, name in own_imports(path) if node.lineno in top]
    names = ("attention.spec", "dtypes", "elementwise", "experts.reference_grouped", "gemm.autotune",
             "rowwise.reference_gated", "rowwise.reference_rope", "select", "vocabulary.loss_spec")  # fmt: skip
    plain = tuple(f"tp_invariant.kernels.{name}." for name in names)
    assert not [name for name in early if name.startswith("tp_invariant.kernels") and not name.startswith(plain)]


# --- no arithmetic on the wire --------------------------------------------------------------------------------------

ADDING = ("all_reduce", "reduce_scatter", "allreduce", "ReduceOp")
NOT_ADDING = {
    "set_custom_reduce_scatter",  # how FSDP is given ours, which moves bytes, in place of its own
    "reduce_scatter_embeddings", "allreduce",  # an argument of Megatron's embedding, and its mark on parameters
    "skip_final_all_reduce",  # a setting of vLLM's experts, which is refused
}  # fmt: skip


@pytest.mark.parametrize("path", FILES + KERNEL_FILES, ids=short)
def test_only_stock_adds_on_the_wire(path):
    found = {name for name in names_in(path) if any(word in name for word in ADDING)} - NOT_ADDING
    if short(path) == "functional.stock":
        assert {"all_reduce", "reduce_scatter_tensor"} <= found, "what this test looks for has other names now"
    else:
        assert not found


def test_the_stock_path_is_among_the_files():
    assert "functional.stock" in map(short, FILES)


# --- what an import starts ------------------------------------------------------------------------------------------


def run_python(code, cwd):
    """The JSON that `code` prints in a new interpreter, which sees only installed packages."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


IMPORT = """
import json, sys
import torch

def started(*args, **kwargs):
    raise AssertionError("an import asked for a GPU: ranks of a pool are forked after it")

torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = started
before = {name.partition(".")[0] for name in sys.modules}
import tp_invariant
tops = sorted({name.partition(".")[0] for name in sys.modules})
needed = sorted(set(tops) - before - sys.stdlib_module_names)
state = {"cuda": torch.cuda.is_initialized(), "dist": torch.distributed.is_initialized()}
import tp_invariant.testing.rank_process
print(json.dumps({"tops": tops, "needed": needed, **state}))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    return run_python(IMPORT, tmp_path_factory.mktemp("elsewhere"))


def test_import_is_light(imported):
    heavy = {"triton", "hypothesis", "rich", "matplotlib", "cloudpickle", "pytest", "transformers"}
    assert not heavy & set(imported["tops"])
    assert imported["cuda"] is False
    assert imported["dist"] is False


def test_import_needs_torch_and_einops_alone(imported):
    """And triton, which is imported when a kernel is called."""
    assert "einops" in imported["needed"]
    assert set(imported["needed"]) <= {"einops", "tp_invariant"}


KERNELS_SEEN = """
import importlib.util, json
import tp_invariant.kernels.gemm.reference
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
    """A second copy of a module would have functions of its own, so a test could replace the wrong ones.

    The package by its own name may be there: `python -m pytest` sees the current folder, and transformers imports what
    is called kernels to ask for its version. It has no code.
    """
    paths = {name: getattr(module, "__file__", None) for name, module in sys.modules.copy().items()}
    ours = {name for name, path in paths.items() if path and Path(path).resolve().is_relative_to(KERNELS.resolve())}
    assert "tp_invariant.kernels" in ours
    assert [name for name in ours if not name.startswith("tp_invariant.kernels")] in ([], ["kernels"])
    assert importlib.util.find_spec("tp_invariant.kernels").origin == str(KERNELS / "__init__.py")


def test_public_names_exist():
    assert sorted(tp_invariant.__all__) == tp_invariant.__all__
    for name in tp_invariant.__all__:
        assert hasattr(tp_invariant, name)


def test_every_folder_is_installed():
    """A folder without an __init__.py would be missing from the wheel."""
    without = [path for path in {file.parent for file in FILES + KERNEL_FILES} if not (path / "__init__.py").exists()]
    assert not without
