"""Determines what parallelize will do to a model, and everything that it cannot do, before the model is changed."""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn

from ..comm.collectives import Group
from ..core.dtensors import sharded_already
from ..core.layout import indivisible
from ..gemm.gemm_fn import GemmFn
from ..hugging_face import models as hugging_face
from ..hugging_face.experts import experts_of, problem_with_experts
from ..layers.linear import Linear, check_sizes
from ..layers.local_parameters import parts_on_meta
from ..layers.parallel_norm import ParallelNorm, recognise_norm
from ..layers.parameters import ShardedModule, ShardSpec
from ..layers.vocab_embedding import VocabParallelEmbedding
from .head_dims import WITH_ALL_FEATURES, ProbeError, ShardedInput, sharded_inputs
from .plans import (
    EMBEDDING_STYLE,
    EXPERTS_STYLE,
    HEADS_STYLE,
    LATENT_STYLE,
    LINEAR_STYLES,
    LOCAL_STYLE,
    PARAMETER_STYLES,
    STYLES,
    WHOLE_STYLES,
    Part,
    resolve,
)

_Kind = TypeVar("_Kind", bound=nn.Module)
SEQUENCE_DIM = 1  # of [B, S, H], between decoder layers


@dataclass(frozen=True)
class Stack:
    """Where the decoder layers are: `prefix` of their names ("model.layers."), and the norm after them."""

    prefix: str
    layers: nn.ModuleList
    norm_name: str

    @classmethod
    def find(cls, modules: Mapping[str, nn.Module]) -> Stack | None:
        stacks = []
        for name, module in modules.items():
            layers, norm = getattr(module, "layers", None), getattr(module, "norm", None)
            if isinstance(layers, nn.ModuleList) and len(layers) and isinstance(norm, nn.Module):
                dot = f"{name}." if name else ""
                stacks.append(cls(f"{dot}layers.", layers, f"{dot}norm"))
        return stacks[0] if len(stacks) == 1 else None


@dataclass
class Survey:
    """The replacements that will be made in a model, and the problems that prevent them."""

    model: nn.Module
    group: Group
    sequence_parallel: bool
    gemm_fn: GemmFn | None
    own_plan: bool  # whether the plan is the model's own, which may name modules that do not exist
    stored_over: Group | None = None  # by expert over these ranks; None: by inner features
    # name: what makes the layer that a module becomes, on the meta device; and these layers if there is no problem
    swaps: dict[str, Callable[[], ShardedModule]] = field(default_factory=dict)
    layers: dict[str, ShardedModule] = field(default_factory=dict)
    # name of a module that stays: the sharded dims of those of its own parameters of which a rank holds a part
    shards: dict[str, dict[str, int]] = field(default_factory=dict)
    latents: list[str] = field(default_factory=list)  # names of modules with latent attention
    activations: list[str] = field(default_factory=list)  # their names; they stay
    problems: list[str] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)  # names of experts modules, and of the modules that hold them
    mixtures: set[str] = field(default_factory=set)
    stack: Stack | None = None
    blocks: tuple[str, ...] = ()  # names of the stack's modules that get the whole sequence
    whole_blocks: frozenset[str] = frozenset()  # those of them that put out all features of all tokens
    unsharded: frozenset[str] = frozenset()  # those of them of whose parameters every rank has the whole
    # norm's name: where its input is sharded, None if it is not; for the norms that a run of a copy has called
    sharded: dict[str, ShardedInput | None] = field(default_factory=dict)
    unseen: str = ""  # why such a run was not possible
    attention_stays: bool = False  # of a Hugging Face model

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules())
        config: Any = getattr(self.model, "config", None)
        self.config = config
        if hasattr(config, "get_text_config"):
            try:
                self.config = config.get_text_config()
            except ValueError as error:  # it has several
                self.problems.append(f"config.get_text_config() says: {error}".replace("\n", " "))
        self.is_hugging_face = hasattr(self.config, "_attn_implementation")
        self.distributed = sharded_already(self.model)

    def run(self, plan: Mapping[str, str | Part]) -> None:
        self.parts: dict[str, Part] = {}  # of modules
        self.parameter_parts: dict[str, Part] = {}
        if self.distributed:
            self.problems.append(self.distributed)
            return
        first = {id(module): name for name, module in self.modules.items()}
        every = dict(self.model.named_modules(remove_duplicate=False))  # also further names of shared modules
        resolved, unused = resolve(plan, {**self._own_parameters(), **every})
        for name in sorted((every.keys() - self.modules.keys()) & resolved.keys()):
            part, known = resolved.pop(name), first[id(every[name])]
            if resolved.setdefault(known, part) != part:
                self._problem(name, f"is {known}, too, of which the plan asks {resolved[known].style!r}")
        self.parts = {name: part for name, part in resolved.items() if name in self.modules}
        self.parameter_parts = {name: part for name, part in resolved.items() if name not in self.modules}
        if not self.own_plan:
            for pattern in unused:
                near = difflib.get_close_matches(pattern, [*self.modules], n=1)
                meant = f"; did you mean {near[0]!r}?" if near else ""
                self.problems.append(f"plan[{pattern!r}]: no module has such a name{meant}")
        self.stack = Stack.find(self.modules)
        if self.sequence_parallel and self.stack is None:
            self.problems.append(
                "sequence_parallel=True: no decoder layers, or several, to shard the hidden states between (a module "
                "with `layers`, an nn.ModuleList, and `norm`)"
            )
        self.experts = [name for name, part in self.parts.items() if part.style == EXPERTS_STYLE]
        self.mixtures = {name.rpartition(".")[0] for name in self.experts}
        self._plan_blocks()
        self._plan_ties()
        self._plan_parameters()
        self._plan_heads()
        for name, module in self.modules.items():
            try:
                self._survey_module(name, module)
            except Exception as error:  # the survey of a module may run foreign code
                self._problem(name, f"{type(module).__name__} was not understood: {type(error).__name__}: {error}")
        self._check_config()
        if not self.problems:
            self.layers = {name: make() for name, make in self.swaps.items()}
            self.layers |= {name: parts_on_meta(self.group, dims) for name, dims in self.shards.items()}

    def _linears(self, mode: str) -> dict[str, dict[str, Any]]:
        """{name: options of tpi.Linear} of what the plan makes column-parallel, or row-parallel."""
        return {n: o for n, p in self.parts.items() if (o := p.linear_options()).get("parallel_mode") == mode}

    def _plan_blocks(self) -> None:
        if self.stack is None:
            return
        columns, rows = self._linears("column"), self._linears("row")
        mixtures = {name for name in self.mixtures if name.startswith(self.stack.prefix)}
        blocks = {name.rpartition(".")[0] for name in columns if name.startswith(self.stack.prefix)} | mixtures
        self.unsharded = frozenset(self._unsharded_blocks(self.stack))
        blocks |= self.unsharded
        if self.sequence_parallel:
            for name in filter(self._is_layer, blocks):
                self._problem(
                    name, "has column-parallel layers or experts itself: sequence_parallel needs them in a submodule"
                )
        self.blocks = tuple(sorted(n for n in blocks if not any(n.startswith(f"{other}.") for other in blocks)))
        sharded = [*rows, *(name for name, options in columns.items() if not options.get("gather_output"))]
        within = tuple(f"{block}." for block in self.blocks)
        # no row-parallel layer takes a block's output
        if all(row.startswith(within) for row in rows if row.startswith(self.stack.prefix)):
            self.whole_blocks = frozenset(n for n in self.blocks if not any(s.startswith(f"{n}.") for s in sharded))
        # experts put out all tokens, and so do row-parallel layers beside them
        self.whole_blocks |= mixtures | self.unsharded

    def _unsharded_blocks(self, stack: Stack) -> Iterator[str]:
        """The submodules of decoder layers of which the plan shards nothing: attention that it leaves whole, say.

        Every rank has all their parameters, so that it must run them on all tokens. Not among them are norms and linear
        layers that a decoder layer holds itself, which have rules of their own, and what holds an embedding, whose
        first argument is no hidden states.
        """
        sharded = [name for name, part in self.parts.items() if part.style not in WHOLE_STYLES]
        sharded += [name.rpartition(".")[0] for name in self.parameter_parts]
        waiting = [f"{stack.prefix}{index}.{child}" for index, layer in enumerate(stack.layers)
                   for child, _ in layer.named_children()]  # fmt: skip
        while waiting:
            name = waiting.pop()
            module = self.modules.get(name)
            if module is None:  # it stands at another place, too
                continue
            if type(module).forward is nn.Module.forward:  # a list or dict, whose modules are called one by one
                waiting += [f"{name}.{child}" for child, _ in module.named_children()]
                continue
            kinds = list(module.modules())
            if (
                isinstance(module, (nn.Linear, nn.Embedding))
                or is_norm(module)
                or not any(True for _ in module.parameters())
                or any(isinstance(kind, nn.Embedding) for kind in kinds)
                or any(other == name or other.startswith(f"{name}.") for other in sharded)
            ):
                continue
            yield name

    def _is_layer(self, name: str) -> bool:
        return self.stack is not None and name.removeprefix(self.stack.prefix).isdigit()

    def _plan_ties(self) -> None:
        """An embedding that shares its weight with a column-parallel output layer is sharded with it."""
        sharded = {
            id(linear.weight) for name in self._linears("column") if isinstance(linear := self.modules[name], nn.Linear)
        }
        for name, module in self.modules.items():
            if isinstance(module, nn.Embedding) and id(module.weight) in sharded:
                self.parts.setdefault(name, Part(EMBEDDING_STYLE))

    def _plan_parameters(self) -> None:
        """Finds how the parameters are sharded that the plan names themselves; experts shard their own."""
        for name, part in self.parameter_parts.items():
            owner, _, key = name.rpartition(".")
            module = self.modules[owner]
            parameter = module.get_parameter(key)
            if owner in self.experts:
                continue
            if type(module) in (nn.Linear, nn.Embedding) or is_norm(module) or isinstance(module, ShardedModule):
                self._problem(name, f"is a parameter of a {type(module).__name__}: name that module in the plan")
            elif part.style not in PARAMETER_STYLES or part != Part(part.style):
                styles = ", ".join(PARAMETER_STYLES)
                self._problem(name, f"{part} is not supported for a parameter; supported are the styles {styles}")
            elif not parameter.dim():
                self._problem(name, "has no dim: it cannot be sharded")
            else:
                dim = max(0, parameter.dim() + PARAMETER_STYLES[part.style])
                self._divides(name, f"size of dim {dim}", parameter.shape[dim], self.group.size)
                self.shards.setdefault(owner, {})[key] = dim

    def _own_parameters(self) -> dict[str, nn.Parameter]:
        named = ((n, key, p) for n, module in self.modules.items() for key, p in module._parameters.items())
        return {f"{name}.{key}" if name else key: p for name, key, p in named if p is not None}

    def _plan_heads(self) -> None:
        """Finds the norms over each head, which older plans of Hugging Face models do not contain."""
        self._probe()
        for name, module in self.modules.items():
            whole = self.parts.get(name, Part("replicate")).style in WHOLE_STYLES
            if self.own_plan and is_norm(module) and whole and self._is_over_heads(name):
                self.parts[name] = Part(HEADS_STYLE)

    def _probe(self) -> None:
        """Determines, by a run of a copy, how the inputs of norms beside sharded layers are sharded."""
        options = {
            name: given
            for name, part in self.parts.items()
            if (given := part.linear_options()) and computes_as(self.modules[name], nn.Linear)
        }
        parents = {name.rpartition(".")[0] for name in options}
        layers = "" if self.stack is None else self.stack.prefix
        blocks = tuple(f"{parent}." for parent in parents if parent and not layers.startswith(f"{parent}."))
        with_heads = {name for name, part in self.parts.items() if part.style == HEADS_STYLE}
        names = [n for n, m in self.modules.items() if is_norm(m) and (n in with_heads or n.startswith(blocks))]
        if not self.is_hugging_face or not names:
            return
        if any(part.style not in STYLES for part in self.parts.values()):
            self.sharded = dict.fromkeys(names)  # refused anyway, and what has that style may not run of a copy
            return
        for degree in (self.group.size,) if self.group.size > 1 else (2, 3, 5, 7, 11, 13):
            try:
                self.sharded = sharded_inputs(self.model, options, degree, names, self.experts, self.shards)
                return
            except ProbeError as error:
                self.unseen = self.unseen or str(error)
        if self.group.size == 1 and not self.unseen.startswith(WITH_ALL_FEATURES):
            self.sharded = dict.fromkeys(names)  # no other degree divides this model: there is none to agree with

    def _projection_of(self, norm_name: str) -> str:
        """The name of the projection that a norm called q_norm, q_layernorm or query_layernorm would follow, or ""."""
        parent, dot, own = norm_name.rpartition(".")
        stem = next((own.removesuffix(s) for s in ("_norm", "_layernorm") if own.endswith(s)), "")
        return f"{parent}{dot}{ {'query': 'q', 'key': 'k'}.get(stem, stem) }_proj" if stem else ""

    def _is_over_heads(self, norm_name: str) -> bool:
        if norm_name in self.sharded:
            return self.sharded[norm_name] is not None
        options = self.parts.get(self._projection_of(norm_name), Part("replicate")).linear_options()
        return options.get("parallel_mode") == "column" and not options.get("gather_output")

    def _survey_module(self, name: str, module: nn.Module) -> None:
        part = self.parts.get(name)
        if part is not None and part.style not in STYLES:
            near = difflib.get_close_matches(part.style, STYLES, n=1, cutoff=0.4)
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            self._problem(name, f"style {part.style!r} is not supported{meant}; supported are {', '.join(STYLES)}")
        elif name.startswith(tuple(f"{experts}." for experts in self.experts)):
            return  # a part of what experts are replaced by
        elif part is not None and part.style == EXPERTS_STYLE:
            self._experts(name, module)
        elif isinstance(module, ShardedModule):
            self._problem(
                name,
                f"is a {type(module).__name__} already, a layer of this library: call parallelize once, on the whole "
                "model",
            )
        elif type(module) is nn.Linear or (part is not None and computes_as(module, nn.Linear)):
            self._linear(name, module, part or Part("replicate"))
        elif isinstance(module, nn.Embedding):
            self._embedding(name, module, part or Part("replicate"))
        elif part is not None and part.style in (*LINEAR_STYLES, EMBEDDING_STYLE):
            wanted = "an nn.Embedding" if part.style == EMBEDDING_STYLE else "an nn.Linear"
            self._problem(name, f"style {part.style!r} needs {wanted}, not a {type(module).__name__}")
        elif is_norm(module):
            self._norm(name, module, part or Part("replicate"))
        elif part is not None and part.style == HEADS_STYLE:
            self._problem(name, f"style {part.style!r} needs a norm with a weight, not a {type(module).__name__}")
        elif (
            (part is None or part.style == LOCAL_STYLE)
            and any(True for _ in module.parameters(recurse=False))
            and self._sees_local_tokens(name)
        ):
            self._problem(name, f"{type(module).__name__} has parameters and would see this rank's tokens only")
        if _is_activation(module):
            self.activations.append(name)

    def _problem(self, name: str, text: str) -> None:
        self.problems.append(f"{name or type(self.model).__name__}: {text}")

    def _sees_local_tokens(self, name: str) -> bool:
        """Whether, under sequence_parallel, module `name` gets only this rank's tokens: in the stack, in no block."""
        in_block = any(name == block or name.startswith(f"{block}.") for block in self.blocks)
        return self._in_stack(name) and not in_block

    def _in_stack(self, name: str) -> bool:
        return self.sequence_parallel and self.stack is not None and name.startswith(self.stack.prefix)

    def _divides(self, name: str, size_name: str, size: int, parts: int, stride: int = 1) -> None:
        if text := indivisible(size, parts, size_name=size_name, stride=stride):
            degrees = ", ".join(str(degree) for degree in range(2, 65) if not size % (degree * stride))
            self._problem(name, text + (f". TP degrees that fit: {degrees}" if degrees else ""))

    # --- one kind of module each

    def _linear(self, name: str, linear: nn.Linear, part: Part) -> None:
        if tuple(linear.weight.shape) != (linear.out_features, linear.in_features):
            return self._problem(
                name,
                f"its weight has shape {tuple(linear.weight.shape)}, and out_features={linear.out_features}, "
                f"in_features={linear.in_features}: set them to what it has, unless it is sharded already",
            )
        if part.style == LATENT_STYLE:
            parent = name.rpartition(".")[0]
            beside = (self.parts.get(f"{parent}.{child}") for child, _ in self.modules[parent].named_children())
            columns = (p.linear_options() for p in beside if p is not None)
            if not parent or not any(
                o.get("parallel_mode") == "column" and not o.get("gather_output") for o in columns
            ):
                return self._problem(name, f"style {part.style!r}: no layer beside it has the style 'colwise'")
            self.latents.append(parent)
        if part.style in (*WHOLE_STYLES, LATENT_STYLE):
            if self._sees_local_tokens(name):
                self._problem(name, "is in no pattern of the plan, and under sequence_parallel sees this rank's tokens")
            options: dict[str, Any] = dict(parallel_mode=None)
        elif part.style in LINEAR_STYLES:
            options = part.linear_options()
            size_name = "out_features" if options["parallel_mode"] == "column" else "in_features"
            stride = options.get("partition_stride", 1)
            if "partition_sizes" in options:
                sizes = options["partition_sizes"]
                try:
                    kept = check_sizes(sizes, getattr(linear, size_name), self.group.size, size_name)
                    ShardSpec(self.group, 0, kept).check_placed()
                except ValueError as error:
                    return self._problem(name, str(error))
            self._divides(name, size_name, getattr(linear, size_name), self.group.size, stride)
        else:
            return self._problem(name, f"style {part.style!r} is not for an nn.Linear")
        if self._in_stack(name) and options["parallel_mode"] == "row" and not self._in_mixture(name):
            options |= dict(sequence_parallel=True, sequence_dim=SEQUENCE_DIM)
        self.swaps[name] = lambda: Linear._on_meta(linear, tp_group=self.group, gemm_fn=self.gemm_fn, **options)

    def _in_mixture(self, name: str) -> bool:
        return name.startswith(tuple(f"{mixture}." for mixture in self.mixtures))

    def _experts(self, name: str, experts: nn.Module) -> None:
        if problem := problem_with_experts(experts, self.group, self.stored_over):
            return self._problem(name, problem)
        self.swaps[name] = lambda: experts_of(experts, self.group, self.gemm_fn, self.stored_over)

    def _embedding(self, name: str, embedding: nn.Embedding, part: Part) -> None:
        if part.style != EMBEDDING_STYLE and part.style not in WHOLE_STYLES:
            return self._problem(name, f"style {part.style!r} is not for an nn.Embedding: choose {EMBEDDING_STYLE!r}")
        if self._sees_local_tokens(name):
            self._problem(name, "is an embedding inside a decoder layer: not supported under sequence_parallel")
        scale = None if computes_as(embedding, nn.Embedding) else _scale_of(embedding)
        unusual = embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse
        if unusual or (scale is None and not computes_as(embedding, nn.Embedding)):
            if part.style == EMBEDDING_STYLE:
                what = "max_norm, scale_grad_by_freq and sparse are" if unusual else (
                    f"{type(embedding).__name__} is no nn.Embedding times an embed_scale, which alone is"
                )  # fmt: skip
                self._problem(name, f"{what} not supported where rows are sharded")
            elif (embedding.max_norm is not None or embedding.sparse) and self.group.mesh is not None:
                self._problem(name, "max_norm and sparse are not supported over a DeviceMesh: give a ProcessGroup")
            return  # else every rank computes the same on the whole
        group = self.group if part.style == EMBEDDING_STYLE else None
        self._divides(name, "num_embeddings", embedding.num_embeddings, 1 if group is None else group.size)

        def make() -> ShardedModule:
            layer = VocabParallelEmbedding._on_meta(embedding, tp_group=group)
            layer.scale_by = scale
            return layer

        self.swaps[name] = make

    def _norm(self, name: str, norm: nn.Module, part: Part) -> None:
        parent = name.rpartition(".")[0]
        projection, over_heads = self._projection_of(name), self._is_over_heads(name)
        final = self.sequence_parallel and self.stack is not None and name == self.stack.norm_name
        options: dict[str, Any] = {}
        if recognise_norm(norm) is None:
            if part.style not in WHOLE_STYLES or over_heads or final or self._sees_local_tokens(name):
                self._problem(name, f"{type(norm).__name__} is no LayerNorm or RMSNorm that this library knows")
            return  # else every rank computes the same on the whole
        if part.style == HEADS_STYLE:
            options = self._heads(name, norm, part, projection)
        elif part.style not in WHOLE_STYLES:
            self._problem(name, f"style {part.style!r} is not for a norm")
        elif over_heads:
            what = projection if projection in self.parts else "a column-parallel layer"
            self._problem(name, f"normalises what {what} has sharded: it needs the style {HEADS_STYLE!r}")
        elif self._sees_local_tokens(name) and not self._is_layer(parent):
            self._problem(
                name, "is a norm neither of a decoder layer itself nor in a block: which tokens it sees is unknown"
            )
        elif self._sees_local_tokens(name) or final:
            options = dict(sequence_parallel=True, sequence_dim=SEQUENCE_DIM)
        self.swaps[name] = lambda: ParallelNorm._on_meta(norm, tp_group=self.group, **options)

    def _heads(self, name: str, norm: nn.Module, part: Part, projection: str) -> dict[str, Any]:
        if name in self.sharded:
            place = self.sharded[name]
            if place is None:  # it sees all heads
                return {}
            if place.last or place.with_tokens:
                what = "the features that it normalises" if place.last else "heads and tokens in one dim"
                self._problem(name, f"dim {place.dim} of its input, which is sharded, holds {what}: not supported")
            if part.heads_dim not in (None, place.dim):
                self._problem(name, f"heads_dim={part.heads_dim}, but the model has its heads in dim {place.dim}")
            if part.heads not in (None, place.size):
                self._problem(name, f"heads={part.heads}, but the model has {place.size}")
            self._divides(name, "heads", place.size, self.group.size)
            return dict(heads=place.size, heads_dim=place.dim)
        linear = self.modules.get(projection)
        if part.heads_dim is None:
            why = f", since {self.unseen}" if self.unseen else ""
            self._problem(
                name, f"which dim of its input holds the heads was not seen{why}: give Part(style, heads_dim=..)"
            )
        if part.heads is not None:
            heads = part.heads
        elif isinstance(linear, nn.Linear):
            heads = linear.out_features // norm.get_parameter("weight").numel()
        else:
            text = f"has no {projection or 'projection'} beside it, to tell the number of heads: give Part their number"
            self._problem(name, f"{text}, Part({HEADS_STYLE!r}, heads=.., heads_dim=..)")
            return {}
        self._divides(name, "heads", heads, self.group.size)
        return dict(heads=heads, heads_dim=part.heads_dim)

    # --- the whole model

    def _check_config(self) -> None:
        if not self.is_hugging_face:
            return
        sharded = [name for name, options in self._linears("column").items() if not options.get("gather_output")]
        of_heads = [name for name in sharded if hugging_face.is_attention(self.modules[name.rpartition(".")[0]])]
        if problem := hugging_face.problem_with(self.config, self.model):
            self.attention_stays = not of_heads  # every rank computes the same for all heads
            self.problems += [problem] if of_heads else []
        if any(self.parts[name].style == "colwise" for name in of_heads):
            for name in ("num_attention_heads", "num_key_value_heads"):
                for heads in sorted(hugging_face.config_values(self.config, name)):
                    self._divides("config", name, heads, self.group.size)


_ACTIVATIONS = (nn.SiLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.Mish, nn.ELU, nn.CELU, nn.SELU, nn.Softplus, nn.LogSigmoid)


def computes_as(module: nn.Module, kind: type[_Kind]) -> TypeGuard[_Kind]:
    """Whether it is of this class of torch's, or derives from it and has its forward, and no packed weight."""
    if not isinstance(module, kind) or type(module).forward is not kind.forward:
        return False
    weight = module._parameters.get("weight")
    return type(module) is kind or weight is None or weight.is_floating_point()


def is_norm(module: nn.Module) -> bool:
    """Whether the name of its class contains "norm", and it has parameters."""
    return "norm" in type(module).__name__.lower() and any(True for _ in module.parameters(recurse=False))


def _is_activation(module: nn.Module) -> bool:
    """Whether it is, or derives from, torch's function with exp or tanh, or one of transformers/activations.py."""
    theirs = any(kind.__module__ == "transformers.activations" for kind in type(module).__mro__)
    return isinstance(module, _ACTIVATIONS) or theirs


def _scale_of(embedding: nn.Embedding) -> float | None:
    """The embed_scale of an embedding class that returns embed_scale times the rows and does nothing else; else None.

    Found by running a copy of a few rows, in training and in evaluation.
    """
    scale: Any = getattr(embedding, "embed_scale", None)
    arguments = inspect.signature(embedding.forward).parameters
    if scale is None or isinstance(scale, nn.Parameter) or len(arguments) != 1 or embedding._modules:
        return None
    if getattr(scale, "is_meta", False):  # a buffer without a value, of which transformers has another copy
        scale = getattr(embedding, "scalar_embed_scale", None)
        if scale is None:
            return None
    twin, scale = copy.copy(embedding), float(scale)
    rows = torch.randn(min(8, embedding.num_embeddings), embedding.embedding_dim, dtype=embedding.weight.dtype,
                       generator=torch.Generator().manual_seed(0), device="cpu")  # fmt: skip
    twin._parameters = {"weight": nn.Parameter(rows, requires_grad=False)}
    twin._buffers = {
        name: torch.full_like(buffer, scale, device="cpu") if buffer.is_meta else buffer.cpu()
        for name, buffer in embedding._buffers.items()
        if buffer is not None
    }
    ids, expected = torch.arange(len(rows), device="cpu"), rows * rows.new_tensor(scale)
    alike = all(torch.equal(twin.train(training).forward(ids), expected) for training in (True, False))
    return scale if alike else None
