"""Weights of one model into another of any degree, in memory: a trainer's into a sampler's."""

from __future__ import annotations

from torch import nn

from .full_state import check_match, model_entries, model_group, run_on_all_ranks


def hand_over(source: nn.Module, target: nn.Module) -> None:
    """Copies the parameters and buffers of `source` into `target`, whatever degree each of the two has.

    A collective of the ranks of both models: every rank holds its part of each. Tensors are gathered whole one at a
    time, so besides the two models a rank holds one whole tensor. `source` may also be sharded by fully_shard, and
    either may be an unsharded model. What modules return from get_extra_state is not copied.

        tpi.hand_over(trainer.model, sampler)  # after each optimizer step: the sampler has the trainer's bits

    Args:
        source: a model with layers of this library, or without.
        target: a model of the same parameters, in the same dtypes.

    Raises:
        ValueError: on every rank, and before anything is written: keys, shapes or dtypes that differ, all named; two
            names of one parameter of `target` (tied embeddings) that are two in `source`.
        TypeError: state dicts with other values than dense tensors.
    """

    def check() -> None:
        check_match(theirs, {n: (e.full_shape, e.tensor.dtype) for n, e in own.items()}, strict=True, source="source")
        of_source = {name: id(p) for name, p in source.named_parameters(remove_duplicate=False)}
        first: dict[int, str] = {}
        for name, p in target.named_parameters(remove_duplicate=False):
            other = first.setdefault(id(p), name)
            if of_source.get(name) != of_source.get(other):
                raise ValueError(
                    f"{other} and {name} are one parameter in target, and two in source: make both models with the "
                    "same tie_word_embeddings"
                )

    own, theirs = model_entries(source), model_entries(target)
    run_on_all_ranks(
        model_group(source), "hand_over", lambda: run_on_all_ranks(model_group(target), "hand_over", check)
    )
    for name, entry in own.items():
        theirs[name].fill(entry.full())
