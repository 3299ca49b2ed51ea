"""core/torch_private.py has every private name of torch; no other file of the package uses any."""

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
import torch

import tp_invariant
import tp_invariant.kernels
from tp_invariant.core import torch_private
from tp_invariant.core.torch_private import TABLE

PACKAGE, KERNELS = (Path(module.__file__).parent for module in (tp_invariant, tp_invariant.kernels))
PRIVATE_FILE = PACKAGE / "core" / "torch_private.py"
MOST = 45

# nn.Module's own dicts, which every tool for modules reads; methods of named tuples, which are public; os._exit
EXEMPT = {"_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}
EXEMPT |= {"_replace", "_fields", "_asdict", "_exit"}
OF_PYTHON = {"_getframe", "getrefcount", "_current_frames"}
# of accelerate, Lightning and TRL, by names that torch has too
OF_OTHER_PROJECTS = {"_schedulers", "_optimizers", "_optimizer", "_models", "_dataloaders", "_metrics"}

# of classes whose objects alone have the names
INSTANCES = {torch._ops.OpOverload: torch.ops.aten.mm.default}


def files():
    folders = [PACKAGE, KERNELS]  # kernels/ and examples/ may be links inside the package, or folders of it
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).parts
            if path != PRIVATE_FILE and (folder == KERNELS or parts[0] not in ("kernels", "examples")):
                yield path


def short(path):
    return (path.relative_to(KERNELS.parent) if path.is_relative_to(KERNELS) else path.relative_to(PACKAGE)).as_posix()


def is_private(name):
    return name.startswith("_") and not name.endswith("__") and name != "_"


@cache
def words_of_torch():
    """Every private word in torch's Python sources, and attribute of its tensors, functions and process groups."""
    folder = Path(torch.__file__).parent
    words = {name for kind in (torch.Tensor, torch.autograd.Function, torch._C) for name in dir(kind)}
    for path in folder.rglob("*.py"):
        if not {"_inductor", "onnx", "testing", "test"} & set(path.relative_to(folder).parts):
            words.update(re.findall(r"\b_[A-Za-z]\w*", path.read_text(errors="replace")))
    return words


def defined_in(tree):
    """The names that a file gives to what is its own."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else []


@cache
def defined_here():
    return {name for path in files() for name in defined_in(ast.parse(path.read_text()))}


def of_torch(dotted):
    """ "torch.x._y" of "torch.x._y.z"; "" of a public name, and of aten's operators."""
    parts = dotted.split(".")
    if parts[0] != "torch" or parts[1:3] == ["ops", "aten"]:
        return ""
    private = [place for place, part in enumerate(parts) if is_private(part)]
    return ".".join(parts[: private[-1] + 2]) if private else ""


def private_names(source, own=frozenset()):
    """The private names of torch that a file uses; `own`: what is defined in this package under such a name."""
    tree = ast.parse(source)
    bound, found, inner = {}, set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                found.add(of_torch(alias.name))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                found.add(of_torch(f"{node.module}.{alias.name}"))
    always = {entry.path.rpartition(".")[2] for entry in TABLE}

    def attribute(name):
        if name in OF_PYTHON:
            found.add(f"sys.{name}")
        elif not is_private(name) or name in EXEMPT | OF_OTHER_PROJECTS:
            pass
        elif name in always or (name not in own and name in words_of_torch()):
            found.add(f".{name}")

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            chain, base = [node.attr], node.value
            while isinstance(base, ast.Attribute):
                inner.add(id(base))
                chain.insert(0, base.attr)
                base = base.value
            dotted = ".".join([bound.get(base.id, ""), *chain]) if isinstance(base, ast.Name) else ""
            if dotted.startswith("torch."):
                found.add(of_torch(dotted))
            else:
                for name in chain:
                    attribute(name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("torch."):
            if re.fullmatch(r"[\w.]+", node.value):
                found.add(of_torch(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            name = node.args[1]
            if node.func.id in ("getattr", "hasattr", "setattr", "delattr") and isinstance(name, ast.Constant):
                attribute(str(name.value))
    return found - {""}


@pytest.mark.parametrize("path", list(files()), ids=short)
def test_private_names_of_torch_are_in_one_file(path):
    names = private_names(path.read_text(), defined_here())
    assert not names, f"{short(path)} uses {sorted(names)}: see core/torch_private.py"


def test_the_table_is_short_and_has_reasons():
    assert len(TABLE) <= MOST
    assert len({entry.name for entry in TABLE}) == len({entry.path for entry in TABLE}) == len(TABLE)
    for name, path, reason in TABLE:
        assert path.startswith("os.") or of_torch(path) == path, f"{path} is not private"
        assert hasattr(torch_private, name.removesuffix("_reason")) and reason


def test_the_file_uses_what_is_in_the_table():
    paths = [entry.path for entry in TABLE]
    of_others = {"._fsdp_param_groups", "._FrameAction", "._FrameExecStrategy"}  # that come with one in the table
    for name in private_names(PRIVATE_FILE.read_text()) - of_others:
        known = name.startswith(tuple(paths)) or any(path.startswith(name) or path.endswith(name) for path in paths)
        assert known, f"{name} has no row in the table"


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry.name)
def test_the_installed_torch_has(entry):
    parts = entry.path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        break
    for part in parts[length:-1]:
        owner = getattr(owner, part)
    owner, last = INSTANCES.get(owner, owner), parts[-1]
    there = length == len(parts) or hasattr(owner, last) or last in getattr(owner, "__annotations__", {})
    there = there or (inspect.isfunction(owner) and last in words_of_torch())  # which it sets
    there = there or (inspect.isclass(owner) and f"self.{last}" in inspect.getsource(owner))
    assert there, f"torch {torch.__version__} has no {entry.path}"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch._C._x()", {"torch._C._x"}),
        ("from torch._guards import TracingContext", {"torch._guards.TracingContext"}),
        ("from torch import nn as n\nn.modules._functions.x.y", {"torch.nn.modules._functions.x"}),
        ("def f(x): return x._local_tensor", {"._local_tensor"}),
        ("def f(x): return getattr(x, '_version', 0)", {"._version"}),
        ("import sys\nsys._getframe(1)", {"sys._getframe"}),
        ("import sys\nsys.modules.get('torch._dynamo.config')", {"torch._dynamo.config"}),
        ("import torch\ntorch.ops.aten._softmax.default", set()),
        ("def f(module): return module._parameters, module._own", set()),
        ("import torch\ntorch.nn.Module.__init__", set()),
    ],
)
def test_the_reader_finds(source, names):
    assert private_names(source, {"_own"}) == names
