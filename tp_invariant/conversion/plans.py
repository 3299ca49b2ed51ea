"""Tensor-parallel plans as data: the meaning of each style, the modules that a pattern matches, and special models.

A plan is {pattern: style}. A pattern is a module's name in which `*` matches one component ("layers.*.mlp.up_proj"), or
the name of a parameter that a module of other classes than this library's holds itself ("layers.*.self_attn.sinks"). A
style is one of the names below, which are Hugging Face's, or a `Part` that adds options to one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

# style: options of tpi.Linear
LINEAR_STYLES: dict[str, dict[str, Any]] = {
    "colwise": dict(parallel_mode="column"),
    "colwise_gather_output": dict(parallel_mode="column", gather_output=True),
    "colwise_rep": dict(parallel_mode="column", gather_output=True),  # its name up to transformers 4
    "packed_colwise": dict(parallel_mode="column", partition_stride=2),
    "rowwise": dict(parallel_mode="row"),
    "rowwise_split_input": dict(parallel_mode="row", input_is_parallel=False),
    "rowwise_rep": dict(parallel_mode="row", input_is_parallel=False),
    "packed_rowwise": dict(parallel_mode="row", partition_stride=2),
}
EMBEDDING_STYLE = "embedding_rowwise"
HEADS_STYLE = (
    "replicated_with_grad_allreduce"  # a norm of each head: the sum over heads is this library's, no all-reduce
)
# `sequence_parallel` is what norms between layers do anyway under parallelize(sequence_parallel=True)
WHOLE_STYLES = ("replicate", "sequence_parallel")
EXPERTS_STYLE = "moe_tp_experts"
# a projection that is whole, and a part of whose output the heads beside it share; see hugging_face/shared_keys.py
LATENT_STYLE = "mla_kv_a_proj"
# of a module whose own parameters have styles, which it sees as local tensors in any case
LOCAL_STYLE = "local_params"
STYLES = (*LINEAR_STYLES, EMBEDDING_STYLE, HEADS_STYLE, EXPERTS_STYLE, LATENT_STYLE, LOCAL_STYLE, *WHOLE_STYLES)
# style: the dim of a parameter that it shards; a vector has one
PARAMETER_STYLES = {"colwise": -2, "local_colwise": -2, "rowwise": -1, "local_rowwise": -1}


@dataclasses.dataclass(frozen=True)
class Part:
    """What a plan requests for one module.

    Args:
        style: one of STYLES.
        partition_stride: for linear layers: in how many stacked pieces ([gate; up] is 2) the sharded dim comes.
        sizes: for linear layers: the full sizes of these pieces, where they are not all alike: (4096, 1024, 1024) for
            one nn.Linear that puts out [q; k; v] with fewer heads of k and v.
        heads: for "replicated_with_grad_allreduce": how many heads all ranks have; found by itself where a projection
            stands beside the norm (q_norm, q_proj).
        heads_dim: for "replicated_with_grad_allreduce": the dim of the norm's input that holds the heads; None where
            parallelize can see it, in a Hugging Face model's forward.

    Raises:
        ValueError: options that do not go together, or not with the style.
    """

    style: str
    partition_stride: int | None = None
    heads_dim: int | None = None
    sizes: Sequence[int] | None = None
    heads: int | None = None

    def __post_init__(self) -> None:
        if self.sizes is not None:
            if not isinstance(self.sizes, Iterable):
                raise TypeError(f"Part: sizes={self.sizes!r} must be integers, the full sizes of the pieces")
            object.__setattr__(self, "sizes", tuple(self.sizes))  # hashable, and the same for a list
            if self.partition_stride is not None:
                raise ValueError(f"Part: sizes and partition_stride say the same twice: leave one of {self}")
            if self.style not in LINEAR_STYLES and self.style in STYLES:
                raise ValueError(f"Part: sizes are of linear layers, not of the style {self.style!r}")
        if self.style in STYLES and self.style != HEADS_STYLE and (self.heads, self.heads_dim) != (None, None):
            raise ValueError(f"Part: heads and heads_dim are of the style {HEADS_STYLE!r}, not of {self.style!r}")

    def linear_options(self) -> dict[str, Any]:
        """tpi.Linear's options; none for a style that is not for linear layers."""
        if self.style not in LINEAR_STYLES:
            return {}
        options = dict(LINEAR_STYLES[self.style])
        if self.sizes is not None:
            options.pop("partition_stride", None)
            options["partition_sizes"] = self.sizes
        elif self.partition_stride is not None:
            options["partition_stride"] = self.partition_stride
        return options


# --- what plans do not contain --------------------------------------------------------------------------------------

# MLPs that split one projection's output into gate and up by chunk(2, dim=-1). Their plan gathers the output, which
# keeps the order [gate; up]. With partition_stride=2 each shard has this order, so that no gather is needed.
FUSED_GATE_UP = ("Glm4MLP", "GlmMLP", "Phi3MLP")
_FUSED_STYLES = ("colwise_gather_output", "colwise_rep"), ("rowwise_split_input", "rowwise_rep")


# Model types whose config had a plan of its layers in transformers 5.0, and has none since, with that plan in today's
# styles.
_LATER_WITHOUT = {
    "gpt_oss": {
        **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.mlp.experts": EXPERTS_STYLE,
    },
}


def own_plan(model: nn.Module) -> dict[str, str]:
    """The plan of a Hugging Face model: its config's for the base model, merged with its class's.

    Of a gpt-oss, whose config has had none of its layers since transformers 5.0, the one that it had, too.

    Raises:
        ValueError: it has none, or one without patterns for its layers (for the output layer only, say).
    """
    config: Any = getattr(model, "config", None)
    base = getattr(config, "base_model_tp_plan", None) or {}
    if not any(pattern.startswith("layers.") for pattern in base):  # none, or one of the embedding alone
        base = {**_LATER_WITHOUT.get(getattr(config, "model_type", ""), {}), **base}
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and isinstance(getattr(model, prefix, None), nn.Module):
        base = {f"{prefix}.{pattern}": style for pattern, style in base.items()}
    plan = {**base, **(getattr(model, "_tp_plan", None) or {})}
    if not plan:
        raise ValueError(
            f"{type(model).__name__} brings no tensor-parallel plan (config.base_model_tp_plan, _tp_plan): give "
            'plan={"layers.*.up": "colwise", "layers.*.down": "rowwise", ..}'
        )
    modules = dict(model.named_modules())
    lists = tuple(f"{name}." for name, module in modules.items() if isinstance(module, nn.ModuleList))
    if lists and not any(name.startswith(lists) for name in resolve(plan, modules)[0]):
        if any("layers." in pattern for pattern in plan):
            raise ValueError(
                f"{type(model).__name__} brings a tensor-parallel plan that matches none of its layers "
                f"({', '.join(list(plan)[:3])}, ..), whose names begin with {lists[0]}: parallelize the model that the "
                "plan is of, and put adapters or a wrapper around it afterwards"
            )
        raise ValueError(
            f"{type(model).__name__} brings a tensor-parallel plan for its output layer only ({', '.join(plan)}), none "
            f'for its layers: give plan={{"{lists[0]}*.self_attn.q_proj": "colwise", ..}}'
        )
    return plan


def resolve(plan: Mapping[str, str | Part], modules: Mapping[str, Any]) -> tuple[dict[str, Part], list[str]]:
    """({name: Part}, patterns that match nothing), for the names of modules, and of parameters if they are given.

    Raises:
        TypeError: a style that is neither a string nor a Part.
        ValueError: two patterns that ask different things of one module.
    """
    parts: dict[str, Part] = {}
    unused = []
    for pattern, style in plan.items():
        if not isinstance(style, (str, Part)):
            raise TypeError(f"plan[{pattern!r}]={style!r} is a {type(style).__name__}: give a style's name or a Part")
        part = Part(style) if isinstance(style, str) else style
        names = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))
        matches = [name for name in modules if names.fullmatch(name)]
        if not matches:
            unused.append(pattern)
        for name in matches:
            if parts.setdefault(name, part) != part:
                raise ValueError(f"plan asks {parts[name].style!r} and {part.style!r} of {name}: leave one")
    for name, module in modules.items():
        gate_up, down = f"{name}.gate_up_proj", f"{name}.down_proj"
        if type(module).__name__ in FUSED_GATE_UP and gate_up in parts and down in parts:
            styles = parts[gate_up], parts[down]
            if all(part == Part(part.style) and part.style in s for part, s in zip(styles, _FUSED_STYLES, strict=True)):
                parts[gate_up], parts[down] = Part("packed_colwise"), Part("rowwise")
    return parts, unused
