"""The fingerprint: the same lines in every run and for any number of threads, and other lines if any bit differs."""

import zlib

import pytest
import torch
from gpus import gpu

from tp_invariant.diagnostics import fingerprint as fingerprint_module
from tp_invariant.diagnostics.cli import main
from tp_invariant.diagnostics.fingerprint import fingerprint, hashed, hashed_floats, tensor_core_fingerprint
from tp_invariant.kernels.gemm import tensor_core

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SMALL_GEMMS, SMALL_ROWS = ((7, 9, 100), (3, 5, 257)), ((5, 70),)


@pytest.fixture
def small(monkeypatch):
    """Fewer and smaller shapes, for tests in which the size does not matter."""
    monkeypatch.setattr(fingerprint_module, "GEMM_SHAPES", SMALL_GEMMS)
    monkeypatch.setattr(fingerprint_module, "ROW_SHAPES", SMALL_ROWS)
    monkeypatch.setattr(fingerprint_module, "ATTENTION_SHAPES", ((7, 16),))


# --- inputs ---------------------------------------------------------------------------------------------------------


def hash_of(name_hash, index):
    """`hashed` for one index, in Python integers."""
    x = (index * 0x1E3779B9 + name_hash) & 0xFFFFFFFF
    x = ((x ^ x >> 16) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ x >> 15) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ x >> 15


def test_hashes_are_those_of_exact_integers():
    want = [hash_of(zlib.crc32(b"x"), i) for i in range(5000)]
    assert hashed("x", 5000).tolist() == want
    assert len(set(want)) == 5000
    assert hashed("x", 10).tolist() != hashed("y", 10).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_floats_cover_their_exponents_evenly(dtype):
    x = hashed_floats("x", (100, 256), dtype, (-4, 4)).double()
    assert x.dtype == torch.float64 and x.shape == (100, 256)
    mantissa, exponent = torch.frexp(x.abs())
    assert exponent.unique().tolist() == list(range(-3, 5))  # frexp's are one higher
    assert torch.bincount(exponent.flatten() + 3).min() > 0.1 * x.numel()
    assert 0.48 < (x < 0).double().mean() < 0.52
    assert 0.74 < mantissa.mean() < 0.76  # even over [0.5, 1)


# --- lines ----------------------------------------------------------------------------------------------------------


def test_the_same_twice_and_for_any_number_of_threads(monkeypatch):
    monkeypatch.setattr(
        fingerprint_module, "GEMM_SHAPES", ((160, 256, 100),)
    )  # large enough that torch splits them over threads
    monkeypatch.setattr(fingerprint_module, "ROW_SHAPES", ((96, 1000),))
    monkeypatch.setattr(fingerprint_module, "ATTENTION_SHAPES", ((150, 64),))
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append([*fingerprint("cpu"), *tensor_core_fingerprint()])
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]


def test_every_result_is_finite(monkeypatch):
    """A NaN would hide the values that led to it."""
    seen = []

    def checking(value):
        assert value.isfinite().all() and (value != 0).any()
        seen.append(value)
        return "0" * 64

    monkeypatch.setattr(fingerprint_module, "digest", checking)
    assert len(fingerprint("cpu")) == len(seen)


def test_one_bit_of_the_input_changes_every_line(small, monkeypatch):
    before = fingerprint("cpu")
    original = fingerprint_module.hashed_floats

    def flipped(name, shape, dtype, exponents):
        x = original(name, shape, dtype, exponents)
        if name.split(" ")[-1] in ("x", "w", "xt", "dy", "logits", "dout", "v"):
            bits = x.view(torch.int32 if dtype == torch.float32 else torch.int16).view(-1)
            bits[x.float().abs().argmax()] ^= torch.iinfo(bits.dtype).min  # the sign of the largest
        return x

    monkeypatch.setattr(fingerprint_module, "hashed_floats", flipped)
    after = fingerprint("cpu")
    assert [line.key for line in after] == [line.key for line in before]
    assert [a.key for a, b in zip(after, before, strict=True) if a.digest == b.digest] == []


def test_the_model_has_lines_of_its_own(small):
    """Only those of 16-bit GEMMs; no fp32 line has the CPU kernels' bits, so a comparison with them can fail."""
    model, cpu = tensor_core_fingerprint(), {line.key: line.digest for line in fingerprint("cpu")}
    keys = [line.key for line in model]
    assert keys == [key for key in cpu if key.startswith("gemm") and key.split(" ")[1] in ("bfloat16", "float16")]
    in_fp32 = [line for line in model if line.name == "gemm.wgrad.float32"]
    assert in_fp32 and all(line.digest != cpu[line.key] for line in in_fp32)


# --- the command ----------------------------------------------------------------------------------------------------


def test_compare(small, capsys, tmp_path):
    path = tmp_path / "f.txt"
    assert main(["fingerprint", "--model", "tensor-core", "--output", str(path)]) == 0
    assert "# the CPU model of Hopper's tensor core" in path.read_text()
    assert main(["fingerprint", "--model", "tensor-core", "--compare", str(path)]) == 0
    assert capsys.readouterr().out.startswith("20 of 20 results are the same bits as in ")
    assert main(["fingerprint", "--device", "cpu", "--compare", str(path)]) == 1
    out = capsys.readouterr().out
    assert "differs: gemm.wgrad.float32 bfloat16 7x9x100: " in out
    assert out.splitlines()[-1].endswith(
        "; 0 are only here and 0 only there; 74 that the model does not predict are left out"
    )


def test_a_line_that_one_side_lacks_is_a_difference(small, capsys, monkeypatch, tmp_path):
    """A result that was not compared is not equal; only results that the model does not compute may be missing."""
    computed = fingerprint("cpu")
    monkeypatch.setattr(fingerprint_module, "fingerprint", lambda device: computed)
    whole, cut = tmp_path / "whole.txt", tmp_path / "cut.txt"
    assert main(["fingerprint", "--device", "cpu", "--output", str(whole)]) == 0
    assert main(["fingerprint", "--device", "cpu", "--compare", str(whole)]) == 0
    assert capsys.readouterr().out.endswith("; 0 are only here and 0 only there\n")
    text = whole.read_text().splitlines()
    head, lines = text[:4], text[4:]
    here, there = [line for line in lines if "log_softmax" not in line], [*lines, f"new.kernel float32 5x70 {'0' * 64}"]
    digest = lines[0][-64:]
    late = digest[:-1] + ("0" if digest[-1] != "0" else "1")  # what is shown tells them apart
    cut.write_text("\n".join([lines[0][:-64] + late, *lines[1:]]))
    assert main(["fingerprint", "--device", "cpu", "--compare", str(cut)]) == 1
    assert f": {digest} here, {late} in " in capsys.readouterr().out
    for text, named, last in ((here, "only here: log_softmax", "3 are only here"), (there, "only in ", "1 only there")):
        cut.write_text("\n".join(text))
        assert main(["fingerprint", "--device", "cpu", "--compare", str(cut)]) == 1
        out = capsys.readouterr().out
        assert "differs" not in out and named in out and last in out
    predicted = [line for line in lines if fingerprint_module.is_predicted(line.rpartition(" ")[0])]
    model = [*head[:3], f"# {fingerprint_module._MODEL}", *predicted]
    for text, status in ((model, 0), (model[4:], 1), (model[:-1], 1)):  # whole; not said to be a model's; cut off
        cut.write_text("\n".join(text))
        assert main(["fingerprint", "--device", "cpu", "--compare", str(cut)]) == status
    cut.write_text("\n".join([f"# {fingerprint_module._MODEL}", *(line for line in lines if line not in predicted)]))
    capsys.readouterr()
    assert main(["fingerprint", "--device", "cpu", "--compare", str(cut)]) == 1
    out = capsys.readouterr().out
    assert "nothing was compared: no result is both here and in " in out and "0 of 0" not in out


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "holds no line of a fingerprint, so there is nothing to compare with"),
        ("x" * 30_000_000, f"line 1: '{'x' * 80}' (30,000,000 characters) is not a line of a fingerprint"),
        (f"gemm float32 1x2 {'g' * 64}", "line 1: 'gemm float32 1x2 ggg"),
    ],
    ids=["empty", "long", "no digits"],
)
def test_files_that_are_not_a_fingerprint_give_one_short_error(capsys, tmp_path, text, error):
    (tmp_path / "f.txt").write_text(text)
    with pytest.raises(SystemExit) as caught:
        main(["fingerprint", "--device", "cpu", "--compare", str(tmp_path / "f.txt")])
    said = capsys.readouterr().err
    assert caught.value.code == 2 and error in said and len(said) < 1500


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "cuda", "--model", "tensor-core"], "--model runs on the CPU: leave --device out"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--model", "volta"], "invalid choice: 'volta'"),
        (["--compare", "no-such-file"], "No such file or directory: 'no-such-file'"),
        (["--compare", __file__], 'line 1: \'"""The fingerprint: '),
        (["--model", "tensor-core", "--output", "no-such-folder/file"], "No such file or directory"),
    ],
)
def test_usage_errors(small, capsys, arguments, text):
    with pytest.raises(SystemExit) as caught:
        main(["fingerprint", *arguments])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


# --- a GPU ----------------------------------------------------------------------------------------------------------


@gpu
def test_a_gpu_the_same_twice():
    assert fingerprint("cuda") == fingerprint("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("dtype", tensor_core.DTYPES, ids=str)
def test_a_gpu_has_the_models_bits(dtype):
    gpu = {line.key: line.digest for line in fingerprint("cuda")}
    predicted = [line for line in tensor_core_fingerprint() if line.dtype == dtype]
    assert len(predicted) == 15
    assert [line.key for line in predicted if line.digest != gpu[line.key]] == []
