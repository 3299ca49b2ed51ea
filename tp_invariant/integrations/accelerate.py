"""accelerate's Accelerator for a model of this library's: nothing is wrapped, and every rank gets the same batches.

    accelerator = tp_invariant.integrations.accelerate.Accelerator(mixed_precision="bf16")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    tp_invariant.checkpoint.save("folder", accelerator.unwrap_model(model), optimizer.optimizer)

Give optimizers and schedulers to `prepare` too, as accelerate's examples do. accelerate's own Accelerator wraps every
model in DistributedDataParallel over all ranks, which is refused, and gives each rank another batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import accelerate
import torch
from torch import Tensor, nn

from ..layers.grad_norm import clip_grad_norm_
from .optimizers import check_optimizer
from .ranks import Ranks

_CHECKPOINT = (
    "would write and read each rank's shards as if they were whole: use tp_invariant.checkpoint.save and .load, with "
    "the optimizer's .optimizer"
)


class Accelerator(accelerate.Accelerator):
    """accelerate's Accelerator, whose ranks all have the parts of one model: tensor parallelism alone.

    Every rank counts as the one process of a run without data parallelism: `num_processes` is 1, `gather` and
    `reduce` return what they get, and loaders are not split. `is_main_process` is accelerate's: rank 0 alone logs.
    Seed what shuffles alike on every rank: the first batch of each model is compared between the ranks.

    For data parallel ranks besides, take integrations.trainer.Trainer, or a loop with data_parallel.MicroBatchTree.

    Raises:
        ValueError: mixed_precision other than "no" and "bf16"; DeepSpeed, FSDP, Megatron-LM, parallelism_config,
            torch.compile, split_batches and dispatch_batches. At `prepare`: a model that is sharded over less than
            all ranks of the job; what `check_optimizer` of optimizers.py refuses.
    """

    ranks: Ranks | None = None  # of the model; the Trainer sets it
    flag_tensor: Any  # accelerate's own

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.check_settings()

    def check_settings(self) -> None:
        """Raises: ValueError: what this class cannot honour, by arguments, accelerate's config or the environment."""
        plugins = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin")
        for name in plugins:
            if getattr(self.state, name, None) is not None:
                raise ValueError(f"{name} is set: only tensor parallelism is supported, without a plugin")
        if getattr(self, "parallelism_config", None) is not None:
            raise ValueError("parallelism_config is set: parallelize says over which ranks the model is sharded")
        if self.mixed_precision not in ("no", "bf16"):
            raise ValueError(f"mixed_precision={self.mixed_precision!r} is not supported: choose 'no' or 'bf16'")
        if str(self.state.dynamo_plugin.backend).rpartition(".")[2] != "NO":
            raise ValueError("torch.compile by accelerate is not supported: compile the model's layers yourself")
        if self.split_batches or self.dispatch_batches:
            raise ValueError(
                f"split_batches={self.split_batches}, dispatch_batches={self.dispatch_batches}: every rank reads the "
                "whole batch; leave both out"
            )
        self.dataloader_config.dispatch_batches = False  # None would be True for iterable datasets

    @property
    def num_processes(self) -> int:
        return 1

    @property
    def use_distributed(self) -> bool:
        return False

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Autocast alone: accelerate wraps no model that is for evaluation."""
        if self.ranks is None:
            self.ranks = Ranks(model, None)
            if self.state.num_processes not in (1, self.ranks.size):
                raise ValueError(
                    f"the job has {self.state.num_processes} ranks, and the model is sharded over {self.ranks.size}: "
                    "data parallel ranks need integrations.trainer.Trainer, or a loop with data_parallel.MicroBatchTree"
                )
            self._compare_first(model, self.ranks)
        return super().prepare_model(model, device_placement, evaluation_mode=True)

    def _compare_first(self, model: nn.Module, ranks: Ranks) -> None:
        def compare(module: nn.Module, args: Any, kwargs: Any) -> None:
            ranks.check_batches([args, kwargs])
            handle.remove()

        handle = model.register_forward_pre_hook(compare, with_kwargs=True)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
        check_optimizer(getattr(optimizer, "optimizer", optimizer))
        return super().prepare_optimizer(optimizer, *args, **options)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """One step of it for each of the optimizer's: accelerate takes as many as the job has ranks."""
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True  # accelerate's word for it
        return prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **options: Any) -> Any:
        """The loader of every batch; its workers have the same seeds on every rank."""
        seed = getattr(data_loader, "worker_init_fn", None)
        if isinstance(seed, functools.partial) and "rank" in seed.keywords:  # transformers' own
            data_loader.worker_init_fn = functools.partial(seed, rank=0)
        return super().prepare_data_loader(data_loader, *args, **options)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """tp_invariant.clip_grad_norm_: the norm of the whole model, of the same bits at every degree."""
        return clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def gather(self, tensor: Any) -> Any:
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        return input_data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        return tensor

    def check_trigger(self) -> bool:
        """Whether `set_trigger` was called on any rank, on every rank alike. A collective."""
        own = bool(self.flag_tensor is not None and self.flag_tensor.item() >= 1)
        found = own if self.ranks is None else any(self.ranks.gather(own))
        if found:
            self.flag_tensor = torch.tensor(0, device=self.device)
        return found

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """`inputs`, whole: the ranks have the parts of one model."""
        yield inputs

    def pad_across_processes(self, tensor: Any, *args: Any, **options: Any) -> Any:
        return tensor

    def save_state(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"save_state {_CHECKPOINT}")

    def load_state(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"load_state {_CHECKPOINT}")

    def save_model(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"save_model {_CHECKPOINT}")
