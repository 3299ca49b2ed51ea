"""accelerate without wrapping: the bits of one process at every tensor-parallel degree."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import accelerate
import hf_models
import pytest
import torch
from accelerate import state as accelerate_state
from meshes import init_device_mesh, mesh_or_group, shard_fully
from ranks import run_ranks
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.testing import assert_bitwise_equal


def examples(count: int = 20) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, hf_models.VOCABULARY, (count, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def loop(accelerator: Any, model: Any, steps: int = 10, count: int = 20) -> list[tuple[float, float]]:
    """accelerate's loop, as its documents have it: shuffled batches of 2, four of them a step (an epoch's last step has
    two), a schedule."""
    torch.manual_seed(7)
    loader = DataLoader(examples(count), batch_size=2, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    seen: list[tuple[float, float]] = []
    while len(seen) < steps:
        seen += epoch(accelerator, *prepared)
    return seen[:steps]


def epoch(accelerator: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any) -> list[tuple[float, float]]:
    """Loss and norm of each step."""
    seen, losses = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            losses.append(loss.item())
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                seen.append((float(getattr(accelerator, "step_loss", sum(losses) / len(losses))), float(norm)))
                losses = []
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return seen


def reset() -> None:
    accelerate_state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate_state.GradientState._reset_state()


def build(dtype: torch.dtype = torch.float32, family: str = "llama") -> Any:
    return hf_models.build(family, dtype, num_hidden_layers=1)


def groups_of(tp_group: Any, kind: str, dp: int) -> tuple[Any, Any]:
    """(what parallelize takes, dp_group) of the first ranks of the pool."""
    if dp == 1:
        return mesh_or_group(tp_group, kind), None
    mesh = init_device_mesh("cpu", (dp, tp_group.size() // dp), mesh_dim_names=("dp", "tp"))
    return mesh["tp"].get_group() if kind == "group" else mesh["tp"], mesh["dp"]


def parallel(tp: Any, dp_group: Any, kind: str, experts: Any = None) -> Any:
    """The model; kind "fully" is a mesh with fully_shard. experts: over which group, of a mixture of them."""
    model = tpi.parallelize(build(family="llama" if experts is None else "mixtral"), tp, expert_parallel_group=experts)
    if kind == "fully":
        shard_fully(model, dp_group)
    return model


def ours(
    tp_group: Any,
    kind: str,
    mode: bool,
    dp: int = 1,
    steps: int = 10,
    count: int = 20,
    over_all: bool = False,
    **options: Any,
) -> Any:
    """over_all: a mixture's experts are divided over all ranks."""
    from tp_invariant.integrations.accelerate import Accelerator

    tp, dp_group = groups_of(tp_group, kind, dp)
    try:
        with tpi.set_tp_invariant_mode(mode):
            experts = mesh_or_group(tp_group, "group" if kind == "group" else "mesh") if over_all else None
            model = parallel(tp, dp_group, kind, experts)
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, dp_group=dp_group, **options)
            return loop(accelerator, model, steps, count), testing.full_parameters(model)
    finally:
        reset()


def theirs(tp_group: Any, dtype: torch.dtype) -> Any:
    try:
        return loop(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4), build(dtype))
    finally:
        reset()


def trained(tp_group: Any, kind: str, mode: bool, options: dict[str, Any]) -> Any:
    return ours(tp_group, kind, mode, **options)


@pytest.mark.parametrize(
    "options, degrees",
    [
        ({}, [(2, 1, "mesh"), (4, 1, "group"), (4, 2, "mesh")]),
        ({"mixed_precision": "bf16"}, [(4, 2, "group")]),
        ({"count": 16}, [(4, 2, "fully"), (4, 4, "fully")]),  # steps of four micro-batches alone
        ({"count": 16, "over_all": True, "steps": 3}, [(4, 2, "fully"), (2, 2, "group")]),
    ],
    ids=["float32", "bf16", "fully_shard", "experts"],
)
def test_ten_steps_have_the_bits_of_one_process(options, degrees):
    (expected,) = run_ranks(trained, 1, "group", True, options)
    for ranks, dp, kind in degrees:
        for got in run_ranks(trained, ranks, kind, True, dict(options, dp=dp)):
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
    kinds = (1, 1, "group"), (2, 1, "group"), (4, 2, "group"), (4, 2, "fully")
    one, two, *four = (run_ranks(trained, ranks, kind, False, dict(dp=dp, steps=2))[0] for ranks, dp, kind in kinds)
    assert all(testing.digest(one) != testing.digest(found) for found in four)
    assert len({testing.digest(found) for found in (one, two, *four)}) > 1


# --- sums over tokens, dropout, checkpoints -------------------------------------------------------------------------


class Weighted(torch.nn.Module):
    """Two forwards of it in a micro-batch have different masks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.dropout, self.last = torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(self.first(x))).square()


def rows(dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x, weights = torch.randn(12, 8, generator=generator), torch.randint(0, 3, (12, 1), generator=generator)
    return [{"x": x[i].to(dtype), "items": weights[i]} for i in range(12)]


def by_items(tp_group: Any, dtype: torch.dtype, dp: int, dropout: float) -> Any:
    """Losses and parameters after six steps of four micro-batches, divided by each step's number of items."""
    from tp_invariant.integrations.accelerate import Accelerator

    try:
        model = Weighted().to(dtype)
        model.dropout.p = dropout
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, dp_group=groups_of(tp_group, "group", dp)[1])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        torch.manual_seed(5)
        loader = accelerator.prepare(DataLoader(rows(dtype), batch_size=1, shuffle=True))
        seen = []
        for _ in range(2):
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = ((model(batch["x"]) + model(batch["x"])) * batch["items"]).sum()
                    accelerator.backward(loss, num_items=batch["items"].sum())
                    if accelerator.sync_gradients:
                        seen.append(accelerator.step_loss.clone())
                    optimizer.step()
                    optimizer.zero_grad()
            assert accelerator.gather(torch.tensor(tp_group.rank())).tolist() == ([0, 1] if dp == 2 else 0)
            whole = [batch["items"] for batch in accelerator.prepare_data_loader(DataLoader(rows(dtype)), shared=False)]
            assert len(whole) == 12
        return seen, {name: p.detach() for name, p in model.named_parameters()}
    finally:
        reset()


def by_hand(tp_group: Any) -> Any:
    """The same by torch alone, in float64, of whole steps without dropout."""
    model, data = Weighted().double().eval(), rows(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(5)
    seen = []
    for _ in range(2):
        batches = list(DataLoader(data, batch_size=1, shuffle=True))
        for first in range(0, 12, 4):
            step = batches[first : first + 4]
            items = sum(int(batch["items"].sum()) for batch in step)
            loss = sum((2 * model(batch["x"]) * batch["items"]).sum() for batch in step) / items
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
        list(DataLoader(data))  # the loader for evaluation draws a seed
    return seen, {name: p.detach() for name, p in model.named_parameters()}


def test_sums_are_divided_by_the_items_of_a_step_and_dropout_is_the_micro_batchs_own():
    for dropout in (0.0, 0.3):
        (one,) = run_ranks(by_items, 1, torch.float32, 1, dropout)
        for got in run_ranks(by_items, 2, torch.float32, 2, dropout):
            assert_bitwise_equal(got, one)
        if not dropout:
            without = one
            exact = run_ranks(by_hand, 1)[0]
            torch.testing.assert_close([x.double() for x in one[0]], exact[0], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close({n: p.double() for n, p in one[1].items()}, exact[1], rtol=1e-4, atol=1e-5)
    assert testing.digest(one) != testing.digest(without)


class Noisy(torch.utils.data.Dataset):
    """Rows that it draws, by a generator of its own, too."""

    def __init__(self) -> None:
        self.generator, self.level = torch.Generator().manual_seed(3), 1.0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.level * (torch.rand(8) + torch.rand(8, generator=self.generator) + index)


class Masked:
    """A collate_fn that draws, and counts its batches."""

    batches = 0

    def __call__(self, batch: list[torch.Tensor]) -> torch.Tensor:
        self.batches += 1
        x = torch.stack(batch)
        return x * (torch.rand_like(x) < 0.7) + self.batches


def with_drawn_batches(tp_group: Any, dp: int, kind: str = "group", workers: int = 0) -> Any:
    """Losses of two epochs, the first of which is gone on with after its first step; and what ranks gather."""
    from tp_invariant.integrations.accelerate import Accelerator

    dp_group = groups_of(tp_group, kind, dp)[1]
    try:
        model = Weighted()
        if kind == "fully":
            fully_shard(model, mesh=dp_group)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, dp_group=dp_group)
        torch.manual_seed(5)
        loader = DataLoader(Noisy(), batch_size=1, shuffle=True, collate_fn=Masked(), num_workers=workers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        seen, rows, gathered = [], [], []
        for batches in (loader, accelerator.skip_first_batches(loader, 4 // dp)):
            loader.dataset.level += 1.0
            for batch in batches:
                with accelerator.accumulate(model):
                    loss = model(batch).mean()
                    accelerator.backward(loss)
                    rows.append(batch)
                    gathered.append(accelerator.gather_for_metrics(loss.detach()[None]))
                    if accelerator.sync_gradients:
                        seen.append(accelerator.step_loss)
                    optimizer.step()
                    optimizer.zero_grad()
        return seen, rows, torch.cat(gathered).sort().values
    finally:
        reset()


def test_what_a_dataset_and_a_collator_draw_is_that_of_one_process():
    for workers, kind in ((0, "fully"), (1, "group")):
        ((losses, rows, gathered),) = run_ranks(with_drawn_batches, 1, 1, "group", workers)
        assert len(losses) == 5 and len({testing.digest(row) for row in rows}) == 20, "each is drawn anew"
        assert len(gathered) == 20
        for got in run_ranks(with_drawn_batches, 2, 2, kind, workers):
            assert_bitwise_equal((got[0], got[2]), (losses, gathered))


def stopped(tp_group: Any, kind: str, dp: int, folder: str, resume: bool) -> Any:
    """Loss and norm of the steps of two epochs, whose second one is left after its second step, and saved; or of what
    is left of them, and the parameters."""
    from accelerate.utils import DataLoaderConfiguration

    from tp_invariant.integrations.accelerate import Accelerator

    tp, dp_group = groups_of(tp_group, kind, dp)
    seedable = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
    try:
        with tpi.set_tp_invariant_mode(True):
            model = parallel(tp, dp_group, kind)
            accelerator = Accelerator(
                cpu=True, gradient_accumulation_steps=4, dp_group=dp_group, dataloader_config=seedable
            )
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
            counter = Counter()
            accelerator.register_for_checkpointing(counter)
            loader = DataLoader(examples(), batch_size=2, shuffle=True)
            model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
            if not resume:
                seen = epoch(accelerator, model, optimizer, loader, scheduler)
                counter.value = len(seen)
                loader.set_epoch(1)
                two_steps = (batch for _, batch in zip(range(8 // dp), loader, strict=False))
                seen += epoch(accelerator, model, optimizer, two_steps, scheduler)
                accelerator.save_state(folder)
                return seen
            accelerator.load_state(folder)
            assert counter.value == 3
            rest = accelerator.skip_first_batches(loader, 8 // dp)
            seen = epoch(accelerator, model, optimizer, rest, scheduler)
            loader.set_epoch(2)
            return seen + epoch(accelerator, model, optimizer, loader, scheduler), testing.full_parameters(model)
    finally:
        reset()


class Counter:
    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def test_a_run_goes_on_at_another_degree(tmp_path):
    """save_state inside an epoch at 2 x 2 and at 1; load_state at 2, 2 x 2, 2 x 1 and 1; with fully_shard too."""
    folders = {name: str(tmp_path / name) for name in ("four", "fully", "one")}
    (first,) = run_ranks(stopped, 1, "group", 1, folders["one"], False)
    assert_bitwise_equal(run_ranks(stopped, 4, "mesh", 2, folders["four"], False), [first] * 4)
    assert_bitwise_equal(run_ranks(stopped, 4, "fully", 2, folders["fully"], False), [first] * 4)
    (rest,) = run_ranks(stopped, 1, "group", 1, folders["one"], True)
    assert len(first) == 5 and len(rest[0]) == 4
    assert_bitwise_equal(run_ranks(stopped, 1, "group", 1, folders["four"], True), [rest])
    assert_bitwise_equal(run_ranks(stopped, 2, "mesh", 1, folders["four"], True), [rest] * 2)
    assert_bitwise_equal(run_ranks(stopped, 4, "group", 2, folders["one"], True), [rest] * 4)
    assert_bitwise_equal(run_ranks(stopped, 1, "group", 1, folders["fully"], True), [rest])
    assert_bitwise_equal(run_ranks(stopped, 2, "fully", 2, folders["four"], True), [rest] * 2)


# --- what is refused ------------------------------------------------------------------------------------------------


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
    refused("state", ValueError, lambda: Accelerator(cpu=True).save_state("folder"))
    refused("save_model", NotImplementedError, lambda: Accelerator(cpu=True).save_model(model(), "folder"))
    refused("optimizer", TypeError, lambda: Accelerator(cpu=True).prepare(adafactor))
    refused("batches", ValueError, step_with_other_batches)
    rank = str(tp_group.rank())
    started = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(torch.distributed.get_world_size()), LOCAL_WORLD_SIZE="2")
    with mock.patch.dict(os.environ, started):
        part = tpi.parallelize(build(), None)
        refused("part of the job", ValueError, lambda: Accelerator(cpu=True).prepare(part))
    return said


def test_what_is_refused():
    said = run_ranks(refusals, 2)[0]
    assert said["split"].startswith("split_batches=True")
    assert said["compile"].startswith("torch.compile by accelerate is not supported")
    assert "tp_invariant.checkpoint.save" in said["state"]
    assert "save_pretrained" in said["save_model"]
    assert said["optimizer"].startswith("Adafactor on rank 0 is not known")
    assert said["batches"].startswith("the 2 ranks differ in the batches of a step")
    assert "ranks, the model is sharded over 1, and dp_group has 1: give dp_group" in said["part of the job"]


def refusals_of_data_parallel_ranks(tp_group: Any) -> dict[str, str]:
    from accelerate.utils import GradientAccumulationPlugin

    from tp_invariant.integrations.accelerate import Accelerator

    dp_group, rank = groups_of(tp_group, "group", 2)[1], torch.distributed.get_rank()
    said = {}

    def made(steps: int = 4, **options: Any) -> Any:
        return Accelerator(cpu=True, gradient_accumulation_steps=steps, dp_group=dp_group, **options)

    def refused(name: str, call: Any, error: type[Exception] = ValueError) -> None:
        try:
            with pytest.raises(error) as caught:
                call()
            said[name] = str(caught.value)
        finally:
            reset()

    def begin(accelerator: Any, seed: int = 0, order: int = 0, batches: int = 2, norm: bool = False) -> Any:
        torch.manual_seed(seed)
        last = torch.nn.BatchNorm1d(4) if norm else torch.nn.Linear(4, 4)
        model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4), last))
        generator = torch.Generator().manual_seed(order)
        data = torch.arange(32.0).view(8, 4)
        loader = accelerator.prepare(DataLoader(data, batches, shuffle=True, generator=generator))
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
        return accelerator, loader

    def twice() -> None:
        accelerator = made()
        model = accelerator.prepare(torch.nn.Linear(4, 4))
        for _ in range(2):
            accelerator.backward(model(torch.ones(2, 4)).sum())

    def not_zeroed() -> None:
        accelerator = made(2)
        model = accelerator.prepare(torch.nn.Linear(4, 4))
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(2, 4)).sum())
                optimizer.step()

    def scheduled_by_its_own_loss() -> None:
        accelerator = made(2)
        model = accelerator.prepare(torch.nn.Linear(4, 4))
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
        optimizer.param_groups[0]["lr"] = 0.5**rank
        accelerator.backward(model(torch.ones(2, 4)).sum())

    def gather_what_all_have() -> None:
        accelerator = made()
        whole = accelerator.prepare_data_loader(DataLoader(torch.arange(4.0)), shared=False)
        total = sum(accelerator.reduce(x) for x in whole)
        assert total.item() == 6.0
        accelerator.reduce(total)

    def skip() -> None:
        accelerator, loader = begin(made())
        accelerator.skip_first_batches(loader, 1)

    def save_inside() -> None:
        accelerator = made()
        model = accelerator.prepare(torch.nn.Linear(4, 4))
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).sum())
        accelerator.save_state("folder")

    def some_fully_sharded() -> None:
        accelerator = made()
        accelerator.prepare(torch.nn.Linear(4, 4))
        accelerator.prepare(fully_shard(torch.nn.Linear(4, 4), mesh=dp_group))

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(torch.ones(8, 4))

    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    refused("steps", lambda: made(3))
    refused("plugin", lambda: Accelerator(cpu=True, gradient_accumulation_plugin=plugin, dp_group=dp_group))
    refused("odd", lambda: begin(made(), batches=3))
    refused("length", lambda: made().prepare(DataLoader(Endless(), 2)))
    refused("replicas", lambda: begin(made(), seed=rank))
    refused("buffers", lambda: begin(made(), norm=True))
    refused("order", lambda: begin(made(), order=rank))
    refused("outside", twice, RuntimeError)
    refused("not zeroed", not_zeroed, RuntimeError)
    refused("schedule", scheduled_by_its_own_loss)
    refused("whole", gather_what_all_have, RuntimeError)
    refused("skip", skip)
    refused("save", save_inside)
    refused("some", some_fully_sharded)
    return said


def test_what_is_refused_of_data_parallel_ranks():
    said = run_ranks(refusals_of_data_parallel_ranks, 2)[0]
    assert said["steps"].startswith("gradient_accumulation_steps=3 on rank 0 of dp_group, which has 2 ranks")
    assert said["plugin"].startswith("sync_with_dataloader=False with 2 data parallel ranks")
    assert said["odd"].startswith("an epoch's last step has 3 batches on rank 0 of dp_group")
    assert said["length"].startswith("a loader of Endless on rank 0 of dp_group has no batch_sampler of known length")
    assert "different values of 0.weight when training begins" in said["replicas"]
    assert "different values of 1.running_mean after a step's forwards" in said["buffers"]
    assert said["order"].startswith("the 2 ranks differ in the batches of a step")
    assert said["outside"].startswith("backward was called 1 times on rank 0 when the optimizer's step is due")
    assert said["not zeroed"].startswith("a step begins on rank 0 of dp_group, and parameters of an optimizer have")
    assert said["schedule"].startswith("the 2 ranks differ in lr of group 0 of optimizer 0: 1.0 on rank 0; 0.5 on rank")
    assert said["whole"].startswith("gather or reduce was called on rank 0 of dp_group after a loop over a loader")
    assert said["skip"].startswith("num_batches=1 on rank 0 of dp_group: with data parallel ranks skip whole steps")
    assert said["save"].startswith("save_state('folder') was called inside of a step")
    assert said["some"].startswith("fully_shard has sharded some of the prepared models and not others, on rank 0")


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
