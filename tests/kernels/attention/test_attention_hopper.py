"""Attention's forward kernel for Hopper: the bits of the Triton kernel, split over chunks or not. It compiles."""

import os
import subprocess
import sys

import pytest
import torch
from attention_cases import KINDS, assert_same_bytes, attend, tensors

from tp_invariant.kernels import plans
from tp_invariant.kernels.attention import backward as attention_backward
from tp_invariant.kernels.attention import forward as kernels
from tp_invariant.kernels.attention.spec import AttentionSpec, PackedLengths
from tp_invariant.kernels.attention.tiles import Tile

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
CASES = {**KINDS, "all": dict(causal=True, window=700, softcap=20.0)}
BF16 = torch.bfloat16
MASKS = ("bool", "fp32, rows that do not align", "bf16", "of keys", "keys apart")
SIZES = ((1, 1), (1, 3000), (64, 64), (100, 1000), (700, 300), (1200, 1200), (2048, 2048))  # queries, keys


def spec_of(kind, dim):
    options = CASES[kind]
    return AttentionSpec(
        options.get("causal", False), dim**-0.5, options.get("window") or 0, options.get("softcap") or 0.0
    )


def surrounded(shape, dtype, seed):
    """A tensor [B, H, S, D] in the layout of models, with NaN after each sequence and each head in memory."""
    generator = torch.Generator("cuda").manual_seed(seed)
    batch, heads, tokens, dim = shape
    whole = torch.full((batch, tokens + 130, 2 * heads, dim), float("nan"), device="cuda", dtype=dtype)
    whole[:, :tokens, ::2] = 3 * torch.randn(batch, tokens, heads, dim, device="cuda", generator=generator)
    return whole[:, :tokens, ::2].transpose(1, 2)


def by(monkeypatch, own, idle, *args, **options):
    """forward by the Hopper kernel or not, split over chunks as on a GPU with this many multiprocessors.

    With 1, decode steps are not split either, which are split on any GPU that has memory for it.
    """
    made = []

    def plan(*args):
        made.append(make(*args))
        return made[-1]

    make = kernels._plan
    with monkeypatch.context() as patch:
        patch.setattr(plans, "_plans", {})
        patch.setattr(kernels, "_plan", plan)
        patch.setattr(kernels, "multiprocessors_of", lambda index: idle)
        patch.setattr(kernels, "_max_scratch", lambda cache: 0 if idle == 1 else 2**28)
        if not own:
            patch.setattr(kernels, "_has_own_kernel", lambda *args: False)
        out, lse = kernels.forward(*args, **options)
    assert [plan.is_own for plan in made] == [own], "which kernel ran"
    return {"out": out, "lse": lse}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_hopper)])
def test_the_bits_are_those_of_the_triton_kernel(monkeypatch, device, dtype, dim, kind):
    spec = spec_of(kind, dim)
    for queries, keys in SIZES:
        q = surrounded((2, 4, queries, dim), dtype, queries)
        k, v = (surrounded((2, 2, keys, dim), dtype, keys + i) for i in (1, 2))
        for sinks in (None, torch.tensor([5.0, -1.0, float("-inf"), 30.0], device="cuda")):
            ours = by(monkeypatch, True, 1, q, k, v, spec, sinks=sinks)
            assert not any(value.isnan().any() for value in ours.values())
            for idle in (1, 10**6):
                theirs = by(monkeypatch, False, idle, q, k, v, spec, sinks=sinks)
                assert_same_bytes(theirs, ours, f"{queries} queries, {keys} keys, sinks {sinks}")


def masks(batch, heads, queries, keys):
    """One for each way to read it; biases with a row for each query hide all keys from the last five."""
    generator = torch.Generator("cuda").manual_seed(queries)
    values = torch.randn(batch, heads, queries, keys + 1, device="cuda", generator=generator) * 3
    values[..., -5:, :] = float("-inf")
    made = (
        values[:, :1, :, :keys].contiguous() < 1,
        values[..., 1:],
        values[:1, :, :, :keys].bfloat16(),
        values[:, :, :1, :keys].bfloat16(),
        values[:1, :1, :, :keys].mT.contiguous().mT < 1,
    )
    return dict(zip(MASKS, made, strict=True))


@pytest.mark.parametrize(
    "dim, kind, mask",
    [*((128, "full", mask) for mask in MASKS), (64, "all", "bool"), (96, "causal", "bf16"), (256, "causal", "bool")],
)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_hopper)])
def test_masks_too(monkeypatch, device, dim, kind, mask):
    for queries, keys in ((700, 300), (1200, 1200)):
        q = surrounded((2, 4, queries, dim), torch.bfloat16, queries)
        k, v = (surrounded((2, 2, keys, dim), torch.bfloat16, keys + i) for i in (1, 2))
        given = masks(2, 4, queries, keys)[mask].expand(2, 4, queries, keys)
        ours = by(monkeypatch, True, 1, q, k, v, spec_of(kind, dim), mask=given)
        assert not any(value.isnan().any() for value in ours.values())
        for idle in (1, 10**6):
            theirs = by(monkeypatch, False, idle, q, k, v, spec_of(kind, dim), mask=given)
            assert_same_bytes(theirs, ours, f"{queries} queries, {keys} keys")
    assert not torch.equal(by(monkeypatch, True, 1, q, k, v, spec_of(kind, dim))["out"], ours["out"]), "the control"


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_hopper)])
def test_packed_sequences_too(monkeypatch, device, kind):
    lengths_q, lengths_k = [100, 0, 700, 1, 65, 1300], [100, 30, 1000, 600, 1, 1300]
    packed = PackedLengths(
        *(torch.tensor([0, *lengths], device=device).cumsum(0).int() for lengths in (lengths_q, lengths_k)),
        max(lengths_q), max(lengths_k),
    )  # fmt: skip
    spec = spec_of(kind, 128)
    q = surrounded((1, 4, sum(lengths_q), 128), torch.bfloat16, 0)
    k, v = (surrounded((1, 2, sum(lengths_k), 128), torch.bfloat16, seed) for seed in (1, 2))
    ours = by(monkeypatch, True, 1, q, k, v, spec, packed)
    for idle in (1, 10**6):
        assert_same_bytes(by(monkeypatch, False, idle, q, k, v, spec, packed), ours, kind)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_hopper)])
def test_packed_sequences_that_have_dropped_keys_too(monkeypatch, device):
    """The control: other numbers of dropped keys."""
    lengths_q, lengths_k, dropped = [100, 0, 700, 1, 300], [356, 30, 956, 257, 300], [3, 0, 500, 129, 0]
    starts_q, starts_k = (torch.tensor([0, *x], device=device).cumsum(0).int() for x in (lengths_q, lengths_k))
    spec = AttentionSpec(True, 0.1, 257)
    q = surrounded((1, 4, sum(lengths_q), 128), torch.bfloat16, 0)
    k, v = (surrounded((1, 2, sum(lengths_k), 128), torch.bfloat16, seed) for seed in (1, 2))
    made = []
    for numbers in (dropped, [0] * len(dropped)):
        of_k = torch.stack([starts_k, torch.tensor([*numbers, 0], device=device).int()], 1)
        packed = PackedLengths(starts_q, of_k, max(lengths_q), max(lengths_k) + 511)
        made.append(by(monkeypatch, True, 1, q, k, v, spec, packed))
        assert not any(value.isnan().any() for value in made[-1].values())
        for idle in (1, 10**6):
            assert_same_bytes(by(monkeypatch, False, idle, q, k, v, spec, packed), made[-1], f"{numbers}")
    assert not torch.equal(made[0]["out"], made[1]["out"])


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_hopper)])
def test_other_blocks_of_keys_give_other_bits(monkeypatch, device):
    """The control: if the two kernels' tiles differed, the bits would differ."""
    q, k, v = (surrounded((1, 4, 1000, 128), torch.bfloat16, seed) for seed in range(3))
    ours = by(monkeypatch, True, 1, q, k, v, spec_of("causal", 128))
    monkeypatch.setattr(kernels, "forward_tile", lambda *args: Tile(64, 64, 4, 2))
    theirs = by(monkeypatch, False, 1, q, k, v, spec_of("causal", 128))
    assert not torch.equal(ours["out"], theirs["out"])
    torch.testing.assert_close(ours["out"], theirs["out"], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_hopper)])
def test_all_backward_tiles_give_the_same_bits(monkeypatch, device, kind):
    data = tensors(device, torch.bfloat16, 1, 4, 2, 1300, 1500, 128)
    choose = attention_backward.backward_key_tiles
    one, other, apart = (
        choose(dim, BF16, causal=True, aligned=aligned, room=True)
        for dim, aligned in ((128, True), (128, False), (256, True))
    )
    assert one != other and len(apart) == 2
    results = []
    for tiles in (one, other, apart):
        monkeypatch.setattr(plans, "_plans", {})
        monkeypatch.setattr(attention_backward, "backward_key_tiles", lambda *args, tiles=tiles, **options: tiles)
        results.append(attend(*data, **KINDS[kind]))
    for result in results[1:]:
        assert_same_bytes(results[0], result, kind)


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from tp_invariant.kernels.attention.hopper import forward_kernel, own_tile
from tp_invariant.kernels.attention.tiles import forward_tile

for dim in (64, 128, 256):
    # test_compile_kernels.py compiles it with some of them, for heads of 96, and with a bool mask
    for flags in ((*[False] * 5, 0, 0), (*[True] * 5, 2, 8)):
        tile, buffers, registers = own_tile(forward_tile(dim, torch.bfloat16), dim, flags[-1] > 0)
        names = forward_kernel.arg_names
        values = (dim, dim, tile.queries, tile.keys, *buffers, 512, 8, *flags)
        constants = dict(zip(names[-len(values):], values))
        layout = gl.NVMMASharedLayout.get_default_for([tile.keys, dim], gl.bfloat16)
        types = {"q_ptr": "*bf16", "out_ptr": "*bf16", "lse_ptr": "*fp32", "factor": "fp32", "inverse_cap": "fp32"}
        types |= dict.fromkeys(("k_desc", "v_desc"), f"tensordesc<bf16[{tile.keys}, {dim}],{layout!r}>")
        types |= dict.fromkeys(("cu_q_ptr", "cu_k_ptr"), "*i32") | dict.fromkeys(constants, "constexpr")
        types |= {"sinks_ptr": "*fp32", "matrix_ptr": "*bf16"}
        source = GluonASTSource(
            forward_kernel, {name: types.get(name, "i32") for name in names},
            {(names.index(name),): value for name, value in constants.items()},
            {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types.get(name, "").startswith("*")},
        )
        options = dict(num_warps=tile.warps, enable_fp_fusion=False, maxnreg=registers)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        print("shared", dim, tile.queries, compiled.metadata.shared)
"""


def test_it_compiles_and_leaves_room_for_128_queries():
    """For Hopper, on any machine, as Triton has the assembler. A multiprocessor has 228 KiB, a program reserves 1."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # an eighth of the compiler's time
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = [line.split() for line in done.stdout.splitlines() if line.startswith("shared")]
    assert len(sizes) == 6
    for _, dim, queries, size in sizes:
        assert (128 // int(queries)) * (int(size) + 1024) <= 228 * 1024, f"heads of {dim}"
