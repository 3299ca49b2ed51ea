"""Tests of the tools for tests: each check is shown to be able to fail, with a message that says what went wrong."""

import functools
import inspect
import os
import re
import signal
import sys
from multiprocessing.connection import wait
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import tp_invariant as tpi
from tp_invariant.kernels.gemm import reference
from tp_invariant.testing import RankError, assert_bitwise_equal, assert_slice_invariant, rank_pool
from tp_invariant.testing import checks as testing

# as where there is no GPU: these tests are of the tools alone
assert_tp_invariant = functools.partial(testing.assert_tp_invariant, device="cpu")


@pytest.fixture(scope="module")
def _own_pools():
    pools = {}
    yield pools
    for own in pools.values():
        own.close()


@pytest.fixture
def own_pool(monkeypatch, _own_pools):
    """A pool of two ranks for tests that break it, so that the other tests' larger pool stays alive."""
    monkeypatch.setattr(rank_pool, "_pools", _own_pools)
    monkeypatch.setattr(rank_pool, "_GRACE_SECONDS", 1.0)
    yield
    if "cpu" not in _own_pools:
        return
    try:  # a test that failed leaves the next one a new pool
        assert_ranks_answer()
    except Exception:
        rank_pool.discard_pool("cpu")


def assert_ranks_answer():
    """A new call works, and returns its own results and not those of an earlier call."""
    token = os.urandom(4).hex()
    assert run_ranks(lambda tp_group: (token, dist.get_rank(tp_group)), 2) == [(token, 0), (token, 1)]


# --- run_ranks ------------------------------------------------------------------------------------------------------


def at_the_top(tp_group, x):
    return dist.get_rank(tp_group), dist.get_world_size(tp_group), helper(x)


def helper(x):
    return x + 1


@pytest.mark.parametrize("world", [1, 3, 8])
def test_results_come_in_rank_order(world):
    assert run_ranks(at_the_top, world, 5) == [(rank, world, 6) for rank in range(world)]


def test_lambdas_and_closures_can_be_sent():
    offset = 10
    assert run_ranks(lambda tp_group: tp_group.rank() + offset, 2) == [10, 11]


def test_processes_stay_alive_for_the_next_call():
    first = run_ranks(lambda tp_group: os.getpid(), 8)
    assert len(set(first)) == 8
    assert os.getpid() not in first
    assert run_ranks(lambda tp_group: os.getpid(), 3) == first[:3]
    assert run_ranks(lambda tp_group: torch.get_num_threads(), 2) == [1, 1]


def test_ranks_do_not_share_the_order_of_sets():
    """With one seed of hashes for all, no case would show ranks that order their collectives by a set of strings."""
    assert len(set(run_ranks(lambda tp_group: hash("a string"), 8))) == 2


def test_an_error_on_every_rank_shows_every_traceback():
    def fail(tp_group):
        raise ValueError(f"boom {tp_group.rank()}")

    with pytest.raises(RankError) as caught:
        run_ranks(fail, 2)
    text = str(caught.value)
    for rank in range(2):
        assert re.search(rf"rank {rank} of 2:\nTraceback [^$]*, in fail\n[^$]*ValueError: boom {rank}", text)
    assert {rank: str(error) for rank, error in caught.value.errors.items()} == {0: "boom 0", 1: "boom 1"}
    assert all(isinstance(error, ValueError) for error in caught.value.errors.values())
    assert isinstance(caught.value, AssertionError)
    assert run_ranks(lambda tp_group: 1, 8) == [1] * 8


@pytest.mark.parametrize("world", [0, -1])
def test_no_ranks_are_an_error(own_pool, world):
    """With no ranks every check would pass."""
    with pytest.raises(ValueError, match=f"world_size={world}"):
        run_ranks(lambda tp_group: 1, world)
    assert_ranks_answer()


# --- ranks that fail, hang and die ----------------------------------------------------------------------------------


def test_a_rank_that_waits_for_one_that_failed(own_pool):
    def case(tp_group):
        if tp_group.rank() == 1:
            raise ValueError("boom")
        dist.barrier(tp_group)

    assert_ranks_answer()
    with pytest.raises(RankError) as caught:
        run_ranks(case, 2)
    text = str(caught.value)
    assert "rank 0 of 2:\ndid not answer; it may be waiting for others in a collective" in text or (
        "rank 0 of 2:\nTraceback" in text
    )
    assert "rank 1 of 2:\nTraceback" in text
    assert "ValueError: boom" in text
    assert sorted(caught.value.errors) == [0, 1]
    assert isinstance(caught.value.errors[1], ValueError)
    assert_ranks_answer()


def test_ranks_that_do_not_answer_in_time(own_pool, monkeypatch):
    def case(tp_group):
        if tp_group.rank() == 0:
            dist.barrier(tp_group)

    def wait_for(connections, timeout):  # as long as it takes for rank 1's answer
        return wait(connections, None if len(connections) == 2 else timeout)

    assert_ranks_answer()
    with monkeypatch.context() as patch, pytest.raises(RankError) as caught:
        patch.setattr(rank_pool, "wait_for", wait_for)
        run_ranks(case, 2, timeout=0.5)
    assert str(caught.value) == "rank 0 of 2:\ndid not answer; it may be waiting for others in a collective"
    assert list(caught.value.errors) == [0]
    assert isinstance(caught.value.errors[0], TimeoutError)
    assert_ranks_answer()


def test_a_process_that_dies(own_pool):
    def case(tp_group):
        if tp_group.rank() == 1:
            os.kill(os.getpid(), signal.SIGILL)
        return "fine"

    assert_ranks_answer()
    with pytest.raises(RankError, match=r"^rank 1 of 2:\nthe process of rank 1 ended by SIGILL$"):
        run_ranks(case, 2)
    assert_ranks_answer()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((2, at_the_top), r"run_ranks\(fn, world_size, \*args\): fn=2 is not callable; the function comes first"),
        ((at_the_top, "2"), r"world_size='2' must be an int"),
    ],
)
def test_arguments_in_the_wrong_order_are_refused(arguments, text):
    with pytest.raises(TypeError, match=text):
        run_ranks(*arguments)


def test_a_process_that_died_between_calls(own_pool, monkeypatch, tmp_path):
    """Reported or replaced, so that later calls work. A pool has no files, which a killed parent would leave."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _, victim = run_ranks(lambda tp_group: os.getpid(), 2)
    os.kill(victim, signal.SIGKILL)
    wait([rank_pool._pools["cpu"]._connections[1]])
    try:
        assert_ranks_answer()
    except RankError as error:
        assert "the process of rank 1 ended by SIGKILL" in str(error)
    assert_ranks_answer()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", [None, "a_script"], ids=["a local function", "a module that ranks cannot import"])
def test_what_cannot_be_sent_without_cloudpickle_names_it(monkeypatch, module):
    def case(tp_group):
        return 3

    if module is not None:
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        case.__module__ = module
    assert run_ranks(case, 2) == [3, 3]  # the control: with cloudpickle it runs
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # an import of it raises, as where it is not installed
    hint = "cannot be sent to other processes: define it at the top of an importable module, or pip install cloudpickle"
    with pytest.raises(TypeError, match=rf"^\(<function .*case at .*{hint}$"):
        run_ranks(case, 2)


class Peculiar(Exception):
    """Can be pickled but not unpickled: pickle calls it with its one argument."""

    def __init__(self, message, more):
        super().__init__(message)
        self.more = more


def test_an_exception_that_cannot_be_unpickled(own_pool):
    def case(tp_group):
        raise Peculiar("boom", 1)

    with pytest.raises(RankError, match=r"(?s)^ranks 0, 1 of 2:\nTraceback.*boom"):
        run_ranks(case, 2)
    assert_ranks_answer()


def test_an_interrupted_call_leaves_no_answers_for_the_next(own_pool, monkeypatch):
    """Ctrl-C, or a test runner's timeout, while the ranks are at work."""

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    assert_ranks_answer()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(rank_pool, "wait_for", interrupt)
        run_ranks(lambda tp_group: "an answer that nobody waited for", 2)
    assert_ranks_answer()


# --- assert_tp_invariant --------------------------------------------------------------------------------------------


def base(tp_group):
    """A case that depends on the degree with the mode off, but not with it on."""
    x = torch.linspace(-1, 1, 6).view(2, 3)
    if not tpi.is_tp_invariant_mode_enabled():
        x = x * dist.get_world_size(tp_group)
    return x


def test_an_invariant_case_passes():
    result = assert_tp_invariant(lambda tp_group: {"y": base(tp_group), "step": 3}, degrees=(1, 2, 3))
    assert_bitwise_equal(result["['y']"], torch.linspace(-1, 1, 6).view(2, 3))
    assert result["['step']"] == 3


def case_at_the_top(tp_group, scale):
    """Uses names of this module, which the ranks cannot import."""
    return base(tp_group) * scale


def test_a_case_at_the_top_of_a_test_file_can_be_sent(own_pool, monkeypatch, tmp_path):
    """By value: the ranks start in an empty folder and cannot import this file."""
    rank_pool.discard_pool("cpu")
    monkeypatch.chdir(tmp_path)
    try:
        result = assert_tp_invariant(case_at_the_top, 2.0, degrees=(2, 1))
    finally:
        rank_pool.discard_pool("cpu")
    assert_bitwise_equal(result["value"], torch.linspace(-1, 1, 6).view(2, 3) * 2.0)


@pytest.mark.parametrize(("degree", "culprit"), [(2, 1), (3, 1), (3, 2), (2, 0)])
def test_one_bit_on_one_rank_is_caught(degree, culprit):
    def case(tp_group):
        y = base(tp_group)
        if dist.get_world_size(tp_group) == degree and dist.get_rank(tp_group) == culprit:
            y.view(torch.int32)[1, 0] ^= 1
        return {"y": y}

    text = rf"^rank {culprit} of TP={degree} differs from TP=1: .*'y'.*: 1 of 6 elements differ; .* at index \(1, 0\)"
    with pytest.raises(AssertionError, match=text):
        assert_tp_invariant(case, degrees=(1, 2, 3))


@pytest.mark.parametrize("degrees", ((), (1,), (2, 2)))
def test_degrees_that_leave_nothing_to_compare(degrees):
    with pytest.raises(ValueError, match=r"leaves nothing to compare: give at least two different ones"):
        assert_tp_invariant(base, degrees=degrees)


def test_a_case_that_is_equal_with_the_mode_off():
    def case(tp_group):
        return torch.ones(3)

    text = (
        "with the mode off, TP=1, 2 agree too, so this case proves nothing: use a larger K or data with a wider range "
        "of exponents, and check that its layers get tp_group"
    )
    with pytest.raises(AssertionError, match=f"^{re.escape(text)}$"):
        assert_tp_invariant(case, degrees=(1, 2))
    assert_tp_invariant(case, degrees=(1, 2), negative_control=False)


def test_the_mode_is_on_and_then_off_whatever_the_ranks_had():
    def case(tp_group, wanted):
        return wanted if tpi.is_tp_invariant_mode_enabled() else dist.get_world_size(tp_group)

    for mode in (True, False, None):
        with tpi.set_tp_invariant_mode(mode):
            assert_tp_invariant(case, 7, degrees=(1, 2))

    def mode_now(tp_group):
        return rank_pool.os.environ.get("TP_INVARIANT_MODE"), tpi.is_tp_invariant_mode_enabled()

    assert {enabled for _, enabled in run_ranks(mode_now, 2)} == {os.environ.get("TP_INVARIANT_MODE") == "1"}


def test_a_broken_layer_is_caught():
    """A layer that adds on the wire with the mode on, which is what this library prevents."""

    def case(tp_group):
        torch.manual_seed(0)
        layer = tpi.Linear(512, 64, bias=False, parallel_mode="row", tp_group=tp_group)
        x = torch.randn(4, 512)
        with tpi.set_tp_invariant_mode(False):
            return layer(x.chunk(tp_group.size(), -1)[tp_group.rank()])

    with pytest.raises(AssertionError, match=r"^rank 0 of TP=2 differs from TP=1"):
        assert_tp_invariant(case, degrees=(1, 2))


def test_the_example_in_the_docstring(monkeypatch):
    monkeypatch.setattr(testing, "default_device", lambda: "cpu")
    example = inspect.getdoc(testing).partition("\n\n")[2]
    assert "def test_my_mlp" in example
    namespace = {"tpi": tpi, "torch": torch, "__name__": "example"}
    exec(compile(example, "<the example>", "exec"), namespace)
    namespace["test_my_mlp"]()


# --- assert_slice_invariant -----------------------------------------------------------------------------------------

SHAPES = ((20, 24, 300),)


def depends_on(condition):
    """A gemm_fn that is the reference, but splits K in two if `condition` holds."""

    def gemm_fn(a, b, *, bias=None, out_dtype=None):
        if not condition(a, b, bias):
            return reference.matmul(a, b, bias=bias, out_dtype=out_dtype)
        half = a.shape[1] // 2
        parts = [reference.matmul(a[:, k], b[k], out_dtype=torch.float32) for k in (slice(half), slice(half, None))]
        c = parts[0] + parts[1]
        return (c if bias is None else c + bias.float()).to(out_dtype or a.dtype)

    return gemm_fn


@pytest.mark.parametrize(
    ("condition", "label"),
    [
        (lambda a, b, bias: a.shape[0] < 4, "the slice a[0:1, :]"),
        (lambda a, b, bias: b.shape[1] < 4, "the slice b[:, 0:1]"),
        (lambda a, b, bias: bias is not None and a.shape[0] < 4, "the slice a[0:1, :] with bias"),
        (lambda a, b, bias: a.stride(1) != 1, "a transposed copy of a"),
        (lambda a, b, bias: b.stride(0) == 1, "a transposed copy of b"),
        (lambda a, b, bias: a.data_ptr() % 4 != 0 and a.shape[0] == 20, "an unaligned copy of a"),
        (lambda a, b, bias: a.stride(0) == 2 * a.shape[1], "every second row of a copy of a"),
    ],
)
def test_a_gemm_fn_that_depends_on_more_is_caught(condition, label):
    text = (
        f"not slice-invariant for a (20, 300) @ b (300, 24), torch.bfloat16, out_dtype torch.float32: {label} differs"
    )
    dtypes = (torch.bfloat16,)
    only_fp32 = depends_on(condition)

    def gemm_fn(a, b, *, bias=None, out_dtype=None):
        same = out_dtype in (None, a.dtype)  # bfloat16 output may hide it
        return (reference.matmul if same else only_fp32)(a, b, bias=bias, out_dtype=out_dtype)

    with pytest.raises(AssertionError, match=f"^{re.escape(text)}"):
        assert_slice_invariant(gemm_fn, shapes=SHAPES, dtypes=dtypes, device="cpu")


def test_a_gemm_fn_that_depends_on_threads_is_caught():
    before = torch.get_num_threads()
    gemm_fn = depends_on(lambda a, b, bias: torch.get_num_threads() == before + 1)
    with pytest.raises(AssertionError, match=f"the same call on {before + 1} threads differs"):
        assert_slice_invariant(gemm_fn, shapes=SHAPES, dtypes=(torch.float32,), device="cpu")
    assert torch.get_num_threads() == before


def test_torchs_own_matmul_is_not_slice_invariant():
    def gemm_fn(a, b, *, bias=None, out_dtype=None):
        c = torch.matmul(a, b)
        return (c if bias is None else c + bias).to(out_dtype or a.dtype)

    with pytest.raises(
        AssertionError, match=r"^not slice-invariant for a \(.*torch.float32: .* differs from the whole"
    ):
        assert_slice_invariant(gemm_fn, dtypes=(torch.float32,), device="cpu")


@pytest.mark.parametrize(
    "splits", [lambda m, n, k: k >= 2048 and m * n <= 2**19, lambda m, n, k: k > 2048 and m > 64], ids=["small", "tall"]
)
def test_a_split_of_only_large_k_is_found(splits):
    gemm_fn = depends_on(lambda a, b, bias: splits(a.shape[0], b.shape[1], a.shape[1]))
    assert_slice_invariant(gemm_fn, shapes=SHAPES, dtypes=(torch.float32,), device="cpu")  # too small to show it
    with pytest.raises(AssertionError, match=r"^not slice-invariant for a \(.*\) @ b .*: a\[:1, :\] @ b\[:, :\d+\]"):
        assert_slice_invariant(gemm_fn, dtypes=(torch.float32,), device="cpu")


def test_the_reference_passes():
    assert_slice_invariant(reference.matmul, shapes=SHAPES, device="cpu")
    tpi.testing.check_large_slices(reference.matmul, torch.float32, "cpu")


def test_a_terminal_sees_what_is_tried(monkeypatch, capsys):
    assert_slice_invariant(reference.matmul, shapes=((5, 3, 17),), dtypes=(torch.float32,), device="cpu")
    assert capsys.readouterr().err == ""  # no terminal
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert_slice_invariant(reference.matmul, shapes=((5, 3, 17),), dtypes=(torch.float32,), device="cpu")
    line = r"assert_slice_invariant: +\d+ s, many slices of a \(5, 17\) @ b \(17, 3\), torch.float32\n"
    assert re.fullmatch(line, capsys.readouterr().err)


# --- wrong and invariant must fail, too -----------------------------------------------------------------------------


def _zeros(a, b, *, bias=None, out_dtype=None):
    return torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype or a.dtype)


def _without_bias(a, b, *, bias=None, out_dtype=None):
    return reference.matmul(a, b, out_dtype=out_dtype)


def _without_out_dtype(a, b, *, bias=None, out_dtype=None):
    return reference.matmul(a, b, bias=bias)


@pytest.mark.parametrize(
    ("gemm_fn", "fault"),
    [
        (_zeros, "relative error 1.0e+00 against torch's"),
        (_without_bias, "gemm_fn ignores bias"),
        (_without_out_dtype, "gemm_fn ignores out_dtype: it returned (70, 130) torch.bfloat16 on cpu"),
        (lambda a, b, *, bias=None, out_dtype=None: None, "gemm_fn returned a NoneType"),
    ],
)
def test_an_invariant_but_wrong_gemm_fn_is_refused(gemm_fn, fault):
    with pytest.raises(AssertionError, match=rf"^wrong for a \(70, 300\) @ b \(300, 130\).*{re.escape(fault)}"):
        tpi.testing.assert_slice_invariant(gemm_fn, device="cpu")


# --- the parent's state ---------------------------------------------------------------------------------------------


def test_ranks_have_the_parents_mode_and_keep_nothing_of_a_case(own_pool, monkeypatch):
    def case(tp_group):
        seen = tpi.is_tp_invariant_mode_enabled(), torch.get_default_dtype()
        tpi.set_tp_invariant_mode(False)
        torch.set_default_dtype(torch.float64)
        return seen

    monkeypatch.delenv("NVTE_TP_INVARIANT_MODE", raising=False)
    for value, enabled in (("1", True), ("0", False), ("1", True)):
        monkeypatch.setenv("TP_INVARIANT_MODE", value)
        assert run_ranks(case, 2, device="cpu") == [(enabled, torch.float32)] * 2
    with tpi.set_tp_invariant_mode(True):
        monkeypatch.setenv("TP_INVARIANT_MODE", "0")
        assert run_ranks(case, 2, device="cpu") == [(True, torch.float32)] * 2
