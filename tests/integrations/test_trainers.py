"""transformers' Trainer, accelerate and Lightning with this library's models: the bits of one process, and its numbers.

The same runs by each tool. What is of one of them alone: test_trainer.py, test_accelerate.py, test_lightning.py.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import more
from trainer_runs import SAVED, TOOLS, run_case, same

from tp_invariant import testing
from tp_invariant.diagnostics.diff import compare, read_log
from tp_invariant.testing import assert_bitwise_equal

DEGREES = ((2, 1, "group"), (4, 2, "mesh"))  # ranks, of which data parallel, shards


def checkpoint_of(tool: str, folder: Path, step: int) -> Any:
    """What a checkpoint holds, without times and versions."""
    if tool == "accelerate":
        return None  # this library's own, by which runs go on
    if tool == "lightning":
        whole = torch.load(folder / f"step={step}.ckpt", weights_only=False)
        return {key: whole[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")}
    files = [folder / f"checkpoint-{step}" / name for name in ("model.safetensors", "config.json")]
    return [file.read_bytes() for file in files if file.exists()] + [
        file.read_bytes() for file in (folder / f"checkpoint-{step}").glob("adapter_model.safetensors")
    ]


def pairs(names: Any, kept: set[tuple[str, str]]) -> list[Any]:
    """Each name with each tool; without --all-cases those that are kept."""
    every = itertools.product(names, TOOLS)
    return [pytest.param(*pair, marks=[] if pair in kept else pytest.mark.more, id=" ".join(pair)) for pair in every]


KEPT = {*itertools.product(["rows"], TOOLS), ("stream", "lightning"), ("stream of known length", "trainer")}


@pytest.mark.parametrize(("evaluated", "tool"), pairs(("rows", "stream", "stream of known length"), KEPT))
def test_bits_and_every_number_that_is_reported(tool, evaluated, tmp_path):
    """At every dp x tp, of an epoch's short last step and evaluations with a short last batch. The mode off is the
    control of the bits, the stock tool on one process that of the values."""
    options: dict[str, Any] = {"evaluated": evaluated}
    (one,) = run_case(1, tool, tmp_path / "one", shards="group", **options)
    degrees = DEGREES if evaluated == "rows" else DEGREES[1:]
    for ranks, dp, shards in degrees:
        folder = tmp_path / f"{ranks} {dp} {shards}"
        for got in run_case(ranks, tool, folder, dp=dp, shards=shards, **options):
            assert_bitwise_equal(got, one)
        assert_bitwise_equal(
            [checkpoint_of(tool, folder, step) for step in (SAVED, 6)],
            [checkpoint_of(tool, tmp_path / "one", step) for step in (SAVED, 6)],
        )
        if tool == "trainer":
            text, alike = compare(*(read_log(str(each / "digests.log")) for each in (tmp_path / "one", folder)))
            assert alike and text.endswith("identical for 6 steps, 0 to 5"), text
    (theirs,) = run_case(1, tool, tmp_path / "theirs", library=False, **options)
    same(one, theirs)
    if evaluated == "rows":
        (exact,) = run_case(1, tool, tmp_path / "exact", library=False, dtype=torch.float64, **options)
        for column in (0, 1):
            ours, single = (
                max(abs(a[column] / b[column] - 1) for a, b in zip(x["steps"], exact["steps"], strict=True))
                for x in (one, theirs)
            )
            assert ours <= max(4 * single, 1e-5), (ours, single)
        assert one["steps"][-1][0] < one["steps"][0][0], "it trains"
        off = [
            run_case(ranks, tool, tmp_path / f"off {ranks}", shards="group", mode=False, steps=2)[0] for ranks in (1, 2)
        ]
        assert testing.digest(off[0]["parameters"]) != testing.digest(off[1]["parameters"]), "the control"


VARIANTS: dict[str, tuple[dict[str, Any], tuple[tuple[int, int, str], ...]]] = {
    "autocast and a worker": ({"autocast": True, "workers": 1, "steps": 4}, ((4, 2, "group"),)),
    "fully_shard": ({"rows": 16, "batch": 1, "steps": 4}, ((4, 2, "fully"),)),
    "fully_shard alone": ({"rows": 16, "batch": 1, "steps": 4}, ((4, 4, "fully"),)),
    "what is drawn": ({"rows": 16, "batch": 1, "draws": True, "steps": 4}, ((2, 2, "group"), (2, 2, "fully"))),
    "experts": ({"rows": 16, "batch": 1, "experts": True, "steps": 4}, ((4, 2, "fully"), (2, 2, "group"))),
    "adapters and autocast": (
        {"rows": 16, "batch": 1, "lora": True, "autocast": True, "steps": 4},
        ((4, 2, "mesh"), (2, 2, "fully")),
    ),
}


KEPT_VARIANTS = {
    ("autocast and a worker", "accelerate"), ("fully_shard", "trainer"), ("what is drawn", "lightning"),
    ("experts", "accelerate"), ("adapters and autocast", "trainer"),
}  # fmt: skip


@pytest.mark.parametrize(("variant", "tool"), pairs(VARIANTS, KEPT_VARIANTS))
def test_variants(tool, variant, tmp_path):
    options, degrees = VARIANTS[variant]
    if options.get("lora"):
        pytest.importorskip("peft", reason="the extra tp-invariant[peft] is not installed")
    (one,) = run_case(1, tool, tmp_path / "one", shards="group", **options)
    assert len(one["steps"]) >= 2
    for ranks, dp, shards in degrees:
        folder = tmp_path / f"{ranks} {dp} {shards}"
        for got in run_case(ranks, tool, folder, dp=dp, shards=shards, **options):
            assert_bitwise_equal(got, one)
        assert_bitwise_equal(checkpoint_of(tool, folder, 4), checkpoint_of(tool, tmp_path / "one", 4))
    if variant in ("autocast and a worker", "what is drawn"):
        plain = run_case(1, tool, tmp_path / "plain", shards="group", **options | {"draws": False, "autocast": False})
        assert testing.digest(plain[0]["parameters"]) != testing.digest(one["parameters"]), "it has an effect"


@pytest.mark.parametrize("tool", ["trainer", more("accelerate"), more("lightning")])
def test_a_run_goes_on_at_another_degree(tool, tmp_path, pytestconfig):
    """From inside of the second epoch: from one process and from fully_shard, to 2 x 2 and TP=2; with --all-cases from
    2 x 2 to fully_shard, too."""
    pytest.importorskip("transformers", minversion="5.17", reason="the Trainer refuses older versions")
    options: dict[str, Any] = {"rows": 12, "batch": 1}
    kinds = {"one": (1, 1, "group"), "four": (4, 2, "group"), "fully": (2, 2, "fully"), "two": (2, 1, "mesh")}
    legs = [("one", "four"), ("fully", "two")]
    if pytestconfig.getoption("--all-cases"):
        legs.append(("four", "fully"))
    whole = {
        name: run_case(kinds[name][0], tool, tmp_path / name, dp=kinds[name][1], shards=kinds[name][2], **options)[0]
        for name in {first: None for first, _ in legs}
    }
    (rest,) = run_case(1, tool, tmp_path / "rest", shards="group", resume=str(tmp_path / "one"), **options)
    if tool != "lightning":  # with which batches its runs go on is up to Lightning
        assert rest["steps"] == whole["one"]["steps"][-len(rest["steps"]) :]
        assert_bitwise_equal(rest["parameters"], whole["one"]["parameters"])
    for first, then in legs:
        ranks, dp, shards = kinds[then]
        resumed = dict(dp=dp, shards=shards, resume=str(tmp_path / first))
        for got in run_case(ranks, tool, tmp_path / f"{first} {then}", **resumed, **options):
            assert got["steps"] == rest["steps"]
            assert_bitwise_equal(got["parameters"], rest["parameters"])
