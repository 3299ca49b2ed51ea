"""What the library claims, and whether it holds on this machine: short checks that really run."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import resolve_group
from ..consistency.environment import installed
from ..core import amx
from ..core.bits import assert_bitwise_equal
from ..core.layout import TokenSharding
from ..core.mode import is_call_check_enabled, is_tp_invariant_mode_enabled, set_tp_invariant_mode
from ..functional.attention_choice import safe_attention
from ..functional.cross_entropy import vocab_parallel_cross_entropy
from ..functional.norm import Norm, NormCall
from ..gemm.gemm_fn import BUNDLED_DTYPES, bundled_gemm_fn
from ..kernels.dtypes import HALF_DTYPES
from ..testing.checks import assert_slice_invariant, wide_randn
from . import doctor_facts, fingerprint

HOLDS, FAILS, UNCHECKED = "holds", "does not hold here", "not checked"

TESTED_TORCH = (2, 11), (2, 13)
TESTED_TRITON = (3, 6), (3, 7)
_NO_GPU = "no GPU: GPU claims are not checked; run this on a machine with one"


@dataclass(frozen=True)
class Claim:
    """`next_step` says what to do if it does not hold, or how to check it."""

    claim: str
    status: str
    detail: str
    next_step: str = ""


def _tried(claim: str, check: Callable[[], str], next_step: str) -> Claim:
    """HOLDS with the text that check() returns, or FAILS with its error, so that other claims are still checked."""
    try:
        return Claim(claim, HOLDS, check())
    except Exception as error:
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        return Claim(claim, FAILS, f"{kind}{error}", next_step)


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def version_claim(package: str, found: str | None, tested: tuple[tuple[int, int], tuple[int, int]]) -> Claim:
    """Whether a version is one of the tested ones."""
    claim = f"{package} is a version that was tested"
    low, high = (".".join(map(str, bound)) for bound in tested)
    if found is None:
        return Claim(claim, FAILS, "not installed", f"pip install {package}")
    if _release(found) < tested[0]:
        return Claim(claim, FAILS, f"{found} is older than tested, {low} to {high}", f"pip install '{package}>={low}'")
    if _release(found) > tested[1]:
        detail = f"{found} is newer than tested, {low} to {high}"
        return Claim(claim, UNCHECKED, detail, "tp-invariant verify shows whether the contract holds")
    return Claim(claim, HOLDS, f"{found}; tested are {low} to {high}")


# --- the checks -----------------------------------------------------------------------------------------------------


def _gate() -> str:
    checked = "every call is compared" if is_call_check_enabled() else "first calls are compared"
    return f"the mode is {'on' if is_tp_invariant_mode_enabled() else 'off'}; {checked} between ranks"


def products_claim() -> Claim:
    """Whether torch's own 16-bit products run here. They may not if the CPU lists AMX units: see core/amx.py."""
    claim = "CPU: torch's own 16-bit products run"
    finding, chosen = amx.find(), amx.chosen()
    if not finding.units:
        return Claim(claim, HOLDS, "this CPU lists no AMX units, which some virtual machines list and trap")
    if chosen is not None:  # set by the user, or by this process after it found that this helps
        died = None if finding.helps else amx.probe(os.environ)
        detail = f"{finding.listed}; {chosen} is set, and " + ("they ran" if died is None else str(died))
        wanted = f"{amx.EXPORT} instead"
    else:
        died = finding.died
        detail = f"{finding.listed}, and " + ("they ran" if died is None else str(died))
        wanted = f"{amx.EXPORT} before Python starts"
    if died is None:
        return Claim(claim, HOLDS, detail)
    if finding.helps is False:
        wanted = f"none is known: {amx.VARIABLE}={amx.VALUE} does not help; this library needs no such product"
    return Claim(claim, FAILS, detail, wanted)


def _gemm(device: str) -> str:
    assert_slice_invariant(bundled_gemm_fn(torch.device(device)), shapes=((33, 65, 300),), device=device)
    return f"slices, strides and repeats of a product in {len(BUNDLED_DTYPES)} dtypes, against float64 too"


def _blas() -> str:
    """Products of one tile and of several, in every layout; the reference compares each tile shape with the chain."""
    from ..kernels.gemm.reference import chained_matmul, matmul

    generator = torch.Generator().manual_seed(0)
    a, b = wide_randn(70, 300, generator=generator), wide_randn(300, 600, generator=generator)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for left in (a, a.t().contiguous().t()):
            for right in (b, b.t().contiguous().t()):
                assert_bitwise_equal(matmul(left, right), chained_matmul(left, right), "product")
    said = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
    if said:
        raise AssertionError(said[0])
    return "BLAS calls give the bits of the elementwise chain"


def _attention(device: str) -> str:
    """Heads in slices against all of them, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    dtypes = BUNDLED_DTYPES if device == "cuda" else (torch.float32, torch.bfloat16)
    for dtype in dtypes:
        heads = (8, 4, 4, 8)  # of q, k, v, dout
        data = [torch.randn(1, h, 33, 64, generator=generator).to(device, dtype) for h in heads]

        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            q, k, v = (t.clone().requires_grad_() for t in tensors[:3])
            y = safe_attention(q, k, v, is_causal=True, enable_gqa=True)
            return [y.detach(), *torch.autograd.grad(y, (q, k, v), tensors[3])]

        whole = run(data)
        for parts in (2, 4):
            for index in range(parts):
                part = run([t.chunk(parts, 1)[index].contiguous() for t in data])
                for name, got, full in zip(("out", "dq", "dk", "dv"), part, whole, strict=True):
                    assert_bitwise_equal(got, full.chunk(parts, 1)[index], f"{name} of {dtype} heads, part {index}")
    return f"halves and quarters of 8 heads, forward and backward, {len(dtypes)} dtypes"


def _norms(device: str) -> str:
    """Rows in slices against all of them."""
    generator = torch.Generator().manual_seed(0)
    for rms in (False, True):
        call = NormCall(resolve_group(None), TokenSharding(1, 0), 1e-5, rms, False)
        for dtype in BUNDLED_DTYPES:
            x = wide_randn(24, 257, generator=generator, spread=2).to(device, dtype)
            weight = wide_randn(257, generator=generator, spread=2).to(device, dtype)
            whole = Norm.apply(x, weight, None if rms else weight, call)
            for rows in (slice(0, 1), slice(1, 9), slice(9, 24)):
                part = Norm.apply(x[rows], weight, None if rms else weight, call)
                assert_bitwise_equal(part, whole[rows], f"{'RMSNorm' if rms else 'LayerNorm'} of rows {rows}, {dtype}")
    return "LayerNorm and RMSNorm of slices of rows"


def _losses(device: str) -> str:
    """Tokens in slices against all of them, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(257, (24,), generator=generator).to(device)
    for dtype in BUNDLED_DTYPES:
        logits = wide_randn(24, 257, generator=generator, spread=2).to(device, dtype)

        def run(rows: slice, logits: Tensor = logits) -> tuple[Tensor, ...]:
            own = logits[rows].clone().requires_grad_()
            with set_tp_invariant_mode(True):
                loss = vocab_parallel_cross_entropy(own, target[rows], tp_group=None, reduction="none")
            return loss.detach(), *torch.autograd.grad(loss.sum(), own)

        whole = run(slice(0, 24))
        for rows in (slice(0, 1), slice(1, 9), slice(9, 24)):
            assert_bitwise_equal(run(rows), tuple(t[rows] for t in whole), f"loss of tokens {rows}, {dtype}")
    return f"cross-entropy of slices of tokens, forward and backward, {len(BUNDLED_DTYPES)} dtypes"


def _tensor_core() -> str:
    """The GPU's 16-bit GEMM lines of the fingerprint against the model's."""
    gpu = list(fingerprint.gemm_lines(bundled_gemm_fn(torch.device("cuda")), HALF_DTYPES, "cuda"))
    model = fingerprint.tensor_core_fingerprint()
    if differ := [line.key for line, other in zip(gpu, model, strict=True) if line.digest != other.digest]:
        raise AssertionError(f"{len(differ)} of {len(gpu)} products have other bits, the first {differ[0]}")
    return f"all {len(gpu)} products of the fingerprint"


# --- the table ------------------------------------------------------------------------------------------------------


def claims(facts: dict[str, Any]) -> list[Claim]:
    """Runs the checks and returns every claim; `facts` come from doctor.collect."""
    versions, gpus = facts["versions"], doctor_facts.gpu_count()
    broken = "this is a bug or a broken installation: please report it with the output of tp-invariant doctor --json"
    found = [
        version_claim("torch", versions["torch"], TESTED_TORCH),
        _triton(versions["triton"], gpus),
        _tried("the gate's variables are understood", _gate, "set them to 1 or 0, or unset them"),
        products_claim(),
        _tried("CPU: the bundled GEMM is slice-invariant", lambda: _gemm("cpu"), broken),
        _tried(
            "CPU: the GEMM's fast form adds in the order of its definition",
            _blas,
            "the bits are still right, from a slower form; another build of torch may have a faster BLAS",
        ),
        _tried("CPU: norms of rows do not depend on other rows", lambda: _norms("cpu"), broken),
        _tried("CPU: a token's loss does not depend on other tokens", lambda: _losses("cpu"), broken),
        _tried("CPU: a head's attention does not depend on other heads", lambda: _attention("cpu"), broken),
        *_gpu_claims(facts, gpus, broken),
        _degrees(gpus),
        _optional("safetensors", "checkpoints can be written and read"),
        _optional("transformers", "Hugging Face models can be parallelized", at_least=(5, 0)),
    ]
    return found


def _triton(found: str | None, gpus: int) -> Claim:
    claim = version_claim("triton", found, TESTED_TRITON)
    if found is None:
        unneeded = Claim(claim.claim, UNCHECKED, "not installed, and not needed without a GPU", "pip install triton")
        return claim if gpus else unneeded
    try:
        import_module("triton")
    except Exception as error:
        return Claim(claim.claim, FAILS, f"it cannot be imported: {error}", "pip install --force-reinstall triton")
    return claim


def _gpu_claims(facts: dict[str, Any], gpus: int, broken: str) -> list[Claim]:
    names = (
        "GPU: the bundled GEMM is slice-invariant",
        "GPU: norms of rows do not depend on other rows",
        "GPU: a token's loss does not depend on other tokens",
        "GPU: a head's attention does not depend on other heads",
        "GPU: 16-bit GEMMs have the bits of the tensor core's model",
        "GPU: the GEMM's tiles were measured on this chip, near cuBLAS's speed",
        "GPUs reach each other directly",
    )
    if not gpus:
        return [Claim(name, UNCHECKED, "torch sees no GPU", _NO_GPU) for name in names]
    invariant, norms, losses, attention, model, speed, peers = names
    found = [
        _tried(invariant, lambda: _gemm("cuda"), broken),
        _tried(norms, lambda: _norms("cuda"), broken),
        _tried(losses, lambda: _losses("cuda"), broken),
        _tried(attention, lambda: _attention("cuda"), broken),
    ]
    name, hopper = torch.cuda.get_device_name(), torch.cuda.get_device_capability() == (9, 0)
    if hopper:
        found.append(_tried(model, _tensor_core, broken))
    else:
        found.append(Claim(model, UNCHECKED, f"{name} is not Hopper, as the model is", "same contract, other bits"))
    if facts["gemm"]["tiles measured here"]:
        found.append(Claim(speed, HOLDS, f"{facts['gemm']['kernel']}, its table measured on this kind of chip"))
    else:
        kernel = "the table is of another chip" if hopper else "GPU is not Hopper: the generic kernel is used"
        found.append(
            Claim(speed, UNCHECKED, f"{kernel}, same contract, speed not measured", "python benchmarks/bench_gemm.py")
        )
    pairs = facts["links"]["pairs"]
    if not pairs:
        found.append(Claim(peers, UNCHECKED, "one GPU", "run this on a machine with several"))
    elif apart := [pair["pair"] for pair in pairs if not pair["peer access"]]:
        found.append(
            Claim(peers, FAILS, f"no peer access: {', '.join(apart)}", "bits are the same; moving them is slow here")
        )
    else:
        found.append(Claim(peers, HOLDS, f"{len(pairs)} pairs: {', '.join(sorted({p['link'] for p in pairs}))}"))
    return found


def _degrees(gpus: int) -> Claim:
    device = "cuda" if gpus > 1 else "cpu"
    claim = "outputs, gradients and training steps are the same bytes at every TP degree"
    return Claim(claim, UNCHECKED, "takes minutes", f"tp-invariant verify --device {device}")


def _optional(package: str, claim: str, at_least: tuple[int, int] = (0, 0)) -> Claim:
    found = installed(package)
    if found is None:
        return Claim(claim, UNCHECKED, f"{package} is not installed", f"if you need it: pip install {package}")
    if _release(found) < at_least:
        low = ".".join(map(str, at_least))
        return Claim(claim, FAILS, f"{package} {found} is older than tested", f"pip install '{package}>={low}'")
    return Claim(claim, HOLDS, f"{package} {found}")
