"""accelerate's Accelerator for models that parallelize has changed, also with data parallel ranks besides.

    accelerator = tp_invariant.integrations.accelerate.Accelerator(gradient_accumulation_steps=4, dp_group=mesh["dp"])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state("folder")

Give optimizers and schedulers to `prepare` too, as accelerate's examples do. accelerate's own Accelerator wraps every
model in DistributedDataParallel over all ranks, which is refused. What differs from it:

    the model      is not wrapped; the last backward of a step sums the gradients over dp_group by a MicroBatchTree
    a step         has gradient_accumulation_steps micro-batches, one batch of the loader each, at every degree: data
                   parallel ranks share them, so it must be a multiple of their number
    batches        a loader that `prepare` gets gives each data parallel rank its share of every step, the same to all
                   of its tensor parallel ranks; prepare_data_loader(loader, shared=False) gives every rank all
    the loss       is the mean over the step's micro-batches; backward(loss, num_items=n) takes sums over n tokens each,
                   and divides by those of the whole step. `step_loss` is the last step's, of all ranks
    random numbers in a forward in training (dropout) depend on the first seed, the step and the micro-batch alone;
                   those of a dataset and a collate_fn are drawn as on one process, as every rank reads all batches.
                   What the loop itself draws is of the rank: draw it in one of these
    clipping       is tp_invariant.clip_grad_norm_
    save_state     writes a checkpoint of this library's, from which any degree goes on
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import accelerate
import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import find_batch_size, recursively_apply
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from ..checkpoint.full_state import full_state_dict
from ..comm.wire import gather_objects
from ..layers.grad_norm import clip_grad_norm_
from ..optim import check
from .training import (
    GroupOrMesh,
    Ranks,
    Step,
    dp_ranks,
    generator_states,
    seed_workers_alike,
    seeded,
    set_generator_states,
)


class Accelerator(accelerate.Accelerator):
    """accelerate's Accelerator over tensor parallel ranks, and over data parallel ones. See this file's head.

    A step is that of one process: `num_processes` is 1, and `is_main_process` is accelerate's: rank 0 alone logs.
    `gather` and `reduce` are over the data parallel ranks, in their order, and take each value once, whatever the
    tensor parallel degree; in a loop over a loader that is not shared they return what they get. Seed what shuffles
    alike on every rank: ranks compare the first batch of each model, and the first step of each loop over a shared
    loader.

    Args:
        dp_group: a ProcessGroup or 1-D DeviceMesh of the ranks that hold the same shards, or parts of them by
            fully_shard, called before `prepare`; None: there is one of each.
        others: as for accelerate's.

    Raises:
        ValueError: mixed_precision other than "no" and "bf16"; DeepSpeed, FSDP, Megatron-LM, parallelism_config,
            torch.compile, split_batches and dispatch_batches; with data parallel ranks also use_stateful_dataloader and
            sync_with_dataloader=False. At `prepare`: groups or a fully_shard that do not fit the job
            (`Ranks`), or fully_shard of some of the models that are trained; a shared loader of unknown length, or
            whose last step's batches are no multiple of the data parallel ranks; what `tp_invariant.optim.check`
            refuses. When training begins: data parallel ranks with different parameters or buffers. At the end of a
            step's backward: ranks whose optimizers have different rates, betas and the like.
    """

    ranks: Ranks | None = None  # of the model; the Trainer sets it, and has a loop of its own
    flag_tensor: Any  # accelerate's own
    step: int
    step_loss: Tensor | None = None  # of the last step
    _dp = dp_ranks(None)
    _own_loop = False
    _cuts_iterable = True  # whether accelerate would know the size of an iterable dataset's last batch

    def __init__(self, *args: Any, dp_group: GroupOrMesh = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._own_loop = True
        self._dp = dp_ranks(dp_group)
        self.check_settings()
        self._trained: list[nn.Module] = []
        self._current_step: Step | None = None
        self._local = 0  # this rank's micro-batches in the step that was started; 0: none was
        self._steps = 0  # that were finished, and the forwards of the current micro-batch
        self._forwards = 0
        self._seed = 0

    def check_settings(self) -> None:
        """Raises: ValueError: what this class cannot honour, by arguments, accelerate's config or the environment."""
        for name in ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config"):
            if (getattr(self, name, None) or getattr(self.state, name, None)) is not None:
                raise ValueError(
                    f"{name} is set: only tensor parallelism is supported, by parallelize; of FSDP2 call fully_shard "
                    "on the model before prepare"
                )
        if self.mixed_precision not in ("no", "bf16"):
            raise ValueError(f"mixed_precision={self.mixed_precision!r} is not supported: choose 'no' or 'bf16'")
        if str(self.state.dynamo_plugin.backend).rpartition(".")[2] != "NO":
            raise ValueError("torch.compile by accelerate is not supported: compile the model's layers yourself")
        of_loaders: dict[str, Any] = {"split_batches": self.split_batches, "dispatch_batches": self.dispatch_batches}
        if self._dp.size > 1:
            of_loaders["use_stateful_dataloader"] = self.use_stateful_dataloader
            of_loaders["sync_with_dataloader=False, that is"] = not self.gradient_state.sync_with_dataloader
            _ = self.micro_batches_of_rank
        for name, value in of_loaders.items():
            if value:
                raise ValueError(f"{name}={value} is not supported: every rank reads whole batches; leave it out")
        self._cuts_iterable = self.dispatch_batches is None
        self.dataloader_config.dispatch_batches = False  # None would be True for iterable datasets

    @property
    def num_processes(self) -> int:
        return 1

    @property
    def process_index(self) -> int:
        return super().process_index if self._own_loop else 0

    @property
    def use_distributed(self) -> bool:
        return False

    # --- what is prepared -------------------------------------------------------------------------------------------

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Autocast alone: accelerate wraps no model that is for evaluation."""
        ranks = Ranks(model, self._dp) if self._own_loop else self.ranks
        assert ranks is not None
        if self.ranks is None:
            self.ranks = ranks
            ranks.check_job(self.state.num_processes)
            self._seed = ranks.gather(torch.initial_seed())[0]
            self._compare_first(model, ranks)
        if self._own_loop and not evaluation_mode:
            if ranks.fully_sharded != self.ranks.fully_sharded:
                raise ValueError(
                    f"fully_shard has sharded some of the prepared models and not others, on rank {ranks.index}: "
                    "shard all that are trained, or none"
                )
            self._current_step = None
            self._trained.append(model)
            self._seed_forwards(model)
        return super().prepare_model(model, device_placement, evaluation_mode=True)

    def _compare_first(self, model: nn.Module, ranks: Ranks) -> None:
        def compare(module: nn.Module, args: Any, kwargs: Any) -> None:
            ranks.check_batches([args, kwargs], replicas_differ=True)
            handle.remove()

        handle = model.register_forward_pre_hook(compare, with_kwargs=True)

    def _seed_forwards(self, model: nn.Module) -> None:
        running: list[Any] = []

        def begin(module: nn.Module, args: Any) -> None:
            if module.training and torch.is_grad_enabled():
                step = self._started()
                place = self._seed, self._steps, step.share[step.added], self._forwards
                self._forwards += 1
                running.append(seeded(place, next(module.parameters()).device))
                running[-1].__enter__()

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if running:
                running.pop().__exit__(None, None, None)

        model.register_forward_pre_hook(begin, prepend=True)  # before fully_shard's, which gathers parameters
        model.register_forward_hook(end, always_call=True)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
        check(getattr(optimizer, "optimizer", optimizer))
        return super().prepare_optimizer(optimizer, *args, **options)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """One step of it for each of the optimizer's: accelerate takes as many as the job has ranks."""
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True  # accelerate's word for it
        return prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, shared: bool = True, **options: Any) -> Any:
        """A loader whose workers have the same seeds on every rank.

        shared: data parallel ranks get their parts of each step, of which every rank reads all; False, for
            evaluation: every rank gets all batches.
        """
        seed_workers_alike(data_loader)
        prepared = super().prepare_data_loader(data_loader, *args, **options)
        if isinstance(prepared, _Loader):
            return prepared
        counting = _Loader.of(prepared, self, shared and self._dp.size > 1)
        counting.check_shares()
        self._dataloaders[self._dataloaders.index(prepared)] = counting
        return counting

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """accelerate's; num_batches are those of this rank.

        Raises:
            ValueError: the loader is shared, and they are no whole steps.
        """
        shared = getattr(dataloader, "shared", False)
        if shared and num_batches % self.micro_batches_of_rank:
            raise ValueError(
                f"num_batches={num_batches} on rank {self._dp.rank} of dp_group: with data parallel ranks skip whole "
                f"steps, each of which has {self.micro_batches_of_rank} of this rank's batches"
            )
        skipped = super().skip_first_batches(dataloader, num_batches * (self._dp.size if shared else 1))
        return _Loader.of(skipped, self, shared)

    def free_memory(self, *objects: Any) -> Any:
        self._current_step, self._trained = None, []
        return super().free_memory(*objects)

    # --- a step -----------------------------------------------------------------------------------------------------

    @property
    def micro_batches_of_rank(self) -> int:
        """How many of a step's micro-batches this rank computes, but for an epoch's last step."""
        steps, ranks = self.gradient_accumulation_steps, self._dp.size
        if steps % ranks:
            raise ValueError(
                f"gradient_accumulation_steps={steps} on rank {self._dp.rank} of dp_group, which has {ranks} ranks: it "
                "is the number of micro-batches in a step of all data parallel ranks together; give a multiple of them"
            )
        return steps // ranks

    def _do_sync(self) -> None:
        """accelerate's, by this rank's number of micro-batches."""
        state = self.gradient_state
        at_end = state.sync_with_dataloader and state.end_of_dataloader
        self.step = 0 if at_end else self.step + 1
        state._set_sync_gradients(at_end or self.step % self.micro_batches_of_rank == 0)

    def _started(self) -> Step:
        """The current step, which is started with as many micro-batches as it will have."""
        if self._current_step is None:
            assert self.ranks is not None
            self._current_step, self._local = Step(self.ranks, list(self._trained)), 0
        if not self._local:
            left: int | None = getattr(self.gradient_state.active_dataloader, "left", None)
            self._local = self.micro_batches_of_rank
            if left is not None and self.gradient_state.sync_with_dataloader:
                self._local = min(self._local, left)
            if self.gradient_accumulation_steps > 1:
                self._check_zeroed()
            self._current_step.start(self._local * self._dp.size)
        return self._current_step

    def _check_zeroed(self) -> None:
        """What .grad holds before a step would be added on every data parallel rank."""
        given = {p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]}
        if any(p.grad is not None for p in given):
            raise RuntimeError(
                f"a step begins on rank {self._dp.rank} of dp_group, and parameters of an optimizer have gradients "
                "from before: call optimizer.zero_grad(), with set_to_none=True, after each optimizer.step()"
            )
        for p in (p for module in self._trained for p in module.parameters()):
            p.grad = None  # of what no optimizer has

    def backward(self, loss: Tensor, *, num_items: int | Tensor | None = None, **options: Any) -> None:
        """The backward of one micro-batch: call it once for each. The last one of a step sums over all ranks.

        Args:
            loss: the micro-batch's mean, or with num_items its sum.
            num_items: how many items (tokens) the loss is a sum over: the gradients are divided by those of the step.

        Raises:
            RuntimeError: a step has more or less micro-batches than the loader and gradient_accumulation_steps say; it
            begins, here or in a forward, with gradients from before.
        """
        if not self._own_loop or self.ranks is None:
            super().backward(loss, **options)
            return
        step = self._started()
        if num_items is None:
            super().backward(loss, **options)
            loss = loss / step.micro_batches  # an epoch's short last step has the mean of its own, too
        else:
            loss.backward(**options)
        self._forwards = 0
        if step.added + 1 > self._local or (self.sync_gradients and step.added + 1 < self._local):
            raise RuntimeError(
                f"backward was called {step.added + 1} times on rank {self.ranks.index} when the optimizer's step is "
                f"due, and this rank has {self._local} micro-batches in it: call it once for each batch, inside of "
                "`with accelerator.accumulate(model)`; a loader whose length is not known must end with a whole step"
            )
        step.add(loss, num_items)
        if self.sync_gradients:
            self.ranks.check_hyperparameters(self._optimizers)
            self.step_loss = step.finish()
            self._local = 0
            self._steps += 1

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """tp_invariant.clip_grad_norm_: the norm of the whole model, of the same bits at every degree."""
        return clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    # --- between data parallel ranks --------------------------------------------------------------------------------

    @property
    def _replicas_differ(self) -> bool:
        """Whether data parallel ranks compute different batches here."""
        return self._dp.size > 1 and getattr(self.gradient_state.active_dataloader, "shared", True)

    def gather(self, tensor: Any) -> Any:
        """The data parallel ranks' tensors, one after the other."""
        if not self._replicas_differ:
            return tensor

        def concatenate(own: Tensor) -> Tensor:
            parts = gather_objects(own.detach().cpu(), self._dp)
            return torch.cat([part if part.dim() else part[None] for part in parts]).to(own.device)

        return recursively_apply(concatenate, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """`gather`, after cutting what belongs to a loader's last batch to as many examples as that batch has.

        accelerate cuts on one process, too: scripts repeat a batch's loss by the full batch size.
        """
        try:
            recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        differ, loader = self._replicas_differ, self.gradient_state
        if loader.end_of_dataloader and loader.remainder > 0 and (not differ or self._dp.rank == self._dp.size - 1):

            def cut(value: Any) -> Any:
                return value[: loader.remainder]

            with contextlib.suppress(Exception):  # as accelerate: what cannot be cut stays as it is
                input_data = cut(input_data) if use_gather_object else recursively_apply(cut, input_data)
        if not use_gather_object or not differ:
            return self.gather(input_data) if differ else input_data
        return list(itertools.chain.from_iterable(gather_objects(input_data, self._dp)))

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum (or mean) of the data parallel ranks' tensors, in their order."""
        if not self._replicas_differ:
            return tensor

        def add(own: Tensor) -> Tensor:
            total = functools.reduce(torch.add, gather_objects(own.detach().cpu(), self._dp)).to(own.device)
            return (total / self._dp.size if reduction == "mean" else total) * scale

        return recursively_apply(add, tensor, error_on_other_type=True)

    def check_trigger(self) -> bool:
        """Whether `set_trigger` was called on any rank, on every rank alike. A collective."""
        own = bool(self.flag_tensor is not None and self.flag_tensor.item() >= 1)
        triggered = own if self.ranks is None else any(self.ranks.gather(own))
        if triggered:
            self.flag_tensor = torch.tensor(0, device=self.device)
        return triggered

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """`inputs`, whole, on every rank."""
        yield inputs

    def pad_across_processes(self, tensor: Any, *args: Any, **options: Any) -> Any:
        """`tensor`: `gather` takes tensors of different lengths."""
        return tensor

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True) -> None:
        """Writes a checkpoint of this library's: model, optimizer, schedulers, registered objects, loaders' epochs and
        the states of random generators. A collective of all ranks; the folder must be one that all of them see.

        Raises:
            ValueError: no output_dir, safe_serialization=False, or hooks of save_state; not one model, or several
                optimizers; a step that is not finished.
        """
        ranks, model, optimizer = self._to_save("save_state", output_dir)
        if not safe_serialization:
            raise ValueError("safe_serialization=False is not supported: tensors are written in safetensors' format")
        extra = {
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
            "objects": [registered.state_dict() for registered in self._custom_objects],
            "epochs": [loader.iteration for loader in self._dataloaders],
            "steps": [self._steps, self._seed],
            "random states": generator_states(self.device),
        }
        ranks.save(output_dir, model, optimizer, extra)

    def load_state(self, input_dir: Any = None) -> None:
        """Reads what `save_state` has written at any degree, into objects that were prepared in the same order.

        Raises:
            ValueError: as for `save_state`; another number of schedulers, registered objects or loaders.
        """
        ranks, model, optimizer = self._to_save("load_state", input_dir)
        extra = ranks.load(input_dir, model, optimizer)
        prepared = {"schedulers": self._schedulers, "objects": self._custom_objects, "epochs": self._dataloaders}
        for name, own in prepared.items():
            if len(own) != len(extra[name]):
                raise ValueError(f"{input_dir} has {len(extra[name])} {name}, and {len(own)} were prepared")
            for restored, state in zip(own, extra[name], strict=True):
                restored.set_epoch(state) if name == "epochs" else restored.load_state_dict(state)
        self._local = 0
        self._steps, self._seed = extra["steps"]
        set_generator_states(extra["random states"], self.device)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The whole model's state dict, on every rank: `full_state_dict`, in which tied weights are one tensor, so that
        `save_model` writes one of them as accelerate does. A collective of all ranks."""
        model = self.unwrap_model(model) if unwrap else model
        whole = full_state_dict(model)
        names: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            whole[name] = whole[names.setdefault(id(tensor), name)]
        return whole

    def _to_save(self, what: str, folder: Any) -> tuple[Ranks, nn.Module, torch.optim.Optimizer | None]:
        problem = None
        if folder is None:
            problem = "needs a folder: automatic_checkpoint_naming is not supported"
        elif self._save_model_state_pre_hook or self._load_model_state_pre_hook:
            problem = "runs no registered hooks"
        elif self.ranks is None or len(self._models) != 1 or len(self._optimizers) > 1:
            problem = (
                f"is for one model and one optimizer, and {len(self._models)} and {len(self._optimizers)} were "
                "prepared: take tp_invariant.checkpoint.save and .load for each, with the optimizer's .optimizer"
            )
        elif self._local and self._current_step is not None and self._current_step.added:
            problem = "was called inside of a step: call it where sync_gradients is True, after the optimizer's step"
        if problem is not None or self.ranks is None:
            raise ValueError(f"{what}({folder!r}) {problem}")
        optimizer = self._optimizers[0].optimizer if self._optimizers else None
        return self.ranks, self.unwrap_model(self._models[0]), optimizer


class _Loader(DataLoaderShard):
    """accelerate's, which gives the batches of this data parallel rank, and says how many it has left with that one.

    Every rank reads all batches, so that a dataset or a collate_fn that draws random numbers, or counts, does it as on
    one process. Of a step's a rank takes consecutive ones; of a model of fully_shard, every n-th.
    """

    accelerator: Accelerator
    shared: bool
    left: int | None

    @classmethod
    def of(cls, prepared: DataLoaderShard, accelerator: Accelerator, shared: bool) -> _Loader:
        loader = cls.__new__(cls)
        loader.__dict__.update(vars(prepared), accelerator=accelerator, shared=shared, left=None)
        return loader

    def check_shares(self) -> None:
        """Raises: ValueError: the loader is shared and of unknown length, or its last step cannot be shared evenly."""
        if not self.shared:
            return
        try:
            batches = super().__len__()
        except TypeError:
            raise ValueError(
                f"a loader of {type(self.dataset).__name__} on rank {self.accelerator._dp.rank} of dp_group has no "
                "known length, so that its batches cannot be shared between data parallel ranks: give one of a dataset "
                "with a length; or share its examples yourself, the same number of batches on every rank, and call "
                "prepare_data_loader(loader, shared=False)"
            ) from None
        self.share(batches % self.accelerator.gradient_accumulation_steps)

    def __len__(self) -> int:
        return super().__len__() // (self.accelerator._dp.size if self.shared else 1)

    def __iter__(self) -> Iterator[Any]:
        try:
            self.left = len(self) + 1
        except TypeError:  # an iterable dataset
            self.left = None
        for batch in self._own() if self.shared else super().__iter__():
            if self.end_of_dataloader and self.accelerator._cuts_iterable and isinstance(self.dataset, IterableDataset):
                with contextlib.suppress(TypeError, IndexError):  # a batch without tensors
                    self.remainder = find_batch_size(batch)
            if self.left is not None:
                self.left -= 1
            yield batch

    def _own(self) -> Iterator[Any]:
        batches, left, ranks = super().__iter__(), super().__len__(), self.accelerator.ranks
        first = True
        while left > 0:
            size = min(left, self.accelerator.gradient_accumulation_steps)
            step = list(itertools.islice(batches, size))
            if first and ranks is not None:
                ranks.check_batches(step)
            own, left, first = [step[number] for number in self.share(size)], left - size, False
            for batch in own[:-1]:
                self.end_of_dataloader = False  # accelerate has read the step's last batch, and would end here
                yield batch
            self.end_of_dataloader = left <= 0
            yield own[-1]
        next(batches, None)  # accelerate's end of an epoch

    def share(self, size: int) -> range:
        """Which of a step's `size` micro-batches are this rank's.

        Raises:
            ValueError: they cannot be shared evenly.
        """
        ranks, rank = self.accelerator._dp.size, self.accelerator._dp.rank
        if size % ranks:
            raise ValueError(
                f"an epoch's last step has {size} batches on rank {rank} of dp_group, which cannot be shared "
                f"between its {ranks} ranks: give the loader examples for a multiple of them, or drop_last and the "
                "like; one for evaluation goes to prepare_data_loader(loader, shared=False)"
            )
        if self.accelerator.ranks is not None and self.accelerator.ranks.fully_sharded:
            return range(rank, size, ranks)  # as MicroBatchTree shares them
        own = size // ranks
        return range(rank * own, (rank + 1) * own)
