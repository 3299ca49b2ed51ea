"""Every Triton kernel compiles for a Hopper GPU, also without one: the interpreter accepts more than the compiler.

With the installed Triton; nothing is launched, so this does not test results.
"""

from __future__ import annotations

import importlib
import itertools
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from triton.runtime.jit import KernelInterface

from tp_invariant import kernels

TESTS = Path(__file__).parents[1]


def kernel_names():
    """The kernels that are launched; they call the others."""
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, KernelInterface) and name.endswith("kernel"):
                yield f"{Path(value.fn.__code__.co_filename).stem}.{name}"


def compile_in_a_process(tmp_path, *options, worker=TESTS / "helpers" / "compile_worker.py"):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # an eighth of the compiler's time
    command = [sys.executable, str(worker), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, pytestconfig):
    """The process that compiled all kernels, and the folder of what the compiler wrote."""
    folder = tmp_path_factory.mktemp("kernels")
    options = ["--all-cases"] if pytestconfig.getoption("--all-cases") else []
    return compile_in_a_process(folder, *options), folder


def test_every_kernel(compiled):
    done, _ = compiled
    assert done.returncode == 0, done.stderr[-3000:]
    expected = set(kernel_names())
    assert len(expected) > 20
    assert set(done.stdout.split()) == expected


def layouts_of_row_sums(text):
    """The layouts of matrices whose rows a compiled kernel adds up."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    sums = re.findall(r'"tt\.reduce"\(%\S+\) <\{axis = 1.*?\}\) : \((tensor<\d+x\d+x\S+ #\w+>)\)', text, re.DOTALL)
    bodies = re.findall(r'"tt\.reduce"\(%\S+\) <\{axis = 1(.*?)\}\) : \(tensor<\d+x\d+x', text, re.DOTALL)
    assert len(sums) == len(bodies)
    pairs = zip(sums, bodies, strict=True)
    return [layouts[re.search(r"#\w+", kind).group()] for kind, body in pairs if "arith.addf" in body]


def test_row_sums_of_attention_are_in_the_layout_of_the_product(compiled):
    """In any other layout the compiler chooses an order of the sum for each compiled form, as it did for masks."""
    _, folder = compiled
    forms = [path.read_text() for path in folder.rglob("_forward_kernel.ttgir")]
    forms = [text for text in forms if "tt.reduce" in text and "tensor<64x128x" in text]
    found = [layout for text in forms for layout in layouts_of_row_sums(text)]
    assert len(forms) > 3 and sum("matrix_ptr" in text for text in forms) == 2 and found  # with a mask of either kind
    assert all("nvidia_mma" in layout for layout in found), set(found)


def test_row_sums_of_attention_in_fp32_are_in_one_layout_for_pages_and_one_tensor(compiled):
    """There the product is no tensor core's, and the order of a row's sum is the compiler's."""
    _, folder = compiled
    forms = [path.read_text() for path in folder.rglob("_forward_kernel.ttgir")]
    forms = [text for text in forms if re.search(r"%q_ptr: !tt.ptr<f32>", text)]
    found = [layout for text in forms for layout in layouts_of_row_sums(text)]
    assert sorted("pages_ptr" in text for text in forms) == [False, True]
    assert found and len(set(found)) == 1, set(found)


def test_dot_products_of_one_length_are_added_in_one_order(compiled):
    """Three lengths of two dtypes, in four ways in memory each, are one form each, and one with drows beside them.

    Both add in one layout: threads hold as many neighbours each, and warps lie in one order.
    """
    _, folder = compiled
    texts = [path.read_text() for path in folder.rglob("_dots_kernel.ttgir")]
    assert len(texts) == 3 * 2 * 2
    found = []
    for text in texts:
        layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
        shapes = re.findall(r'"tt\.reduce"\(.*?\}\) : \((tensor<\d+xf32, #\w+>)\)', text, re.DOTALL)
        elements = re.search(r"%dy_ptr: !tt.ptr<(\w+)>", text).group(1)
        (shape,) = shapes
        found.append((elements, shape.partition(",")[0], layouts[re.search(r"#\w+", shape).group()]))
    assert len(set(found)) == 3 * 2 and all(found.count(form) == 2 for form in set(found))


def test_products_by_expert_compute_a_step_while_the_next_is_loaded(compiled):
    """A compiler that waits for each step's product, or copies operands by registers, gives the same bits, slowly."""
    _, folder = compiled
    for name, forms in (("_rows", 5), ("_outer", 1), ("outer_ahead", 3)):
        texts = [path.read_text() for path in folder.rglob(f"{name}_kernel.ptx")]
        assert len(texts) >= forms
        for text in texts:
            assert re.search(r"wgmma\.wait_group\.sync\.aligned\s+1;", text)
            assert "cp.async.bulk.tensor.4d" in text and "ldmatrix" not in text


def test_sorting_by_expert_asserts_that_experts_exist(compiled):
    _, folder = compiled
    texts = [path.read_text() for path in folder.rglob("_count_kernel.ptx")]
    assert texts and all("__assertfail" in text for text in texts)


def test_cross_entropy_asserts_on_the_device_and_fuses_nothing(compiled):
    """Triton leaves assertions out of kernels that are not compiled for debugging. Only log in fp64 may fuse."""
    _, folder = compiled
    texts = {name: [path.read_text() for path in folder.rglob(f"_{name}_kernel.ptx")] for name in CROSS_ENTROPY}
    for name in ("whole", "extremes"):
        assert len(texts[name]) == 4  # two dtypes, with and without label smoothing
        assert all("__assertfail" in text for text in texts[name])
    texts["sums"] = [text for text in texts["sums"] if "ex2" in text]  # softmax has a kernel of this name
    assert len(texts["sums"]) == 4 and len(texts["total"]) == 2
    for text in itertools.chain(*texts.values()):
        assert "fma.rn.f32" not in text and "fma.rn.ftz.f32" not in text


CROSS_ENTROPY = ("whole", "extremes", "sums", "losses", "total", "grad")


def test_the_sum_over_tokens_is_one_order_in_both_forms(compiled):
    """By halves, each a sum of two: no tree of additions whose order the layout decides."""
    _, folder = compiled
    for path in folder.rglob("_total_kernel.ttgir"):
        sums = re.findall(
            r'"tt\.reduce"\(%\S+\) <\{axis = 0.*?\}\) : \(tensor<([0-9x]+)xf64', path.read_text(), re.DOTALL
        )
        assert sums[:2] == ["2x1024", "2x512"] and sums[-1] == "1" and len(sums) == 12


def test_a_kernel_that_does_not_compile(tmp_path):
    """The control: a comprehension, which the interpreter accepts."""
    source = (TESTS / "helpers" / "compile_worker.py").read_text()
    for text, broken in (
        ("driver.set_active(NoGPU())", "driver.set_active(NoGPU()); grad_norm._fold = Kernel(broken)"),
        ("compiled: set[str] = set()", "compiled: set[str] = set()\n\n\n" + BROKEN),
        ("products(dtype, False)", "clipping(dtype)"),
    ):
        assert text in source
        source = source.replace(text, broken)
    worker = tmp_path / "worker.py"
    worker.write_text(source)
    done = compile_in_a_process(tmp_path, worker=worker)
    assert done.returncode != 0
    assert "UnsupportedLanguageConstruct" in done.stderr


BROKEN = """
import triton
import triton.language as tl
from tp_invariant.kernels.plans import Kernel


@triton.jit
def broken(v_ptr, out_ptr, COUNT: tl.constexpr):
    first, second = (tl.load(v_ptr + i) for i in tl.static_range(2))
    tl.store(out_ptr, first + second)
"""
