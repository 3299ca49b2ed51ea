"""accelerate without wrapping: the bits of one process at every tensor-parallel degree."""

from __future__ import annotations

import functools
import os
from typing import Any
from unittest import mock

import accelerate
import hf_models
import pytest
import torch
from accelerate import state as accelerate_state
from meshes import mesh_or_group
from torch.utils.data import DataLoader

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.testing import assert_bitwise_equal

run_ranks = functools.partial(testing.run_ranks, device="cpu")


@pytest.fixture(scope="module", autouse=True)
def pool():
    run_ranks(lambda tp_group: None, 4)


def examples(count: int = 20) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, hf_models.VOCABULARY, (count, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def loop(accelerator: Any, model: Any, steps: int = 10) -> list[tuple[float, float]]:
    """accelerate's loop, as its documents have it: shuffled batches of 2, two of them a step, a schedule."""
    torch.manual_seed(7)
    loader = DataLoader(examples(), batch_size=2, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    seen: list[tuple[float, float]] = []
    while len(seen) < steps:
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                losses.append(loss.item())
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    seen.append((sum(losses), float(norm)))
                    losses = []
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return seen[:steps]


def reset() -> None:
    accelerate_state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate_state.GradientState._reset_state()


def build(dtype: torch.dtype = torch.float32) -> Any:
    return hf_models.build("llama", dtype, num_hidden_layers=1)


def ours(tp_group: Any, kind: str, mode: bool, **options: Any) -> Any:
    from tp_invariant.integrations.accelerate import Accelerator

    try:
        with tpi.set_tp_invariant_mode(mode):
            model = tpi.parallelize(build(), mesh_or_group(tp_group, kind))
            seen = loop(Accelerator(cpu=True, gradient_accumulation_steps=2, **options), model)
            return seen, testing.full_parameters(model)
    finally:
        reset()


def theirs(tp_group: Any, dtype: torch.dtype) -> Any:
    try:
        return loop(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2), build(dtype))
    finally:
        reset()


def trained(tp_group: Any, kind: str, mode: bool, options: dict[str, Any]) -> Any:
    return ours(tp_group, kind, mode, **options)


@pytest.mark.parametrize(
    "options, degrees",
    [({}, [(2, "mesh"), (4, "group")]), ({"mixed_precision": "bf16"}, [(2, "group")])],
    ids=["float32", "bf16"],
)
def test_ten_steps_have_the_bits_of_one_process(options, degrees):
    (expected,) = run_ranks(trained, 1, "group", True, options)
    for degree, kind in degrees:
        for got in run_ranks(trained, degree, kind, True, options):
            assert_bitwise_equal(got, expected)
    if not options:
        exact, single = (run_ranks(theirs, 1, dtype)[0] for dtype in (torch.float64, torch.float32))
        for column in (0, 1):
            errors = [
                max(abs(a[column] / b[column] - 1) for a, b in zip(x, exact, strict=True))
                for x in (expected[0], single)
            ]
            assert errors[0] <= max(4 * errors[1], 1e-5), errors


def test_with_the_mode_off_the_bits_depend_on_the_degree():
    one, two = (run_ranks(trained, degree, "group", False, {})[0] for degree in (1, 2))
    assert testing.digest(one) != testing.digest(two)


def refusals(tp_group: Any) -> dict[str, str]:
    from tp_invariant.integrations.accelerate import Accelerator

    said = {}

    def refused(name: str, error: type[Exception], call: Any) -> None:
        try:
            with pytest.raises(error) as caught:
                call()
            said[name] = str(caught.value)
        finally:
            reset()

    def model() -> Any:
        return tpi.parallelize(build(), tp_group)

    def step_with_other_batches() -> None:
        prepared = Accelerator(cpu=True).prepare(model())
        prepared(torch.full((1, 8), 3 + tp_group.rank()))

    adafactor = torch.optim.Adafactor([torch.nn.Parameter(torch.ones(4, 4))])
    refused(
        "split",
        ValueError,
        lambda: Accelerator(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(split_batches=True)),
    )
    refused("compile", ValueError, lambda: Accelerator(cpu=True, dynamo_backend="eager"))
    refused("state", NotImplementedError, lambda: Accelerator(cpu=True).save_state("folder"))
    refused("optimizer", TypeError, lambda: Accelerator(cpu=True).prepare(adafactor))
    refused("batches", ValueError, step_with_other_batches)
    rank = str(tp_group.rank())
    started = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(torch.distributed.get_world_size()), LOCAL_WORLD_SIZE="2")
    with mock.patch.dict(os.environ, started):
        refused("their own", ValueError, lambda: accelerate.Accelerator(cpu=True).prepare(model()))
        part = tpi.parallelize(build(), None)
        refused("part of the job", ValueError, lambda: Accelerator(cpu=True).prepare(part))
    return said


def test_what_is_refused():
    said = run_ranks(refusals, 2)[0]
    assert said["split"].startswith("split_batches=True")
    assert said["compile"].startswith("torch.compile by accelerate is not supported")
    assert "tp_invariant.checkpoint.save" in said["state"]
    assert said["optimizer"].startswith("Adafactor on rank 0 is not known")
    assert said["batches"].startswith("the 2 ranks differ in the batches of a step")
    assert said["their own"].startswith("DistributedDataParallel over the ranks [0, 1")
    assert "tp_invariant.integrations.accelerate.Accelerator" in said["their own"]
    assert "and the model is sharded over 1: data parallel ranks need" in said["part of the job"]


def as_a_launcher_says(tp_group: Any) -> tuple[float, bool, list[int]]:
    """With accelerate told of all ranks, as torchrun does: a schedule's rate, a trigger of rank 0, a split."""
    from tp_invariant.integrations.accelerate import Accelerator

    try:
        accelerator = Accelerator(cpu=True)
        for state in (accelerate_state.PartialState, accelerate_state.AcceleratorState):
            state._shared_state["num_processes"] = tp_group.size()
        model = tpi.parallelize(build(), tp_group)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        for _ in range(2):
            optimizer.step()
            schedule.step()
        if tp_group.rank() == 0:
            accelerator.set_trigger()
        seen = accelerator.check_trigger()
        assert not accelerator.check_trigger()
        with accelerator.split_between_processes([0, 1, 2, 3]) as mine:
            return schedule.get_last_lr()[0], seen, mine
    finally:
        reset()


def test_schedules_triggers_and_splits_are_those_of_one_process():
    for degree in (1, 2):
        assert run_ranks(as_a_launcher_says, degree) == [(0.25, True, [0, 1, 2, 3])] * degree
