"""transformers' Trainer for models that parallelize has changed: one set of TrainingArguments, one set of bits.

    mesh = init_device_mesh("cuda", (dp, tp), mesh_dim_names=("dp", "tp"))
    tpi.parallelize(model, mesh["tp"])
    trainer = tp_invariant.integrations.trainer.Trainer(model, args, train_dataset=data, dp_group=mesh["dp"])
    trainer.train()

What differs from transformers' own, which takes every rank for a data parallel one:

    the model      is not wrapped; gradients are summed over dp_group by a MicroBatchTree
    a step         has per_device_train_batch_size x gradient_accumulation_steps examples at every degree: data parallel
                   ranks share its micro-batches, so gradient_accumulation_steps counts those of all ranks together
    batches        are read by every rank, which compares them with the others', as it does its optimizer's rates, betas
                   and the like, and computes those of its share
    the loss       is over the tokens of the whole step
    random numbers in a micro-batch's forward (dropout) depend on the seed, the step and the micro-batch alone
    clipping       is tp_invariant.clip_grad_norm_
    evaluation     is of the whole set on every data parallel rank
    checkpoints    hold what transformers writes of the whole model, and besides, in the folder tp_invariant, a
                   checkpoint of this library's with the optimizer, the schedule and the states of random generators,
                   from which any degree goes on
    rank 0         alone writes files and logs

TRL's SFTTrainer, DPOTrainer, GRPOTrainer and RLOOTrainer train in this way too: see trl.py.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn

from ..checkpoint.full_state import entry_of, full_state_dict
from ..diagnostics.digest_log import DigestLog
from ..layers.parallel_norm import ParallelNorm
from ..layers.parameters import named_shard_specs
from .accelerate import Accelerator
from .training import GroupOrMesh, Ranks, Step, generator_states, seeded, set_generator_states
from .trl_measurements import Measurements, check_trl

FOLDER = "tp_invariant"  # in a checkpoint of transformers'
_logger = logging.getLogger("tp_invariant")

# options of TrainingArguments that are honoured, or that say nothing to a Trainer. Any other must have its default
# value, those of later versions too.
_NAMES = """
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
    lr_scheduler_kwargs warmup_steps warmup_ratio optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
    gradient_accumulation_steps average_tokens_across_devices max_grad_norm bf16 activation_checkpointing
    activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs use_cache
    torch_empty_cache_steps logging_strategy logging_steps logging_first_step logging_dir log_on_each_node
    logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name
    project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay
    per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object
    eval_accumulation_steps include_for_metrics save_only_model save_strategy save_steps save_total_limit
    load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
    restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu dataloader_drop_last
    dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names train_sampling_strategy
    length_column_name ddp_timeout skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint local_rank
    hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision fsdp_config accelerator_config
    liger_kernel_config optim_target_modules
"""
# the same of TRL's SFTConfig and DPOConfig: the examples, and a micro-batch's loss
_NAMES_OF_TRL = """
    dataset_text_field dataset_num_proc eos_token pad_token max_length truncation_mode shuffle_dataset packing
    packing_strategy pad_to_multiple_of eval_packing completion_only_loss assistant_only_loss loss_type loss_weights
    disable_dropout ld_alpha f_divergence_type f_alpha_divergence_coef label_smoothing beta discopop_tau
"""
# the same of its GRPOConfig and RLOOConfig: generations, rewards, and a micro-batch's loss
_NAMES_OF_ROLLOUTS = """
    num_generations num_generations_eval max_completion_length pad_to_multiple_of generation_batch_size
    steps_per_generation temperature top_p top_k min_p chat_template_kwargs num_iterations epsilon delta epsilon_high
    sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg
    importance_sampling_level reward_weights multi_objective_aggregation scale_rewards mask_truncated_completions
    top_entropy_quantile entropy_coef off_policy_mask_threshold use_bias_correction_kl log_completions
    num_completions_to_print log_unique_prompts normalize_advantages reward_clip_range
    use_transformers_continuous_batching transformers_continuous_batching_config
"""
# of the former, those of the last two lines do something only with others, which are refused
HONOURED = frozenset(f"{_NAMES} {_NAMES_OF_TRL} {_NAMES_OF_ROLLOUTS}".split())
_ADVICE = {
    "deepspeed": "parallelize shards the model; leave DeepSpeed out",
    "fsdp": "call fully_shard on the model before the Trainer gets it, and leave fsdp out",
    "parallelism_config": "parallelize says over which ranks the model is sharded, dp_group the data parallel ranks",
    "torch_compile": "compile the model's layers yourself, before the Trainer gets it",
    "fp16": "use bf16=True, which needs no loss scaling, or write the loop with tp_invariant.optim.GradScaler",
    "label_smoothing_factor": "give compute_loss_func, with tp_invariant.vocab_parallel_cross_entropy(.., "
    "label_smoothing=..): with tp_group=None for whole logits, as those of a model on its own plan are; with the "
    "model's tp_group if your plan has 'colwise' for the output layer, which leaves them sharded",
    "push_to_hub": "upload what save_model has written",
}
_ADVICE_OF_TRL = {
    "use_vllm": "pass sampler=, a copy of the model at the degree that you want to sample at",
    "use_adaptive_entropy": "it sums over the micro-batches of one rank; give entropy_coef",
}


class DigestLogCallback(transformers.TrainerCallback):
    """Writes a tp_invariant.DigestLog: a line for each step, for `tp-invariant diff`.

    Trainer(.., callbacks=[DigestLogCallback("run.log")])
    """

    trainer: Trainer | None = None  # set by the Trainer that it is given to

    def __init__(self, path: str) -> None:
        self.path = path
        self._log: DigestLog | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        trainer = self.trainer
        assert trainer is not None

        def start() -> DigestLog | None:
            if trainer.ranks.experts_over_data:
                raise ValueError(
                    f"DigestLogCallback on rank {trainer.ranks.index}: experts are divided over data parallel ranks, "
                    "and it logs the parameters of one. Compare tp_invariant.full_state_dict(model)"
                )
            if trainer.ranks.dp.rank:
                return None  # all data parallel ranks have the same parameters
            return DigestLog(self.path, trainer.model, tp_group=trainer.ranks.tp)

        self._log = trainer.ranks.run(f"opening {self.path}", start)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        assert self.trainer is not None
        if self._log is not None:
            self._log.write(state.global_step, loss=self.trainer.step_loss, gradient_norm=self.trainer.step_norm)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._log is not None:
            self._log.close()


class Trainer(transformers.Trainer):
    """transformers' Trainer over tensor parallel ranks, and over data parallel ones. See this file's head.

    Args:
        model: after parallelize, and fully_shard over dp_group if you want it. A model of other modules is trained
            over the data parallel ranks alone.
        args: TrainingArguments, the same on every rank. The Trainer works with a copy.
        dp_group: a ProcessGroup or 1-D DeviceMesh of the ranks that hold the same shards, or parts of them by
            fully_shard; None: there is one of each.
        others: as for transformers' Trainer.

    Raises:
        ValueError: an option of `args` that is not honoured, by name; fewer micro-batches than data parallel ranks;
            ranks whose `args` differ; groups or a fully_shard that do not fit the job (`Ranks`); model_init. When
            training begins: an epoch's last step that data parallel ranks of fully_shard cannot share evenly.
        ImportError: an old version of transformers, whose Trainer has other parts.
        TypeError, ValueError: when training begins: an optimizer whose bits depend on where a parameter is cut.
    """

    model: Any

    def __init__(
        self,
        model: nn.Module,
        args: transformers.TrainingArguments | None = None,
        *positional: Any,
        dp_group: GroupOrMesh = None,
        **others: Any,
    ) -> None:
        if not isinstance(model, nn.Module) or others.get("model_init") is not None:
            raise ValueError("Trainer needs a model that parallelize has changed: model_init is not supported")
        if not hasattr(transformers.Trainer, "_prepare_for_training"):
            raise ImportError(f"transformers {transformers.__version__} is too old for this Trainer, 5.17 is not")
        self.ranks = Ranks(model, dp_group)
        check_trl(type(self), model, self.ranks)
        args = transformers.TrainingArguments(output_dir="tmp_trainer") if args is None else args
        given = others.get("optimizers", (None, None))[0] is not None or others.get("optimizer_cls_and_kwargs")
        self._current_step: Step | None = None
        self._next_micro_batch = 0  # which of the step's micro-batches comes next
        self._measurements = Measurements(self, self.ranks)
        self._rng: dict[str, Any] | None = None
        self.step_loss: Tensor | None = None  # of the last step, and its gradients' norm
        self.step_norm: Tensor | None = None
        own = _own_arguments(args, self.ranks, model, bool(given))
        if positional:
            super().__init__(model, own, *positional, **others)
        else:  # TRL's may have another order
            super().__init__(model, args=own, **others)
        for callback in self.callback_handler.callbacks:
            self._introduce(callback)

    def _introduce(self, callback: Any) -> None:
        if isinstance(callback, DigestLogCallback):
            callback.trainer = self

    def add_callback(self, callback: Any) -> None:
        super().add_callback(callback)
        for added in self.callback_handler.callbacks:
            self._introduce(added)

    def create_accelerator_and_postprocess(self) -> None:
        """transformers makes accelerate's Accelerator here, and has no place for another."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator
        self.accelerator.ranks = self.ranks
        self.accelerator.check_settings()
        self.gather_function = self.accelerator.gather_for_metrics

    # --- a step -----------------------------------------------------------------------------------------------------

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        # each rank has looked by itself for what there is to go on from
        facts = {"resume_from_checkpoint": str(resume_from_checkpoint), "its last step": self.state.global_step}
        self.ranks.check_alike(facts, "Every rank must see the same checkpoint")
        self._agree_on_best_model()
        try:
            whole_steps, rest = divmod(len(train_dataloader), self.args.gradient_accumulation_steps)
        except TypeError:  # a dataset without a length
            whole_steps, rest = max_steps, 0
        if max_steps > whole_steps:
            self.ranks.check_shared(rest, "an epoch's last step has")
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self._current_step = Step(self.ranks, [self.model])
        return prepared

    def _agree_on_best_model(self) -> None:
        """transformers asks on each rank whether the checkpoint is there: that of rank 0, which writes, counts."""
        self.state.best_model_checkpoint = self.ranks.gather(self.state.best_model_checkpoint)[0]

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> Any:
        """The next step's micro-batches, of all data parallel ranks.

        Raises:
            ValueError: on every rank: ranks have read different ones, or their optimizers' hyperparameters
                differ; a dataset without a length ended inside a step.
        """
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.ranks.check_batches(samples)
        self.ranks.check_hyperparameters([self.optimizer])
        if 0 < len(samples) < num_batches:
            raise ValueError(
                f"the dataset ended after {len(samples)} of a step's {num_batches} micro-batches on rank "
                f"{self.ranks.index}: give one whose length is known, or a multiple of a step's examples"
            )
        assert self._current_step is not None
        self._next_micro_batch = 0
        if samples:
            self._current_step.start(len(samples))
        return samples, items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One of the step's micro-batches, if it is in this rank's share. The last one returns the step's loss."""
        step = self._current_step
        assert step is not None
        index, self._next_micro_batch = self._next_micro_batch, self._next_micro_batch + 1
        due = step.due(index, inputs)
        if due is not None:
            index, inputs = due
            with seeded((self.args.seed, self.state.global_step, index), self.args.device):
                loss = self._measurements.of_next(
                    lambda: super(Trainer, self).training_step(model, inputs, num_items_in_batch)
                )
            step.add(loss)
        if self._next_micro_batch < step.micro_batches:
            return torch.zeros((), device=self.args.device)
        self._measurements.gather(step.share)
        self.step_loss = step.finish()
        return self._logged_loss(step)

    def _logged_loss(self, step: Step) -> Tensor:
        """The step's loss; of each micro-batch whose own is not finite, transformers logs the mean of those before."""
        assert step.losses is not None and self.step_loss is not None
        if not self.args.logging_nan_inf_filter or self.step_loss.isfinite():
            return self.step_loss
        total = before = self._tr_loss.clone()
        for loss in step.losses:
            steps = 1 + self.state.global_step - self._globalstep_last_logged
            total = total + (loss if loss.isfinite() else total / steps)
        return total - before

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """transformers' own, which knows a LayerNorm by its class: without those of this library's norms that are one.

        So a parameter decays alike whether `parallelize` has replaced the norm, as it does for sequence parallelism, or
        not.
        """
        norms = {
            id(p)
            for module in model.modules()
            if getattr(module, "normalization", None) == "LayerNorm"
            for name, p in module.named_parameters(recurse=False)
            if isinstance(module, ParallelNorm) or name.startswith("layer_norm")
        }
        parameters = dict(model.named_parameters(remove_duplicate=False))
        return [name for name in super().get_decay_parameter_names(model) if id(parameters[name]) not in norms]

    def _has_mixed_mesh_grads(self, model: Any) -> bool:
        return False  # clip_grad_norm_ takes gradients on any meshes

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        self.step_norm = super()._get_grad_norm(model, grad_norm)
        return self.step_norm

    def floating_point_ops(self, inputs: Any) -> int:
        """As transformers counts them, of the whole model."""
        name = getattr(self.model, "main_input_name", "input_ids")
        counted = name in inputs and hasattr(self.model, "num_parameters")
        return 6 * inputs[name].numel() * self._whole_size if counted else 0

    @functools.cached_property
    def _whole_size(self) -> int:
        """The number of parameters but for those of embeddings, as transformers' `num_parameters`."""
        embeddings = {
            f"{name}.weight" for name, module in self.model.named_modules() if isinstance(module, nn.Embedding)
        }
        specs = {id(p): spec for _, p, spec in named_shard_specs(self.model)}
        counted = [p for name, p in self.model.named_parameters() if name not in embeddings]
        return sum(entry_of(p, specs[id(p)]).full_shape.numel() for p in counted)

    # --- files ------------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.ranks.run("saving a checkpoint", lambda: super(Trainer, self)._save_checkpoint(model, trial))
        self._agree_on_best_model()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the whole model, on rank 0. Every rank calls it: in some versions the others would skip `_save`."""
        self._save(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """What transformers writes of the whole model, on rank 0. Every rank calls it."""
        folder = Path(str(self.args.output_dir if output_dir is None else output_dir))
        first = self.ranks.index == 0

        def write() -> None:
            if first:
                folder.mkdir(parents=True, exist_ok=True)
            if not self.ranks.saves:
                return
            if hasattr(self.model, "save_pretrained"):
                self.model.save_pretrained(folder, state_dict=state_dict, is_main_process=first)
            else:
                whole = full_state_dict(self.model, rank0_only=True, cpu_offload=True)
                if first:
                    torch.save(whole, folder / "pytorch_model.bin")
            if first:
                tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
                if tokenizer is not None:
                    tokenizer.save_pretrained(folder)
                torch.save(self.args, folder / "training_args.bin")

        self.ranks.run(f"saving {folder}", write)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.lr_scheduler is not None
        extra = {"scheduler": self.lr_scheduler.state_dict(), "rng": generator_states(self.args.device)}
        self.ranks.save(Path(output_dir) / FOLDER, self.model, _unwrapped(self.optimizer), extra)

    def _save_rng_state(self, output_dir: str) -> None:
        """They are in this library's checkpoint."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing: the model is loaded together with the optimizer."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        extra = self.ranks.load(Path(checkpoint) / FOLDER, self.model, _unwrapped(self.optimizer))
        assert self.lr_scheduler is not None
        self.lr_scheduler.load_state_dict(extra["scheduler"])
        self._rng = extra["rng"]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self._rng is not None:
            set_generator_states(self._rng, self.args.device)

    def _load_best_model(self) -> None:
        self.ranks.load(Path(self.state.best_model_checkpoint or "") / FOLDER, self.model)


def _own_arguments(
    args: transformers.TrainingArguments, ranks: Ranks, model: nn.Module, has_optimizer: bool
) -> transformers.TrainingArguments:
    """A copy of args that makes of each rank the one process of its run, by which rank 0 alone writes and logs.

    Raises:
        ValueError: see Trainer.
    """
    defaults = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(args)
    }
    for name, default in defaults.items():
        value = getattr(args, name)
        if name not in HONOURED and value != default and (value or default):
            raise ValueError(
                f"TrainingArguments: {name}={value!r} on rank {ranks.index} is not supported, only {default!r}: "
                f"{(_ADVICE | _ADVICE_OF_TRL).get(name, 'it would act on a rank by itself, or is not known here')}"
            )
    facts = {f"TrainingArguments.{name}": repr(getattr(args, name)) for name in defaults if name not in _OWN}
    ranks.check_alike(facts, "Give the same on every rank")
    ranks.check_accumulation("gradient_accumulation_steps", args.gradient_accumulation_steps)
    ranks.check_shared(args.gradient_accumulation_steps, "gradient_accumulation_steps says")
    if args.load_best_model_at_end and args.save_only_model:
        raise ValueError(
            "load_best_model_at_end=True needs save_only_model=False: the model is read from the checkpoint"
        )
    args.device  # noqa: B018  # starts accelerate, which says how many processes it knows of
    ranks.check_job(PartialState().num_processes)
    own = copy.copy(args)
    own.distributed_state = SimpleNamespace(
        num_processes=1, process_index=ranks.index, local_process_index=ranks.index, distributed_type=DistributedType.NO
    )
    own._n_gpu = min(1, getattr(args, "_n_gpu", 0))
    own.average_tokens_across_devices = False  # every rank sees the whole step
    device = next(model.parameters()).device
    if own.optim == "adamw_torch_fused" and device.type == "cpu" and not has_optimizer:
        own.optim = transformers.training_args.OptimizerNames.ADAMW_TORCH
        if ranks.index == 0:
            _logger.info(
                "optim='adamw_torch_fused' is replaced by 'adamw_torch': on a CPU the fused form has other bits "
                "where a parameter is cut"
            )
    return own


# of each rank: not to be shown, or how it logs, which follows its logging levels, and where, with the time and the host
_OWN = {"local_rank", "hub_token", "logging_dir", "disable_tqdm", "log_level", "log_level_replica"}


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)
