"""`generate` of a parallelized model: its ranks compare the text after every step.

Each rank draws the tokens by itself. Ranks with seeds of their own draw different ones, sooner or later, and each would
return a text of its own, computed from keys and values of several texts.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.full_state import layers_group
from ..comm.collectives import Group
from ..comm.wire import gather_objects
from ..consistency.agreement import compare_call
from ..consistency.differences import format_values, ranks_by_value
from ..core.bits import tensor_hash
from ..core.mode import is_tp_invariant_mode_enabled
from . import continuous_batching

_CONFIG, _CRITERIA = 1, 3  # the places of `generation_config` and `stopping_criteria` in transformers' generate


class Generating(nn.Module):
    """What the classes of parallelized models derive from, before a class that has transformers' `generate`."""

    def generate(self, *args: Any, **options: Any) -> Any:
        """transformers' generate; a collective. The ranks compare a hash of the text after every step.

        With the mode on the model is not compiled, as transformers compiles it by itself on GPUs where the cache is
        static, unless a compile_config is given: bits between the layers are then the compiler's.

        Raises:
            ValueError: a logits_processor with cache_implementation="paged", as in generate_batch.
            RuntimeError: the same on every rank, if the ranks' texts differ; names the step, the tokens and the ranks.
        """
        former: Any = super()
        continuous_batching.as_ordinary(self)
        paged = options.get("cache_implementation") == "paged"  # which takes neither criteria nor options of compilers
        config = args[_CONFIG] if len(args) > _CONFIG else options.get("generation_config")
        given = options.get("compile_config") or getattr(config or self.generation_config, "compile_config", None)
        if given is None and not paged and is_tp_invariant_mode_enabled():
            if config is None:
                options.setdefault("disable_compile", True)
            else:  # transformers warns of a config together with options
                config = copy.copy(config)
                config.disable_compile = True
                if len(args) > _CONFIG:
                    args = (*args[:_CONFIG], config, *args[_CONFIG + 1 :])
                else:
                    options["generation_config"] = config
        if paged:
            _refuse_processors(options)
        group = layers_group(self, of_replica=True)
        if group.size > 1 and not paged:
            if len(args) > _CRITERIA:
                args = (*args[:_CRITERIA], [*(args[_CRITERIA] or ()), _SameText(group)], *args[_CRITERIA + 1 :])
            else:
                options["stopping_criteria"] = [*(options.get("stopping_criteria") or ()), _SameText(group)]
        return former.generate(*args, **options)

    def _get_static_cache_init_shape(self) -> Any:
        """Where prefill_chunk_size is given, transformers makes a static cache at once, with the heads of all ranks.
        Without this it makes the cache from the first keys, which are those of this rank's heads."""
        former: Any = super()
        whole = layers_group(self, of_replica=True).size == 1
        return former._get_static_cache_init_shape() if whole else None

    def init_continuous_batching(
        self, generation_config: Any = None, continuous_batching_config: Any = None, **options: Any
    ) -> Any:
        """transformers' own, of every rank; the ranks compare the tokens of every step.

        Raises:
            ValueError: CUDA graphs of several ranks; torch.compile.
        """
        former: Any = super()
        start = former.init_continuous_batching
        return continuous_batching.begin(self, start, generation_config, continuous_batching_config, **options)

    def generate_batch(
        self,
        inputs: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        *others: Any,
        logits_processor: Any = None,
        **options: Any,
    ) -> Any:
        """transformers' own, of every rank.

        logits_processor: None, or a list of one `tpi.sampling.KeyedDraws` with a request for each of `inputs`. The
            results then have its log-probabilities in `logprobs`, and of several texts of a prompt the copies in order.

        Raises:
            ValueError: another logits_processor, which transformers ignores here, so that it would draw by itself; or
                KeyedDraws beside processors of generation_config, CUDA graphs, or an engine that was made without.
            RuntimeError: a request failed, which transformers only logs.
        """
        former: Any = super()
        if logits_processor is None or not len(logits_processor):
            results = former.generate_batch(inputs, generation_config, continuous_batching_config, *others, **options)
        else:
            draws = logits_processor[0]
            if len(logits_processor) > 1 or not hasattr(draws, "for_engine"):
                _refuse_processors({"logits_processor": logits_processor})
            results = continuous_batching.serve_keyed(
                self, draws, inputs, generation_config, continuous_batching_config, **options
            )
        errors = {name: result.error for name, result in results.items() if result.error is not None}
        if errors:
            name, error = next(iter(errors.items()))
            raise RuntimeError(f"{len(errors)} of {len(results)} requests failed; {name}: {error}")
        return results


def _refuse_processors(options: dict[str, Any]) -> None:
    """Raises: ValueError."""
    if options.get("logits_processor"):
        names = ", ".join(type(processor).__name__ for processor in options["logits_processor"])
        raise ValueError(
            f"logits_processor has {names}, which transformers' continuous batching ignores: give generate_batch one "
            "KeyedDraws alone, or call generate without cache_implementation='paged'"
        )


class _SameText:
    """One of transformers' stopping criteria, which are called after every step: stops nothing."""

    def __init__(self, group: Group) -> None:
        self._group, self._steps = group, 0

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        group = self._group
        self._steps += 1
        facts = {"the call": "a step of generate", "the shape of the text": tuple(input_ids.shape)}
        hashes = compare_call(tensor_hash(input_ids).view(1), facts, group, "tp_group")
        if len({value for (value,) in hashes}) > 1:
            newest = gather_objects(tuple(input_ids[:, -1].tolist()), group)
            raise RuntimeError(
                f"the {group.size} ranks of tp_group have different texts after step {self._steps} of generate, whose "
                f"last tokens are {format_values(ranks_by_value(enumerate(newest)))}. Ranks of a tp_group must get the "
                "same prompts and draw the same tokens: seed all of them alike before generate (torch.manual_seed), "
                "also where data-parallel ranks have seeds of their own, and give KeyedDraws one seed and the same "
                "requests"
            )
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
