"""What TRL's GRPOTrainer and RLOOTrainer need besides: texts and their probabilities that no degree changes.

TRL takes every rank for a data parallel one, scores left-padded texts without their positions, and draws tokens by
torch's generator. Here each rank sees the whole generation, its texts are drawn by keys, and TRL's own code works on it
as that of one process.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..checkpoint.full_state import layers_group
from ..checkpoint.hand_over import hand_over
from ..comm.collectives import ranks_of
from ..core.mode import is_tp_invariant_mode_enabled
from ..sampling.draws import KeyedDraws
from ..sampling.log_probs import log_softmax, token_log_probs
from .trainer import Trainer
from .training import seeded

_NOT_TAKEN = ("tools", "environment_factory", "rollout_func", "peft_config", "quantization_config")


class Rollouts(Trainer):
    """TRL's GRPOTrainer or RLOOTrainer over tensor parallel ranks, and over data parallel ones.

    Args:
        model, reward_funcs, args, others: as for TRL's. reward_funcs are called on rank 0 alone, unless one is a model.
            Of `args` the number of texts in a generation is per_device_train_batch_size x steps_per_generation, which
            by default is gradient_accumulation_steps; generation_batch_size follows from these.
        sampler: a model that writes the texts, of the same parameters, at any degree over the ranks of the job; before
            each generation it gets the trained model's weights. None: the trained model.
        ref_model: the reference model of beta > 0.
        dp_group: as for `Trainer`.

    Raises:
        ValueError: as `Trainer`; tools, environments, a rollout_func, PEFT, quantization and vLLM; transformers'
            continuous batching over some of the ranks, or with bf16 and sampler; beta > 0 without ref_model;
            num_generations that does not divide a generation.
        NotImplementedError: when training begins: images; a loss of the router.
    """

    reward_funcs: Any  # these are TRL's
    _tokenizer: Any
    _metrics: Any
    _pending_metrics: Any
    _step: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float | None
    max_completion_length: int
    eos_token_ids: list[int]
    use_transformers_continuous_batching: bool
    continuous_batching_config: Any
    _per_epoch = 0  # micro-batches

    def __init__(
        self,
        model: nn.Module,
        reward_funcs: Any = None,
        args: Any = None,
        *,
        sampler: Any = None,
        ref_model: nn.Module | None = None,
        **others: Any,
    ) -> None:
        if args is None:
            raise ValueError("give args, a GRPOConfig or RLOOConfig")
        for name in _NOT_TAKEN:
            if others.get(name) is not None:
                raise ValueError(f"{name} is not supported: only texts that the model writes by itself in one turn are")
        args, beta = copy.copy(args), args.beta
        if beta and ref_model is None:
            raise ValueError(f"beta={beta} needs ref_model, the reference model after parallelize; or beta=0.0")
        args.beta = 0.0  # with another TRL would load the reference model by itself, whole on every rank
        args.generation_batch_size = args.per_device_train_batch_size * args.steps_per_generation
        if args.generation_batch_size % args.num_generations:
            raise ValueError(
                f"num_generations={args.num_generations} does not divide a generation's texts, "
                f"per_device_train_batch_size={args.per_device_train_batch_size} x steps_per_generation="
                f"{args.steps_per_generation}, which are those of all ranks together"
            )
        evaluated = args.num_generations_eval or args.num_generations
        if args.eval_strategy != "no" and args.per_device_eval_batch_size % evaluated:
            raise ValueError(
                f"the number of texts for each prompt of an evaluation, {evaluated}, does not divide "
                f"per_device_eval_batch_size={args.per_device_eval_batch_size}, the texts of all ranks together"
            )
        super().__init__(model, args, reward_funcs=reward_funcs, **others)
        ours: Any = self.args  # a copy
        self.beta = ours.beta = beta
        self.ref_model = ref_model.eval() if beta and ref_model is not None else None  # without dropout, as TRL's
        self.sampler = model if sampler is None else sampler
        self._sampled: list[list[float]] | Tensor | None = None  # log-probabilities that were not compared yet
        self._evaluations = 0  # batches of evaluation since the last step
        own = layers_group(self.sampler, of_replica=True)
        self._writes = own.rank == 0  # whether this rank gives the others the texts of its copy of the sampler
        if sampler is None:
            together = self.ranks.fully_sharded or self.ranks.experts_over_data  # whose forwards are collectives
            self._copies, self._copy = (1, 0) if together else (self.ranks.dp.size, self.ranks.dp.rank)
        else:
            firsts = self.ranks.gather(ranks_of(own)[0])
            self._copies, self._copy = len({*firsts}), sorted({*firsts}).index(ranks_of(own)[0])
        apart = 1 < own.size < self.ranks.size  # whose engines would make groups that torch takes for one another
        if self.use_transformers_continuous_batching and (
            apart or (sampler is None and self._copies < self.ranks.dp.size)
        ):
            raise ValueError(
                f"use_transformers_continuous_batching with a sampler over {own.size} of {self.ranks.size} ranks, or a "
                "model of fully_shard: give sampler=, a copy of the model on one rank or over all, or leave it out"
            )
        if self.use_transformers_continuous_batching and sampler is not None and self.args.bf16:
            raise ValueError(
                "bf16=True does not reach the thread in which transformers' engine runs sampler: give both models in "
                "bfloat16 or float32 and bf16=False, or leave use_transformers_continuous_batching out"
            )
        for scored in (model, *((ref_model,) if beta else ())):
            _score_here(scored, self.temperature)

    # --- a step -----------------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> Any:
        """The next step's micro-batches, after the generations that are due in it: every rank takes part in these."""
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.model.train()
        before, self._evaluations = self._micro_batches_before(), 0
        prepared = []
        for number, batch in enumerate(samples, before):
            self._step = number  # TRL's own, by which it knows when to generate, and which part of a generation is due
            prepared.append(self._prepare_inputs(batch))
        assert self._current_step is not None
        self._step = before + len(samples) - (len(self._current_step.share) if samples else 0)  # it counts those, too
        return prepared, items

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        try:
            self._per_epoch = len(train_dataloader)
        except TypeError:  # a dataset without a length
            self._per_epoch = max_steps * self.args.gradient_accumulation_steps
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _micro_batches_before(self) -> int:
        """How many micro-batches the steps before this one had. An epoch's last step may have fewer."""
        per_step = self.args.gradient_accumulation_steps
        epochs, steps = divmod(self.state.global_step, -(-self._per_epoch // per_step))
        return epochs * self._per_epoch + steps * per_step

    def _prepare_inputs(self, inputs: Any) -> Any:
        """A micro-batch from examples, for which a generation may be due. One that is prepared stays as it is."""
        if not isinstance(inputs, list):
            return inputs
        if not self.model.training:
            self._evaluations += 1
        place = (self.args.seed, self._place())
        with _as_one_process(), seeded(place, self.args.device):
            theirs: Any = super()
            return theirs._prepare_inputs(inputs)

    def _place(self) -> str:
        if self.model.training:
            return f"micro-batch {self._step}"
        return f"evaluation {self._evaluations} after step {self.state.global_step}"

    def _calculate_rewards(self, *texts: Any, **others: Any) -> Tensor:
        """Those of rank 0, on every rank, as are what functions give log_metric, and the random numbers afterwards."""
        theirs: Any = super()
        everywhere = any(isinstance(function, nn.Module) for function in self.reward_funcs)

        def rewards() -> Any:
            return theirs._calculate_rewards(*texts, **others).cpu() if everywhere or self.ranks.index == 0 else None

        with seeded((self.args.seed, self._place(), "rewards"), self.args.device):
            own = self.ranks.run("the reward functions", rewards)
        of_first, metrics = self.ranks.gather((own, dict(self._pending_metrics)))[0]
        self._pending_metrics.clear()
        self._pending_metrics.update(metrics)
        return of_first.to(self.args.device)

    # --- texts ------------------------------------------------------------------------------------------------------

    def sample(self, prompts: list[list[int]], images: Any, fields: Any) -> tuple[list[list[int]], list[list[float]]]:
        """A text for each prompt, and the log-probabilities of its tokens, on every rank. A collective."""
        if images is not None or fields:
            raise NotImplementedError(f"prompts with images ({sorted(fields)}) are not supported")
        if not all(prompts):
            raise ValueError(f"prompt {prompts.index([])} of a generation has no tokens: begin it with one, as a BOS")
        if self.sampler is not self.model:
            hand_over(self.model, self.sampler)
        rows = range(self._copy, len(prompts), self._copies)
        names = [f"{self._place()}, text {row}" for row in rows]
        with seeded((self.args.seed, f"{self._place()}, texts"), self.args.device):  # what comes after draws its own
            texts = self._drawn([prompts[row] for row in rows], names) if names else []
        everyone = self.ranks.gather(dict(zip(rows, texts, strict=True)) if self._writes else {})
        merged = {row: text for of_rank in reversed(everyone) for row, text in of_rank.items()}
        ids, log_probs = zip(*(merged[row] for row in range(len(prompts))), strict=True)
        self._sampled = [*log_probs]
        return [*ids], [*log_probs]

    def _drawn(self, prompts: list[list[int]], names: list[str]) -> list[tuple[list[int], list[float]]]:
        device: Any = self.args.device
        model: Any = self.sampler
        ids, mask = (
            pad_sequence([torch.tensor(p, device="cpu") for p in rows], True, value, padding_side="left").to(device)
            for rows, value in ((prompts, self._tokenizer.pad_token_id), ([[1] * len(p) for p in prompts], 0))
        )
        draws = KeyedDraws(
            self.args.seed, names, attention_mask=mask, temperature=self.temperature, top_k=self.top_k or None,
            top_p=self.top_p, min_p=self.min_p, keep_log_probs=True,
        )  # fmt: skip
        config = transformers.GenerationConfig(
            max_new_tokens=self.max_completion_length, eos_token_id=self.eos_token_ids,
            pad_token_id=self._tokenizer.pad_token_id, bos_token_id=self._tokenizer.bos_token_id,
        )  # fmt: skip
        own, training = model.generation_config, model.training
        model.generation_config = config  # generate would take from the model's what this one does not say
        try:
            with torch.no_grad(), self.accelerator.autocast():
                model.eval()  # without dropout, and with a cache where gradients are checkpointed
                if self.use_transformers_continuous_batching:  # an engine for each generation: the weights change
                    results = model.generate_batch(
                        prompts, config, self.continuous_batching_config, logits_processor=[draws]
                    )
                    return [(result.generated_tokens, result.logprobs) for result in results.values()]
                # synced_gpus: of fully_shard, whose ranks all write the same texts here, so that none waits for another
                written = model.generate(
                    ids, attention_mask=mask, generation_config=config, logits_processor=[draws], synced_gpus=False
                )
        finally:
            model.generation_config = own
            model.train(training)
        completions, log_probs = written[:, ids.shape[1] :], torch.stack(draws.log_probs or [], dim=1)
        ends = torch.isin(completions, torch.tensor(self.eos_token_ids, device=device))
        lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, completions.shape[1]).tolist()
        return [
            (row[:length], probs[:length])
            for row, probs, length in zip(completions.tolist(), log_probs.tolist(), lengths, strict=True)
        ]

    # --- probabilities ----------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        theirs: Any = super()
        scored = theirs._generate_and_score_completions(inputs)
        self._sampled = None
        return scored

    def _compute_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        if "old_per_token_logps" not in inputs and "old_logps" not in inputs:
            self._sampled = inputs.get("sampling_per_token_logps")
        theirs: Any = super()
        loss: Tensor = theirs._compute_loss(model, inputs)
        self._sampled = None
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *more: Any,
        **options: Any,
    ) -> Any:
        """TRL's, by `token_log_probs`. The model's first ones after a generation are compared with the sampler's."""
        theirs: Any = super()
        scored = theirs._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *more, **options
        )
        if self._sampled is not None and model is not self.ref_model:
            sampled = self._sampled
            if isinstance(sampled, list):
                sampled = pad_sequence([torch.tensor(row, device="cpu") for row in sampled], True)
            width = scored[0].shape[1]
            sampled = nn.functional.pad(sampled, (0, width - sampled.shape[1])).to(scored[0].device)
            differences = (scored[0].detach() - sampled).abs()[attention_mask[:, -width:] != 0]
            largest = differences.max().item() if differences.numel() else 0.0
            mode = "train" if self.model.training else "eval"
            self._metrics[mode]["sampling/sampling_logp_difference/max"].append(largest)
            self._sampled = None
        return scored


@contextlib.contextmanager
def _as_one_process() -> Iterator[None]:
    """accelerate's own functions return what they get: each rank has the whole generation."""
    state: Any = PartialState()
    before, state.distributed_type = state.distributed_type, DistributedType.NO
    try:
        yield
    finally:
        state.distributed_type = before


# --- the output layer -------------------------------------------------------------------------------------------------


def _score_here(model: Any, temperature: float) -> None:
    """Gives the model a forward for TRL's fused_lm_head=True, as TRL's own that it replaces, by `token_log_probs`."""
    theirs = model.forward
    compared = False

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **options: Any) -> Any:
        nonlocal compared
        if not fused_lm_head:
            return theirs(*args, **options)
        scored = _score(self, temperature, *args, **options)
        if not compared and is_tp_invariant_mode_enabled():
            compared = True
            _compare_with_logits(self, theirs, temperature, options)
        return scored

    model.forward = types.MethodType(forward, model)


def _score(
    model: Any, temperature: float, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **options: Any
) -> Any:
    """Log-probability and entropy of each label but the first -> fp32 [rows, tokens - 1]; 0 where it is -100."""
    from trl.trainer.utils import FusedCausalLMOutput

    if options.get("output_router_logits"):
        raise NotImplementedError("the router's loss is not supported here: set router_aux_loss_coef=0.0")
    # as generate counts them: without padding
    options.setdefault("position_ids", (attention_mask.cumsum(1) - 1).clamp(min=0))
    outputs = model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **options)
    hidden, labels = outputs.last_hidden_state[:, :-1], labels[:, 1:]
    wanted, config = labels != -100, model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    log_probs, entropies = (
        hidden.new_zeros(labels.shape, dtype=torch.float32).masked_scatter(wanted, values)
        for values in token_log_probs(
            hidden[wanted],
            model.get_output_embeddings(),
            labels[wanted],
            temperature=temperature,
            return_entropy=True,
            logit_scale=scale,
            softcap=getattr(config, "final_logit_softcapping", None),
        )
    )
    return FusedCausalLMOutput(log_probs=log_probs, entropy=entropies, label_mask=wanted)


def _compare_with_logits(model: Any, theirs: Any, temperature: float, options: dict[str, Any]) -> None:
    """Raises: ValueError: the model's own logits of the first text have other log-probabilities than `_score`'s."""
    first = {name: value[:1] for name, value in options.items() if isinstance(value, Tensor)}
    labels, training = first["labels"], model.training
    model.eval()
    try:
        with torch.no_grad():
            scored = _score(model, temperature, **first).log_probs
            positions = (first["attention_mask"].cumsum(1) - 1).clamp(min=0)
            logits = theirs(
                input_ids=first["input_ids"], attention_mask=first["attention_mask"], position_ids=positions
            ).logits
    finally:
        model.train(training)
    wanted = labels[:, 1:] != -100
    expected = log_softmax(logits[:, :-1], temperature=temperature).gather(2, labels[:, 1:, None].clamp(min=0))[..., 0]
    if not torch.equal(scored[wanted], expected[wanted]):
        raise ValueError(
            f"{type(model).__name__} computes its logits by more than its output layer, a logit_scale, logits_scaling "
            "and final_logit_softcapping: its log-probabilities differ from those of tp_invariant.token_log_probs. "
            "Train it by a loop of your own"
        )
