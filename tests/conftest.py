"""What every test needs before anything imports torch or triton."""

import atexit
import contextlib
import gc
import importlib.util
import inspect
import itertools
import os
import shutil
import tempfile
import types
from pathlib import Path
from unittest import mock

# Small products on two threads are waiting, most of all, and the OpenMP of torch's wheels waits by spinning on a core
# that ranks or other tests could use: a case of test_attention_choice.py took 7 s of CPU time, and takes 0.6 without.
# It reads this when it is loaded, which `import torch` does.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Ranks that share cores wake each other all the time, and by default a thread that wakes takes the core from one that
# runs. If that one holds the lock of a connection of gloo's, gloo's thread asks for the lock in a loop: a quarter of
# the CPU time of tests of layers. This thread and all that come from it leave each other their time slices.
with contextlib.suppress(AttributeError, OSError):  # not on every system, and a sandbox may forbid it
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# torch.compile: one cache for a run of the tests and all its ranks, empty at its start, so that what is tested is
# today's; and compiled in the process itself, as starting a pool of workers takes longer than these programs do.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _cache = tempfile.mkdtemp(prefix="inductor-")
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Inductor need not compile six programs to ask whether g++ knows this CPU's vector instructions: the tests show it.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest
import torch
import torch.distributed as dist

from tp_invariant.diagnostics.onednn import avoid_trapped_units
from tp_invariant.testing import checks as testing
from tp_invariant.testing import rank_pool

# torch's own bfloat16 products are the measure of many tests, and end the process on some virtual machines: there this
# sets a variable of oneDNN's, which must be before oneDNN is first used, for this process and the ranks.
avoid_trapped_units()

if not torch.cuda.is_available():
    # Triton kernels then run in its interpreter, on CPU tensors; it must know before it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _dots_in_the_order_of_k(interpreter) -> None:
    """Has Triton's interpreter add a dot's products one after another, in the order of k.

    It computes tl.dot by numpy's matmul, and so by a BLAS, whose bits on some CPUs depend on the number of rows and
    columns. The tests of tiles and slices would then compare what the BLAS does, and not the kernels.
    """
    import numpy

    def matmul(a, b, dtype=None):
        a, b = (x if dtype is None else x.astype(dtype) for x in (a, b))
        shape = (*numpy.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        out = numpy.zeros(shape, numpy.result_type(a, b))
        for k in range(a.shape[-1]):
            out += a[..., :, k, None] * b[..., k, None, :]
        return out

    interpreter.np = types.SimpleNamespace(**{**vars(numpy), "matmul": matmul})


def _look_up_once(interpreter) -> None:
    """What Triton's interpreter finds out again at every operation and launch is remembered: a fifth of its time."""
    dtype_of, tl = interpreter._get_np_dtype, interpreter.tl
    dtypes, builtins = {}, {}

    def np_dtype(tt_dtype):
        element = tt_dtype.element_ty if isinstance(tt_dtype, tl.block_type) else tt_dtype
        name = "pointer" if isinstance(element, tl.pointer_type) else element.name
        if name not in dtypes:
            dtypes[name] = dtype_of(element)
        return dtypes[name]

    def patch_builtin(package, *rest):
        if package not in builtins:
            builtins[package] = inspect.getmembers(package, tl.core.is_builtin)
        for name, member in builtins[package]:
            if getattr(package, name) is member:  # not one that is patched already
                interpreter._patch_attr(package, name, member, *rest)

    interpreter._get_np_dtype, interpreter._patch_builtin = np_dtype, patch_builtin


if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    from tp_invariant.kernels.rowwise import norm

    _dots_in_the_order_of_k(interpreter)
    _look_up_once(interpreter)
    # An operation takes the interpreter as long for one element as for a thousand: a choice of speed alone. With a
    # GPU's 64 columns and 32 rows at once, this one short kernel took two thirds of the time of the tests of norms.
    norm.FOLD_COLUMNS, norm.FOLD_AT_ONCE = 1024, 4


MOST_RANKS = 8  # that a test on CPUs asks for
# the first by cases of test files, the second by torch's optimizers
IMPORTED_BY_RANKS = [
    "pytest",
    "torch._dynamo",
    "transformers.models.qwen3.modeling_qwen3",
    "lightning.pytorch",
    "transformers.trainer",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
]


rank_pool.imported_by_starters.append("one_gloo_device")


@pytest.fixture(scope="session", autouse=True)
def whole_pool(request):
    """Whichever test asks first for ranks on CPUs starts as many as any test needs.

    A pool that is too small is replaced by a larger one, and starting ranks takes seconds. In a run of several files
    the ranks are forked with what all of them import sooner or later: by itself each of eight would take four seconds
    for it. The fast tier, which may need two ranks alone, gets what it asks for.
    """
    if request.config.getoption("-m") == "fast":
        yield
        return
    several = len({item.path for item in request.session.items}) > 1
    pools, shared_pool = rank_pool._pools, testing.shared_pool

    def at_its_largest(size, device):
        if device != "cpu" or rank_pool._pools is not pools:  # a test's own pools
            return shared_pool(size, device)
        with mock.patch.object(rank_pool, "imported_by_starters", imported):
            return shared_pool(max(size, MOST_RANKS), device)

    imported = ["one_gloo_device"] + [
        name for name in IMPORTED_BY_RANKS if several and importlib.util.find_spec(name.partition(".")[0])
    ]
    with mock.patch.object(testing, "shared_pool", at_its_largest):
        yield


@pytest.fixture
def mode_on(monkeypatch):
    """The mode is on, here and on the ranks. For a whole file: `pytestmark = pytest.mark.usefixtures("mode_on")`."""
    monkeypatch.setenv("TP_INVARIANT_MODE", "1")


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def pytest_configure(config):
    """pytest-xdist hands out files as they are ordered below; by itself, those with most tests first.

    The longest files have few tests. Last, they would keep one worker busy while the other has nothing left.
    """
    config.option.loadscopereorder = False


def pytest_exception_interact(call):
    """After a test that failed on ranks, the next one starts others.

    run_ranks keeps them if all raised an error, as tests of errors want, but one that was not expected may have left a
    message on its way, and the next test would wait until its time is up.
    """
    if isinstance(call.excinfo.value, rank_pool.RankError):
        for device in list(rank_pool._pools):
            rank_pool.discard_pool(device)


def pytest_runtest_teardown(item, nextitem):
    """Under pytest-xdist, where workers share GPUs, a process keeps no memory of a test that is over."""
    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_available():
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if (pool := rank_pool._pools.get("cuda")) is not None:
            testing.run_ranks(lambda group: torch.cuda.empty_cache(), pool.size, device="cuda")


def pytest_addoption(parser):
    group = parser.getgroup("fuzz", "random composed models (tests/test_fuzz.py)")
    group.addoption("--fuzz", type=int, default=None, metavar="N", help="as many models, instead of the fixed few")
    group.addoption(
        "--fuzz-seed", type=int, default=None, metavar="S", help="which ones; printed where it is not given"
    )
    group.addoption("--fuzz-device", choices=("cpu", "cuda"), default="cpu")
    group.addoption(
        "--fuzz-scripts", default=tempfile.gettempdir(), metavar="DIR", help="where failing ones are written"
    )
    parser.addoption(
        "--all-cases", action="store_true",
        help="all cases of the longest tests, and not a few: layouts, trainers, degrees, kernels, model types",
    )  # fmt: skip


# --- tiers: what a test needs is read off what it calls ---------------------------------------------------------------

NEEDS = {
    "ranks": {"run_ranks", "shared_pool", "RankPool"},
    "subprocess": {"subprocess", "Popen", "Process", "torchrun"},
}
FAST_LIMIT = 120  # seconds, on a machine that does other things beside


def _called(function, known):
    """The names in a function's code, and in the code of all functions and classes of the tests that it uses."""
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__") or function.__module__.startswith("tp_invariant"):
        return set()
    if function in known:
        return known[function]
    names = known[function] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += filter(inspect.iscode, code.co_consts)
    spaces = [function.__globals__]
    spaces += [vars(found) for name in names if inspect.ismodule(found := spaces[0].get(name)) and _is_helper(found)]
    for name, space in itertools.product(sorted(names), spaces):
        found = space.get(name)
        parts = vars(found).values() if inspect.isclass(found) else [found]
        for part in filter(inspect.isfunction, parts):
            names.update(_called(part, known))
    return names


def pytest_collection_finish():
    """What was imported stays, so Python's collector need not look at it again.

    The library calls the collector and asks it for all objects (layers/in_place.py), and here they are a million.
    """
    gc.freeze()


def _is_helper(module):
    return Path(getattr(module, "__file__", None) or "/").is_relative_to(Path(__file__).parent)


def pytest_collection_modifyitems(config, items):
    """Marks `ranks`, `subprocess` and `interpreter`; and `fast`, what needs none of them and compiles nothing.

    A few tests of ranks say `fast` themselves, so that the tier compares bits of several degrees too. The files at the
    top of tests/, which are of the whole library, take longest and come first, and then those of tests/testing, which
    would be last.
    """
    named = any("::" in argument for argument in config.args)
    if not config.getoption("--all-cases") and not named:
        left_out = [item for item in items if item.get_closest_marker("more")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: [item.path.parent.name != name for name in ("tests", "testing")])
    known = {}
    for item in items:
        fixtures = [found[-1].func for found in item._fixtureinfo.name2fixturedefs.values() if found]
        fixtures = [function for function in fixtures if function.__module__ != __name__]
        names = set().union(*(_called(function, known) for function in [item.function, *fixtures]))
        needed = [marker for marker, calls in NEEDS.items() if names & calls]
        if not torch.cuda.is_available() and "kernels" in item.path.parent.parts:
            needed.append("interpreter")
        for marker in needed:
            item.add_marker(marker)
        if not needed and "compile" not in names and not any(map(item.get_closest_marker, ("gpu", "slow"))):
            item.add_marker("fast")
        if config.getoption("--fuzz") is not None:
            item.add_marker(pytest.mark.timeout(0))  # as many models take as long as they take
        elif config.getoption("-m") == "fast" and item.get_closest_marker("fast"):
            item.add_marker(pytest.mark.timeout(FAST_LIMIT))
