"""transformers' Trainer over tensor and data parallel ranks: the bits of one process, at every degree."""

from __future__ import annotations

import json
from typing import Any

import hf_models
import numpy
import pytest
import torch
import transformers
from accelerate import state as accelerate_state
from meshes import init_device_mesh, mesh_or_group, shard_fully
from ranks import run_ranks
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.diagnostics.diff import compare, read_log
from tp_invariant.testing import assert_bitwise_equal

pytestmark = pytest.mark.skipif(
    not hasattr(transformers.Trainer, "_prepare_for_training"), reason="the Trainer refuses this version"
)
STEPS = 10
EXAMPLES = 14  # in micro-batches of 2, of which a step has 2: an epoch ends with a step of one


class Examples(Dataset):
    def __init__(self, count: int = EXAMPLES, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, hf_models.VOCABULARY, (count, 16), generator=generator)
        self.lengths = torch.randint(6, 17, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        visible = torch.arange(16) < self.lengths[index]  # so that micro-batches differ in their numbers of tokens
        labels = self.ids[index].masked_fill(~visible, -100)
        return dict(input_ids=self.ids[index], attention_mask=visible.long(), labels=labels)


class Between(transformers.TrainerCallback):
    """A collective over the data parallel ranks between micro-batches, as a callback of a user's may have."""

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        mesh = getattr(next(model.parameters()), "device_mesh", None)
        if mesh is not None:
            torch.distributed.all_reduce(torch.zeros(1), group=mesh.get_group(0))


def masked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A collator that draws."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    ids = batch["input_ids"]
    return {**batch, "input_ids": ids.masked_fill(torch.rand(ids.shape) < 0.2, 3)}


class Record(transformers.TrainerCallback):
    """What is logged, without times."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        self.logs.append({k: v for k, v in logs.items() if "runtime" not in k and "per_second" not in k})


def arguments(folder: Any, **options: Any) -> transformers.TrainingArguments:
    given: dict[str, Any] = dict(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-2, weight_decay=0.1, warmup_steps=2, max_grad_norm=1.0, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    return transformers.TrainingArguments(**{**given, **options})


def groups_of(tp_group: Any, dp: int) -> tuple[Any, Any]:
    """(tensor parallel mesh, data parallel mesh) of the first ranks of the pool."""
    if dp == 1:
        return mesh_or_group(tp_group, "mesh"), None
    mesh = init_device_mesh("cpu", (dp, tp_group.size() // dp), mesh_dim_names=("dp", "tp"))
    return mesh["tp"], mesh["dp"]


def ours(tp_group: Any, folder: Any, kind: str = "group", dp: int = 1, family: str = "llama", **options: Any) -> Any:
    """A Trainer of this library's, after parallelize."""
    from tp_invariant.integrations.trainer import Trainer

    mesh, dp_group = groups_of(tp_group, dp)
    tp = mesh if kind == "mesh" else mesh.get_group()
    others = {
        name: options.pop(name)
        for name in ("eval_dataset", "callbacks", "optimizers", "data_collator")
        if name in options
    }
    model = hf_models.build(family, options.pop("dtype", torch.float32), num_hidden_layers=1)
    tpi.parallelize(model, tp, expert_parallel_group=experts_of(tp_group, tp, options.pop("experts", "")))
    if options.pop("lora", False):
        from tp_invariant.integrations.peft import register

        model = with_lora(model, register)
    if options.pop("fully_sharded", False):
        shard_fully(model, dp_group, options.pop("reshard", True))
    data = options.pop("train_dataset", Examples())
    return Trainer(model, arguments(folder, **options), train_dataset=data, dp_group=dp_group, **others)


def experts_of(tp_group: Any, tp: Any, over: str) -> Any:
    """What divides experts: nothing, "tp", which stores them by expert, or "all" ranks of the case."""
    if not over or over == "tp":
        return tp if over else None
    return mesh_or_group(tp_group, "group" if isinstance(tp, torch.distributed.ProcessGroup) else "mesh")


def with_lora(model: Any, register: Any = lambda config: config) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(model, register(LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)))


def reset() -> None:
    """What accelerate keeps for the whole process."""
    accelerate_state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate_state.GradientState._reset_state()


def trained(tp_group: Any, folder: Any, mode: bool = True, resume: Any = None, **options: Any) -> dict[str, Any]:
    """A run's log, its parameters in the end, and what rank 0 has kept of its state."""
    record = Record()
    callbacks = [record]
    if options.get("fully_sharded"):
        callbacks.append(Between())
    if log := options.pop("digest_log", None):
        from tp_invariant.integrations.trainer import DigestLogCallback

        callbacks.append(DigestLogCallback(log))
    try:
        with tpi.set_tp_invariant_mode(mode):
            trainer = ours(tp_group, folder, callbacks=callbacks, **options)
            trainer.train(resume_from_checkpoint=resume)
            parameters = testing.full_parameters(trainer.model)
    finally:
        reset()
    return {"logs": record.logs, "parameters": parameters}


def with_options(tp_group: Any, function: Any, folder: Any, options: dict[str, Any]) -> Any:
    return function(tp_group, folder, **options)


def run_on(degree: int, folder: Any, function: Any = trained, **options: Any) -> list[Any]:
    return run_ranks(with_options, degree, function, folder, options)


def stock(tp_group: Any, folder: Any, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    """transformers' own Trainer with its own model, on one process."""
    record = Record()
    try:
        model = hf_models.build("llama", dtype, num_hidden_layers=1)
        data = options.pop("train_dataset", Examples())
        given = arguments(folder, optim="adamw_torch", **options)
        transformers.Trainer(model, given, train_dataset=data, callbacks=[record]).train()
    finally:
        reset()
    return {"logs": record.logs, "parameters": {name: p.detach() for name, p in model.named_parameters()}}


def steps_of(run: dict[str, Any]) -> list[tuple[float, float, float]]:
    return [(log["loss"], log["grad_norm"], log["learning_rate"]) for log in run["logs"] if "grad_norm" in log]


# --- bits and values ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def at_one(tmp_path_factory):
    """Ten steps of one process, with evaluations and checkpoints, and its folder."""
    folder = tmp_path_factory.mktemp("one")
    (run,) = run_on(1, folder, digest_log=str(folder / "log"), **EVERYTHING)
    return run, folder


EVERYTHING: dict[str, Any] = dict(
    eval_dataset=Examples(5, seed=1), eval_strategy="steps", eval_steps=5, save_strategy="steps", save_steps=5,
    include_num_input_tokens_seen="all",
)  # fmt: skip


@pytest.mark.parametrize("ranks, dp, kind", [(2, 1, "mesh"), (4, 1, "group"), (4, 2, "mesh")])
def test_ten_steps_have_the_bits_of_one_process(at_one, tmp_path, ranks, dp, kind):
    """Losses, gradient norms, evaluations, parameters, the state that is written, and every gradient of every step."""
    options = dict(EVERYTHING, digest_log=str(tmp_path / "log"), kind=kind, dp=dp)
    expected, folder = at_one
    runs = run_on(ranks, tmp_path, **options)
    assert len(steps_of(expected)) == STEPS
    assert sum("eval_loss" in log for log in expected["logs"]) == 2
    for run in runs:
        assert run["logs"] == expected["logs"]
        assert_bitwise_equal(run["parameters"], expected["parameters"])
    text, same = compare(read_log(str(folder / "log")), read_log(str(tmp_path / "log")))
    assert same and text.endswith("identical for 10 steps, 0 to 9"), text
    for name in ("model.safetensors", "trainer_state.json", "config.json"):
        files = [(path / "checkpoint-10" / name).read_text(errors="replace") for path in (folder, tmp_path)]
        assert without_times(files[0]) == without_times(files[1]), name


def without_times(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if "runtime" not in line and "per_second" not in line)


def test_the_values_are_those_of_transformers_own(at_one, tmp_path):
    check_values(steps_of(at_one[0]), tmp_path)


def check_values(run: list[tuple[float, float, float]], tmp_path: Any, **options: Any) -> None:
    """Losses and norms are as near to transformers' Trainer in float64 as transformers' in float32."""
    exact, theirs = (
        steps_of(run_on(1, tmp_path, stock, dtype=dtype, **options)[0]) for dtype in (torch.float64, torch.float32)
    )
    assert [step[2] for step in run] == [step[2] for step in exact], "the schedule"
    for column in (0, 1):
        errors = [
            max(abs(a[column] / b[column] - 1) for a, b in zip(steps, exact, strict=True)) for steps in (run, theirs)
        ]
        assert errors[0] <= max(4 * errors[1], 1e-5), errors
    assert run[-1][0] < run[0][0] - 1, "it trains"


def test_with_the_mode_off_the_bits_depend_on_the_degree(tmp_path):
    one, two = (run_on(n, tmp_path, mode=False, max_steps=3)[0] for n in (1, 2))
    assert testing.digest(one["parameters"]) != testing.digest(two["parameters"])
    for a, b in zip(steps_of(one), steps_of(two), strict=True):
        assert a == pytest.approx(b, rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        dict(bf16=True, gradient_checkpointing=True),
        dict(dtype=torch.bfloat16, gradient_accumulation_steps=3, family="qwen3"),
        dict(max_grad_norm=0.0, gradient_accumulation_steps=1, dataloader_num_workers=1),
    ],
    ids=["autocast", "bfloat16", "one micro-batch, a worker"],
)
def test_precisions_and_checkpointed_activations(tmp_path, options):
    (one,), two = (run_on(degree, tmp_path, max_steps=3, **options) for degree in (1, 2))
    for got in two:
        assert got["logs"] == one["logs"]
        assert_bitwise_equal(got["parameters"], one["parameters"])
    if options.pop("gradient_checkpointing", False):
        plain = run_on(1, tmp_path, max_steps=3, **options)[0]
        assert_bitwise_equal(plain["parameters"], one["parameters"])


# --- stop and go on -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks, dp, kind", [(2, 1, "mesh"), (4, 2, "group")])
def test_a_run_goes_on_at_another_degree(at_one, tmp_path, ranks, dp, kind):
    """From the checkpoint of one process, inside an epoch; and from there on one process again."""
    expected, folder = at_one
    first = tmp_path / "first"
    options = dict(EVERYTHING, kind=kind, dp=dp, max_steps=STEPS)
    for run in run_on(ranks, first, **options, resume=str(folder / "checkpoint-5")):
        assert steps_of(run) == steps_of(expected)[5:]
        assert_bitwise_equal(run["parameters"], expected["parameters"])


def test_the_best_model_and_a_run_that_goes_on_alone(at_one, tmp_path):
    """Checkpoints of data and tensor parallel ranks, read by one process; and by the same ranks in the end."""
    expected = at_one[0]
    best = dict(EVERYTHING, load_best_model_at_end=True, save_total_limit=1)
    runs = run_on(2, tmp_path, **best, dp=2)
    kept = [path.name for path in tmp_path.iterdir() if path.name.startswith("checkpoint-")]
    losses = [log["eval_loss"] for log in expected["logs"] if "eval_loss" in log]
    assert losses[0] < losses[1] and "checkpoint-5" in kept, "the first is better, and stays"
    resumed = run_on(1, tmp_path / "alone", resume=str(tmp_path / "checkpoint-5"))[0]
    assert steps_of(resumed) == steps_of(expected)[5:]
    assert_bitwise_equal(resumed["parameters"], expected["parameters"])
    from safetensors.torch import load_file

    whole = load_file(tmp_path / "checkpoint-5" / "model.safetensors")
    for run in runs:
        assert_bitwise_equal({name: run["parameters"][name] for name in whole}, whole)


FULLY: dict[str, Any] = dict(train_dataset=Examples(16), per_device_train_batch_size=1, gradient_accumulation_steps=4)


def test_a_model_of_fully_shard(tmp_path):
    """Ten steps at 2 x 2 and 4 x 1; and their checkpoints, with which one process and 2 x 1 go on."""
    options = dict(EVERYTHING, **FULLY)
    (one,) = run_on(1, tmp_path / "1", **options)
    assert len(steps_of(one)) == STEPS
    check_values(steps_of(one), tmp_path, **FULLY)
    fully: dict[str, Any] = dict(options, kind="mesh", fully_sharded=True)
    for name, dp, reshard in (("2 x 2", 2, True), ("4 x 1", 4, False)):
        for run in run_on(4, tmp_path / name, **fully, dp=dp, reshard=reshard):
            assert run["logs"] == one["logs"]
            assert_bitwise_equal(run["parameters"], one["parameters"])
    resumed = [
        *run_on(1, tmp_path / "r", **options, resume=str(tmp_path / "2 x 2" / "checkpoint-5")),
        *run_on(2, tmp_path / "r", **fully, dp=2, resume=str(tmp_path / "4 x 1" / "checkpoint-5")),
    ]
    for run in resumed:
        assert steps_of(run) == steps_of(one)[5:]
        assert_bitwise_equal(run["parameters"], one["parameters"])
    files = [tmp_path / name / "checkpoint-10" / "model.safetensors" for name in ("1", "2 x 2", "4 x 1")]
    assert len({file.read_bytes() for file in files}) == 1


def test_experts_over_data_parallel_ranks(tmp_path):
    """Of a mixture, with fully_shard of the rest and without; and its checkpoint, from one to the other."""
    options: dict[str, Any] = dict(
        family="mixtral", gradient_accumulation_steps=4, max_steps=3, train_dataset=Examples(8)
    )
    saves = dict(save_strategy="steps", save_steps=2)
    (want,) = run_on(1, tmp_path / "1", experts="tp", **options)
    over_all = dict(options, experts="all", dp=2)
    for got in run_on(4, tmp_path / "4", kind="mesh", **over_all, **saves):
        assert_bitwise_equal(got, want)
    for got in run_on(
        2, tmp_path / "2", kind="mesh", fully_sharded=True, resume=str(tmp_path / "4" / "checkpoint-2"), **over_all
    ):
        assert_bitwise_equal(got["parameters"], want["parameters"])
    (off,) = run_on(1, tmp_path / "off", mode=False, experts="tp", **options)
    for got in run_on(2, tmp_path / "off", mode=False, kind="group", **over_all):
        assert testing.digest(got["parameters"]) != testing.digest(off["parameters"])


def test_a_model_of_fully_shard_with_adapters_and_autocast(tmp_path):
    pytest.importorskip("peft", reason="the extra tp-invariant[peft] is not installed")
    options = dict(FULLY, max_steps=2, lora=True, bf16=True, save_strategy="steps", save_steps=2, data_collator=masked)
    (one,) = run_on(1, tmp_path / "1", **options)
    for run in run_on(2, tmp_path / "2", **options, kind="mesh", dp=2, fully_sharded=True):
        assert run["logs"] == one["logs"]
        assert_bitwise_equal(run["parameters"], one["parameters"])
    files = [tmp_path / name / "checkpoint-2" / "adapter_model.safetensors" for name in "12"]
    assert len({file.read_bytes() for file in files}) == 1


def test_a_model_of_fully_shard_with_the_mode_off(tmp_path):
    options = dict(FULLY, mode=False, max_steps=2)
    one, two = (
        run_on(n, tmp_path, **options, **more)[0]
        for n, more in ((1, {}), (4, dict(kind="mesh", dp=2, fully_sharded=True)))
    )
    assert testing.digest(one["parameters"]) != testing.digest(two["parameters"])
    for a, b in zip(steps_of(one), steps_of(two), strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def with_another_view(tp_group: Any, folder: Any) -> tuple[Any, Any]:
    """A run whose rank 1 does not see the best checkpoint when it is asked for; and what it then has."""
    import os
    from unittest import mock

    def exists(path: Any, there: Any = os.path.exists) -> bool:
        return there(path) and not (tp_group.rank() == 1 and str(path).endswith("checkpoint-1"))

    try:
        with tpi.set_tp_invariant_mode(True), mock.patch("os.path.exists", exists):
            options = dict(EVERYTHING, max_steps=2, eval_steps=1, save_steps=1, load_best_model_at_end=True)
            trainer = ours(tp_group, folder, **options, learning_rate=1.0)
            trainer.train()
            return trainer.state.best_model_checkpoint, testing.full_parameters(trainer.model)
    finally:
        reset()


def test_rank_0_says_which_checkpoint_is_the_best(tmp_path):
    (best, parameters), other = run_ranks(with_another_view, 2, tmp_path)
    assert best == other[0] == str(tmp_path / "checkpoint-1"), "training has made it worse"
    assert_bitwise_equal(parameters, other[1])
    from safetensors.torch import load_file

    whole = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert_bitwise_equal({name: parameters[name] for name in whole}, whole)


def goes_on_elsewhere(tp_group: Any, folder: Any) -> str:
    """A rank that finds another checkpoint to go on from."""
    checkpoint = str(folder / f"checkpoint-{5 * (tp_group.rank() + 1)}")
    try:
        with pytest.raises(ValueError) as caught:
            ours(tp_group, folder).train(resume_from_checkpoint=checkpoint)
        return str(caught.value)
    finally:
        reset()


def test_ranks_that_go_on_from_different_checkpoints_are_refused(at_one):
    for text in run_ranks(goes_on_elsewhere, 2, at_one[1]):
        assert text.startswith("the 2 ranks differ in resume_from_checkpoint: ")


# --- LoRA -----------------------------------------------------------------------------------------------------------


def stock_lora(tp_group: Any, folder: Any, dtype: torch.dtype) -> list[Any]:
    """PEFT's adapters by transformers' own Trainer, on one process, without dropout, and ours in the same way."""
    record = Record()
    try:
        model = with_lora(hf_models.build("llama", dtype, num_hidden_layers=1))
        given = arguments(folder, optim="adamw_torch")
        transformers.Trainer(without_dropout(model), given, train_dataset=Examples(), callbacks=[record]).train()
    finally:
        reset()
    return steps_of({"logs": record.logs})


def without_dropout(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def lora_without_dropout(tp_group: Any, folder: Any) -> list[Any]:
    record = Record()
    try:
        with tpi.set_tp_invariant_mode(True):
            trainer = ours(tp_group, folder, lora=True, callbacks=[record])
            without_dropout(trainer.model)
            trainer.train()
    finally:
        reset()
    return steps_of({"logs": record.logs})


def test_the_values_of_lora_are_those_of_transformers_own(tmp_path):
    pytest.importorskip("peft", reason="the extra tp-invariant[peft] is not installed")
    run = run_ranks(lora_without_dropout, 1, tmp_path)[0]
    exact, theirs = (run_ranks(stock_lora, 1, tmp_path, dtype)[0] for dtype in (torch.float64, torch.float32))
    assert len(run) == STEPS
    for column in (0, 1):
        errors = [
            max(abs(a[column] / b[column] - 1) for a, b in zip(steps, exact, strict=True)) for steps in (run, theirs)
        ]
        assert errors[0] <= max(4 * errors[1], 1e-5), errors
    assert run[-1][0] < run[0][0], "it trains"


def test_lora_at_every_degree_and_resumed_at_another(tmp_path):
    """Ten steps at 1, 2 x 2 and from the middle at TP=2: adapters, and PEFT's files of them; dropout included."""
    pytest.importorskip("peft", reason="the extra tp-invariant[peft] is not installed")
    options = dict(EVERYTHING, lora=True)
    (one,) = run_on(1, tmp_path / "1", **options)
    trained_ones = {name for name in one["parameters"] if "lora_" in name}
    start = testing.full_parameters(with_lora(hf_models.build("llama", num_hidden_layers=1)))
    for name, p in one["parameters"].items():
        assert (testing.digest(p) != testing.digest(start[name])) == (name in trained_ones), name
    for run in run_on(4, tmp_path / "4", dp=2, kind="mesh", **options):
        assert run["logs"] == one["logs"] and len(steps_of(run)) == STEPS
        assert_bitwise_equal(run["parameters"], one["parameters"])
    for run in run_on(2, tmp_path / "2", **options, resume=str(tmp_path / "4" / "checkpoint-5")):
        assert steps_of(run) == steps_of(one)[5:]
        assert_bitwise_equal(run["parameters"], one["parameters"])
    files = [tmp_path / name / "checkpoint-10" for name in "124"]
    assert len({(folder / "adapter_model.safetensors").read_bytes() for folder in files}) == 1
    assert not any((folder / "model.safetensors").exists() for folder in files)
    from peft import PeftModel

    theirs = PeftModel.from_pretrained(hf_models.build("llama", num_hidden_layers=1), files[0])
    saved = testing.full_parameters(theirs)
    assert_bitwise_equal({name: saved[name] for name in trained_ones}, {n: one["parameters"][n] for n in trained_ones})


def test_lora_with_the_mode_off(tmp_path):
    pytest.importorskip("peft", reason="the extra tp-invariant[peft] is not installed")
    one, four = (run_on(n, tmp_path, mode=False, max_steps=3, lora=True, dp=dp)[0] for n, dp in ((1, 1), (4, 2)))
    assert testing.digest(one["parameters"]) != testing.digest(four["parameters"])


# --- what is refused ------------------------------------------------------------------------------------------------


def refused(tp_group: Any, folder: Any, error: type[Exception], train: bool = False, **options: Any) -> str:
    try:
        with pytest.raises(error) as caught:
            trainer = ours(tp_group, folder, **options)
            if train:
                trainer.train()
    finally:
        reset()
    return str(caught.value)


def test_an_old_version_of_transformers_is_refused(monkeypatch):
    from tp_invariant.integrations.trainer import Trainer

    monkeypatch.delattr(transformers.Trainer, "_prepare_for_training")
    with pytest.raises(ImportError, match="is too old for this Trainer"):
        Trainer(torch.nn.Linear(4, 4))


REFUSED: dict[str, Any] = dict(
    deepspeed=None, fsdp="full_shard", parallelism_config=None, torch_compile=True, torch_compile_backend="eager",
    torch_compile_mode="default", fp16=None, fp16_full_eval=True, bf16_full_eval=True, tf32=None, use_liger_kernel=True,
    label_smoothing_factor=0.1, neftune_noise_alpha=1.0, auto_find_batch_size=True, batch_eval_metrics=True,
    push_to_hub=True, enable_jit_checkpoint=True, save_on_each_node=True, debug="underflow_overflow",
    ddp_backend="gloo", ddp_find_unused_parameters=True, ddp_bucket_cap_mb=1,
    ddp_broadcast_buffers=True, ddp_static_graph=True,
)  # fmt: skip


def test_every_option_is_honoured_or_refused_by_name(tmp_path):
    """Also those of a later version: a field that is in neither list fails here."""
    import dataclasses

    from tp_invariant.integrations import trainer

    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert names - trainer.HONOURED == set(REFUSED) & names
    assert set(trainer._ADVICE) >= set(REFUSED)


def refusals(tp_group: Any, folder: Any) -> dict[str, str]:
    """What is said of each option that is set, without what transformers refuses here itself (None above)."""
    from tp_invariant.integrations import trainer

    model = hf_models.build("llama")
    said = {}
    for name, value in REFUSED.items():
        args = arguments(folder)
        reset()
        setattr(args, name, "set" if value is None else value)
        with pytest.raises(ValueError) as caught:
            trainer.Trainer(model, args)
        said[name] = str(caught.value)
    return said


def test_options_are_refused_by_name(tmp_path):
    for name, text in run_ranks(refusals, 1, tmp_path)[0].items():
        assert text.startswith(f"TrainingArguments: {name}=") and "on rank 0 is not supported" in text


@pytest.mark.parametrize(
    "kind, options, text",
    [
        (ValueError, dict(gradient_accumulation_steps=1, dp=2), "gradient_accumulation_steps=1 on rank 0"),
        (ValueError, dict(load_best_model_at_end=True, save_only_model=True, eval_strategy="steps",
                          eval_dataset=Examples(2), save_strategy="steps"), "load_best_model_at_end=True needs"),
        (TypeError, dict(train=True, optim="adafactor"), "Adafactor on rank 0 is not known"),
        (ValueError, dict(train=True, optim="sgd", dtype=torch.bfloat16), "SGD on rank 0: on a CPU it has other bits"),
    ],
    ids=["micro-batches", "best model", "adafactor", "sgd in bfloat16"],
)  # fmt: skip
def test_what_cannot_be_honoured_together_is_refused(tmp_path, kind, options, text):
    said = run_on(2, tmp_path, refused, error=kind, **options)
    assert said[0].startswith(text), said[0]


class Endless(torch.utils.data.IterableDataset):
    """Without a length, and with an odd number of micro-batches."""

    def __iter__(self) -> Any:
        return iter([Examples()[index] for index in range(6)])


def unsupported(tp_group: Any, folder: Any) -> list[str]:
    """Data parallel ranks that are the tensor parallel ones; a dataset that ends inside a step."""
    from tp_invariant.integrations.training import Ranks

    plain = tpi.parallelize(hf_models.build("llama", num_hidden_layers=1), tp_group)
    with pytest.raises(ValueError) as caught:
        Ranks(plain, tp_group)
    return [str(caught.value), refused(tp_group, folder, ValueError, train=True, train_dataset=Endless())]


def test_what_is_not_supported_is_refused(tmp_path):
    said = run_ranks(unsupported, 2, tmp_path)[0]
    assert said[0] == (
        "dp_group has the ranks [0, 1], and the model is sharded over [0, 1]: they must have rank 0 alone in common"
    )
    assert said[1].startswith("the dataset ended after 1 of a step's 2 micro-batches on rank 0")


def refusals_of_fully_shard(tp_group: Any, folder: Any) -> dict[str, str]:
    from tp_invariant.integrations.training import Ranks

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    said = {}

    def refused_ranks(name: str, dp_group: Any, tp: Any = mesh["tp"], over: Any = mesh["dp"], **options: Any) -> None:
        model = tpi.parallelize(hf_models.build("llama", num_hidden_layers=1), tp)
        ignored = {p for p in model.lm_head.parameters()} if options.get("ignored") else None
        fully_shard(model, mesh=over, shard_placement_fn=tpi.fsdp_placement, ignored_params=ignored)
        with pytest.raises(ValueError) as caught:
            Ranks(model, dp_group)
        said[name] = str(caught.value)

    refused_ranks("no dp_group", None)
    refused_ranks("no mesh", mesh["dp"], tp=None)
    refused_ranks("hsdp", mesh["dp"], tp=None, over=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")))
    refused_ranks("ignored", mesh["dp"], ignored=True)
    options: dict[str, Any] = dict(error=ValueError, kind="mesh", dp=2, fully_sharded=True)
    said["odd"] = refused(tp_group, folder, **options, gradient_accumulation_steps=3)
    said["last step"] = refused(tp_group, folder, **options, train=True)
    said["bfloat16"] = refused(tp_group, folder, **options, train=True, dtype=torch.bfloat16, **FULLY)
    from tp_invariant.integrations.trainer import DigestLogCallback

    log = [DigestLogCallback(str(folder / "log"))]
    said["log"] = refused(tp_group, folder, **options, train=True, callbacks=log, **FULLY)
    options = dict(error=ValueError, dp=2, family="mixtral", experts="all")
    said["log of experts"] = refused(tp_group, folder, **options, train=True, callbacks=log, **FULLY)
    said["odd with experts"] = refused(tp_group, folder, **options, gradient_accumulation_steps=3)
    return said


def test_what_is_refused_of_a_model_of_fully_shard(tmp_path):
    for said in run_ranks(refusals_of_fully_shard, 2, tmp_path):
        assert "over the ranks [0, 1] by fully_shard, whose mesh must have one dim (no HSDP)" in said["no dp_group"]
        assert "and its layer has no DeviceMesh: make it with tp_group=mesh['tp']" in said["no mesh"]
        assert "must have one dim (no HSDP)" in said["hsdp"]
        assert said["ignored"].startswith("lm_head.weight is trained and not sharded by fully_shard, and model.")
        assert said["odd"].startswith("gradient_accumulation_steps says 3 micro-batches on rank")
        assert said["last step"].startswith("an epoch's last step has 1 micro-batches on rank")
        assert "is sharded by fully_shard and torch.bfloat16" in said["bfloat16"]
        assert "(fully_shard): DigestLog needs slices that a rank holds whole" in said["log"]
        assert "experts are divided over data parallel ranks, and it logs" in said["log of experts"]
        assert said["odd with experts"].startswith("gradient_accumulation_steps says 3 micro-batches on rank")


def by_example(tp_group: Any, folder: str, dp: int) -> None:
    """A rank's part of examples/train_with_trainer.py."""
    from tp_invariant.examples import train_with_trainer as example

    shape = dp, tp_group.size() // dp
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")) if tp_group.size() > 1 else None
    options = example.make_parser().parse_args(["--output-dir", folder, "--max-steps", "2"])
    try:
        with tpi.set_tp_invariant_mode(True):
            example.build_trainer(options, mesh, torch.device("cpu")).train()
    finally:
        reset()


def test_the_example(tmp_path):
    for ranks, dp in ((1, 1), (2, 2)):
        (tmp_path / str(dp)).mkdir()
        run_ranks(by_example, ranks, str(tmp_path / str(dp)), dp)
    text, same = compare(*(read_log(str(tmp_path / str(dp) / "digests.log")) for dp in (1, 2)))
    assert same and text.endswith("identical for 2 steps, 0 to 1"), text
    assert json.loads((tmp_path / "2" / "checkpoint-2" / "trainer_state.json").read_text())["global_step"] == 2


class Decays(transformers.TrainerCallback):
    """Differently on each rank."""

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **others: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.5 ** torch.distributed.get_rank()


def differing(tp_group: Any, folder: Any) -> list[str]:
    """Ranks with other options; then with other examples, and hyperparameters."""
    from tp_invariant.integrations.training import Ranks

    rank = tp_group.rank()
    ranks = Ranks(tpi.Linear(4, 4, parallel_mode="column", tp_group=tp_group), None)
    ranks.check_batches([{"cache": object(), "text": "a", "array": numpy.arange(3)}])  # alike
    for part in (str(rank), numpy.arange(3) + rank, torch.arange(3) + rank):
        with pytest.raises(ValueError, match="differ in the batches of a step"):
            ranks.check_batches([{"part": part}])
    return [
        refused(tp_group, folder, ValueError, seed=rank),
        refused(tp_group, folder, ValueError, train=True, train_dataset=Examples(seed=rank)),
        refused(tp_group, folder, ValueError, train=True, callbacks=[Decays()]),
    ]


def test_ranks_that_differ_are_refused(tmp_path):
    said = run_ranks(differing, 2, tmp_path)
    assert said[0] == said[1]
    assert said[0][0].startswith("the 2 ranks differ in TrainingArguments.seed: 0 on rank 0; 1 on rank 1")
    assert said[0][1].startswith("the 2 ranks differ in the batches of a step")
    assert said[0][2].startswith("the 2 ranks differ in weight_decay of group 0 of optimizer 0: 1.0 on rank 0; 0.5 on")


def the_fused_form(tp_group: Any, folder: Any) -> list[Any]:
    trainer = ours(tp_group, folder)
    trainer.create_optimizer()
    kinds = [(type(trainer.optimizer).__name__, bool(trainer.optimizer.defaults["fused"]))]
    reset()
    fused = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))], fused=True)
    return [*kinds, refused(tp_group, folder, ValueError, train=True, optimizers=(fused, None))]


def test_the_fused_form_is_replaced_on_a_cpu(tmp_path):
    """adamw_torch_fused is the default of TrainingArguments; one that is given is not replaced."""
    assert arguments(tmp_path).optim == "adamw_torch_fused"
    reset()
    kind, text = run_ranks(the_fused_form, 1, tmp_path)[0]
    assert kind == ("AdamW", False)
    assert text.startswith("AdamW on rank 0: fused=True on a CPU has other bits where a parameter is cut")


# --- data parallel ranks of models that draw, change or differ -------------------------------------------------------


class Own(torch.nn.Module):
    """A model of torch's modules: dropout, a layer that is frozen at first, perhaps running statistics."""

    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        self.frozen, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)
        self.between = torch.nn.BatchNorm1d(16) if batch_norm else torch.nn.Dropout(0.3)
        self.frozen.requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, labels: Any = None, **others: Any) -> dict[str, torch.Tensor]:
        hidden = torch.nn.functional.layer_norm(input_ids.float(), (16,))
        return {"loss": self.head(self.between(self.frozen(hidden))).square().mean()}


class Unfreezes(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        model.frozen.requires_grad_(True)


def trained_own(tp_group: Any, folder: Any, dp: int, batch_norm: bool = False, seeded_alike: bool = True) -> Any:
    from tp_invariant.integrations.trainer import Trainer

    torch.manual_seed(0 if seeded_alike else torch.distributed.get_rank())
    model = Own(batch_norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        trainer = Trainer(
            model, arguments(folder, max_steps=4), train_dataset=Examples(), callbacks=[Unfreezes()],
            dp_group=groups_of(tp_group, dp)[1], optimizers=(optimizer, None),
        )  # fmt: skip
        trainer.train()
        return {name: p.detach() for name, p in model.named_parameters()}
    except ValueError as error:
        return str(error)
    finally:
        reset()


def test_dropout_and_what_is_unfrozen_at_every_data_parallel_degree(tmp_path):
    """Each micro-batch draws the same, and a parameter that a callback unfreezes is summed over the ranks too."""
    with tpi.set_tp_invariant_mode(True):
        one = run_on(1, tmp_path, trained_own, dp=1)[0]
        for two in run_on(2, tmp_path, trained_own, dp=2):
            for name, p in two.items():
                assert_bitwise_equal(p, one[name], name)
    torch.manual_seed(0)
    assert not torch.equal(one["frozen.weight"], Own(False).frozen.weight)


def test_replicas_that_differ_are_refused(tmp_path):
    for options, said in (
        ({"seeded_alike": False}, "different values of frozen.weight when training begins"),
        ({"batch_norm": True}, "different values of between.running_mean after a step's forwards"),
    ):
        assert all(said in error for error in run_on(2, tmp_path, trained_own, dp=2, **options)), said


def decayed(tp_group: Any) -> list[str]:
    from tp_invariant.integrations.trainer import Trainer

    names = Trainer.get_decay_parameter_names
    model = torch.nn.ModuleDict(
        dict(
            ln=tpi.ParallelNorm(4, normalization="LayerNorm", tp_group=tp_group),
            both=tpi.LayerNormLinear(4, 4, tp_group=tp_group),
            plain=torch.nn.LayerNorm(4),
            linear=torch.nn.Linear(4, 4),
        )
    )
    return names(Trainer.__new__(Trainer), model)


def test_norms_decay_as_transformers_own_do():
    assert run_ranks(decayed, 1)[0] == ["both.weight", "linear.weight"]
