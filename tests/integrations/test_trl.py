"""TRL's SFTTrainer and DPOTrainer with this library's Trainer before them in the class: the bits of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import hf_models
import pytest
import torch
import transformers
from accelerate import state as accelerate_state
from cases import more
from meshes import init_device_mesh, mesh_or_group, shard_fully
from ranks import run_ranks

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.testing import assert_bitwise_equal

pytest.importorskip("trl", reason="the extra tp-invariant[trl] is not installed")


def examples(kind: str, count: int = 16) -> Any:
    """Of lengths that differ."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, hf_models.VOCABULARY, (6 + i % 7,), generator=generator).tolist() for i in range(count)]
    if kind == "sft":
        columns: dict[str, Any] = {"input_ids": rows}
    else:
        texts = [[" ".join(map(str, part)) for part in (row[:3], row[3:], row[:2:-1])] for row in rows]
        columns = dict(zip(("prompt", "chosen", "rejected"), map(list, zip(*texts, strict=True)), strict=True))
        columns["prompt"] = [f"{text} " for text in columns["prompt"]]
    return Dataset(InMemoryTable.from_pydict(columns), fingerprint=kind)


def classes(kind: str, library: bool) -> tuple[type, type]:
    import trl

    base, config = (trl.SFTTrainer, trl.SFTConfig) if kind == "sft" else (trl.DPOTrainer, trl.DPOConfig)
    if not library:
        return base, config
    from tp_invariant.integrations.trainer import Trainer

    return type("Ours", (Trainer, base), {}), config


def trained(
    tp_group: Any,
    kind: str,
    folder: Path,
    dp: int = 1,
    shards: str = "mesh",
    fully_sharded: bool = False,
    mode: bool = True,
    library: bool = True,
    dtype: torch.dtype = torch.float32,
    resume: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Everything that is logged but times, and the parameters in the end."""
    seen: list[dict[str, float]] = []

    class Record(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
            seen.append({k: v for k, v in logs.items() if "runtime" not in k and "per_second" not in k})

    tp, groups = mesh_or_group(tp_group, shards), {}
    if dp > 1:
        mesh = init_device_mesh("cpu", (dp, tp_group.size() // dp), mesh_dim_names=("dp", "tp"))
        tp, groups = mesh["tp"], {"dp_group": mesh["dp"]}

    def build() -> Any:
        model = hf_models.build("llama", dtype, num_hidden_layers=1)
        return tpi.parallelize(model, tp) if library else model

    trainer_class, config = classes(kind, library)
    model = build()
    if fully_sharded:
        shard_fully(model, mesh["dp"])
    given: dict[str, Any] = dict(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-2, max_grad_norm=1.0, logging_steps=1, save_strategy="steps", save_steps=3, report_to="none",
        disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, bf16=False, max_length=16, optim="adamw_torch",
        eval_strategy="steps", eval_steps=3,
    )  # fmt: skip
    reference = {"ref_model": build()} if kind == "dpo" else {}
    try:
        with mock.patch.dict(os.environ, CI="1"), tpi.set_tp_invariant_mode(mode):  # CI: TRL reports no use of it
            trainer = trainer_class(
                model, args=config(**{**given, **options}), train_dataset=examples(kind), callbacks=[Record()],
                eval_dataset=examples(kind, 3), processing_class=hf_models.tokenizer(), **groups, **reference,
            )  # fmt: skip
            trainer.train(resume_from_checkpoint=resume)
            parameters = testing.full_parameters(trainer.model) if library else {}
        return {"logs": seen, "parameters": parameters}
    finally:
        accelerate_state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate_state.GradientState._reset_state()


def with_options(tp_group: Any, kind: str, folder: Any, options: dict[str, Any]) -> Any:
    return trained(tp_group, kind, folder, **options)


def run_on(degree: int, kind: str, folder: Any, **options: Any) -> list[Any]:
    return run_ranks(with_options, degree, kind, folder, options)


@pytest.mark.parametrize("kind", ["sft", more("dpo")])
def test_six_steps_have_the_bits_of_one_process(kind, tmp_path):
    """At TP=2, with two data parallel ranks, and by fully_shard; a run that goes on; TRL's own values; the mode off.

    Four steps are an epoch: the run goes on in the middle of the first, and ends in the middle of the second.
    """
    (one,) = run_on(1, kind, tmp_path / "1", shards="group")
    steps = steps_of(one)
    assert len(steps) == 6 and len(one["logs"]) == 9
    ways = {"tp": (1, False), "dp": (2, False), "fully": (2, True)}
    for name in ("tp", "fully") if kind == "dpo" else ways:  # the Trainer's own tests have all of them too
        dp, fully_sharded = ways[name]
        for got in run_on(2, kind, tmp_path / name, dp=dp, fully_sharded=fully_sharded):
            assert_bitwise_equal(got, one)
    resumed = run_on(2, kind, tmp_path / "tp", resume=str(tmp_path / "fully" / "checkpoint-3"))
    for got in resumed:
        assert_bitwise_equal(got["parameters"], one["parameters"])
        assert without_totals(got) == without_totals(one)[3:]
    exact, single = (
        run_on(1, kind, tmp_path / "theirs", library=False, dtype=dtype)[0] for dtype in (torch.float64, torch.float32)
    )
    for column in ("loss", "grad_norm"):
        errors = [
            max(abs(a[column] / b[column] - 1) for a, b in zip(x, steps_of(exact), strict=True))
            for x in (steps, steps_of(single))
        ]
        assert errors[0] <= max(4 * errors[1], 1e-5), errors
    for got, expected in zip(one["logs"], single["logs"], strict=True):
        assert got == pytest.approx(expected, rel=1e-3, abs=1e-5)
    off = [run_on(n, kind, tmp_path / "off", mode=False, max_steps=2)[0] for n in (1, 2)]
    assert testing.digest(off[0]) != testing.digest(off[1])


def steps_of(run: dict[str, Any]) -> list[dict[str, float]]:
    return [log for log in run["logs"] if "grad_norm" in log]


def without_totals(run: dict[str, Any]) -> list[dict[str, float]]:
    """TRL counts the tokens of a run that goes on anew."""
    return [{name: value for name, value in log.items() if name != "num_tokens"} for log in steps_of(run)]


def refusals(tp_group: Any, folder: Path) -> list[str]:
    import trl

    from tp_invariant.integrations.trainer import Trainer

    said = []
    model = tpi.parallelize(hf_models.build("llama", num_hidden_layers=1), tp_group)
    other = type("Other", (Trainer, trl.RewardTrainer), {})
    mesh = mesh_or_group(tp_group, "mesh")
    parallel = tpi.parallelize(hf_models.build("llama", num_hidden_layers=1), mesh, sequence_parallel=True)
    for kind, given in ((other, model), (classes("sft", True)[0], model), (classes("dpo", True)[0], parallel)):
        with pytest.raises(ValueError) as caught:
            kind(given)
        said.append(str(caught.value))
    return said


def test_what_is_refused(tmp_path):
    said = run_ranks(refusals, 2, tmp_path)[0]
    assert said[0].startswith("Other is TRL's RewardTrainer on rank 0, which is not known to be right here")
    assert said[1].startswith("model.embed_tokens.weight is a plain part on rank 0, and TRL's SFTTrainer would take")
    assert said[2].startswith(
        "sequence_parallel=True on rank 0: TRL's DPOTrainer would take this rank's tokens for all"
    )
