"""Whole mixtures of experts of transformers over ranks: every family in every layout, and what training gives there."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import hf_models
import torch
from meshes import replica_groups
from torch import Tensor
from torch.overrides import TorchFunctionMode

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.comm.collectives import Group
from tp_invariant.data_parallel import MicroBatchTree
from tp_invariant.hugging_face.experts import use_own_code
from tp_invariant.layers.experts import Experts

FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "glm4_moe", "granitemoe", "gpt_oss")
EXPERTS = 8  # so that eight ranks can store them by expert
STEPS = 5
MICRO_BATCHES = 4  # of a step with data parallelism
TIED = (4, 5, 6)  # experts with the same scores; with two slots the last of them never gets a token
ONE_RANK = Group(None, 0, 1)


@dataclasses.dataclass(frozen=True)
class Layout:
    """dp replicas of tp ranks.

    ep: 0: experts are stored by their inner features over the tp ranks; 1: by expert over them; n > 1: by expert over
    the ranks of n replicas, so that dp / n groups of ranks hold the same experts.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 0
    sp: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    @property
    def alone(self) -> Layout:
        """What one rank is to be given for the bytes of this one: as many micro-batches, stored in the same way."""
        return Layout(dp=min(self.dp, 2), ep=min(self.ep, 1))

    def __str__(self) -> str:
        over = {0: "", 1: " EP over TP" if self.tp > 1 else ""}.get(self.ep, f" EP over {self.ep} replicas")
        return f"TP {self.tp} DP {self.dp}{over}{' SP' if self.sp else ''}"


LAYOUTS = [
    *(Layout(tp, ep=ep, sp=sp) for ep in (0, 1) for tp in (2, 4, 8) for sp in (False, True)),
    *(Layout(dp=dp, ep=ep) for dp, ep in ((2, 2), (4, 4), (4, 2))),
    *(Layout(2, dp=2, ep=ep, sp=sp) for ep in (1, 2) for sp in (False, True)),
    *(Layout(2, dp=4, ep=2, sp=sp) for sp in (False, True)),
]
# Routers: as they are; with equal scores of the experts TIED; all tokens on expert 0.
ROUTERS = ("drawn", "ties", "one expert")
ROUTED_LAYOUTS = [Layout(4, sp=True), Layout(8, ep=1), Layout(dp=4, ep=4), Layout(2, dp=4, ep=2)]
TABLE: list[tuple[str, Layout, str]] = [
    *itertools.product(FAMILIES, LAYOUTS, ROUTERS[:1]),
    *itertools.product(FAMILIES, ROUTED_LAYOUTS, ROUTERS[1:]),
]
# Every kind of layout once, and every family.
SAMPLE: list[tuple[str, Layout, str]] = [
    ("granitemoe", Layout(8, sp=True), "drawn"),
    ("mixtral", Layout(8, ep=1), "drawn"),
    ("deepseek_v3", Layout(2, ep=1, sp=True), "drawn"),
    ("olmoe", Layout(dp=4, ep=2), "drawn"),
    ("glm4_moe", Layout(2, dp=2, ep=1), "drawn"),
    ("gpt_oss", Layout(2, dp=4, ep=2, sp=True), "drawn"),
    ("qwen3_moe", Layout(4, sp=True), "ties"),
    ("deepseek_v3", Layout(dp=4, ep=4), "one expert"),
]


def build(family: str, router: str, dtype: torch.dtype = torch.float32) -> Any:
    """The full model, whose sizes eight ranks divide."""
    own = hf_models.MIXTURES[family][2]
    (experts,) = (name for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in own)
    sizes = {experts: EXPERTS, "num_key_value_heads": 8, "num_experts_per_tok": 1 if router == "one expert" else 2}
    model = hf_models.build(family, dtype, **sizes)
    if router == "drawn":
        return model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if len(parameter) == EXPERTS and ".experts." not in name:  # a router's weight, and its bias
                if router == "ties":
                    parameter[list(TIED)] = parameter[TIED[0]].clone()
                else:
                    parameter.zero_()
    return model


def _record_counts(model: Any, seen: list[Tensor]) -> None:
    for module in model.modules():
        if isinstance(module, Experts):
            module.register_forward_pre_hook(
                lambda module, args: seen.append(args[1].flatten().bincount(minlength=EXPERTS))
            )


def _micro_batches(step: int, count: int) -> list[dict[str, Tensor]]:
    return [hf_models.batch(count * step + index) for index in range(count)]


def train(world: Any, family: str, layout: Layout, router: str, steps: int = STEPS, mode: bool = True) -> Any:
    """({name: tensor} of this rank, how many slots of each expert its first micro-batch filled, by layer).

    world: None: all micro-batches on this rank alone.
    """
    if world is None:
        tp_group, dp_group, ep_group = None, ONE_RANK, ONE_RANK
    else:
        tp_group, dp_group, ep_group = replica_groups(layout.dp, layout.tp, max(layout.ep, 1))
    model = tpi.parallelize(
        build(family, router), tp_group, expert_parallel_group=ep_group if layout.ep else None,
        sequence_parallel=layout.sp,
    )  # fmt: skip
    seen: list[Tensor] = []
    _record_counts(model, seen)
    found: dict[str, Any] = {}
    with tpi.set_tp_invariant_mode(mode):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        count = 1 if layout.dp == 1 else MICRO_BATCHES
        tree = None if count == 1 else MicroBatchTree(model.parameters(), dp_group, count)
        for step in range(steps):
            batches = _micro_batches(step, count)
            for index in range(1) if tree is None else tree.share:
                output = model(**batches[index])
                output.loss.backward()
                found[f"logits {step} {index}"] = output.logits.detach()
                found[f"loss {step} {index}"] = output.loss.detach()
                if tree is not None:
                    tree.add(count=1)
            if tree is not None:
                tree.reduce()
            if step in (0, steps - 1):
                found[f"gradients {step}"] = testing.full_grads(model)
            found[f"norm {step}"] = tpi.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found["parameters"] = testing.full_parameters(model)
    layers = sum(isinstance(module, Experts) for module in model.modules())
    return found, torch.stack(seen[:layers])


class _StableTopK(TorchFunctionMode):
    """torch.topk in which the lower of two equal indices comes first, as this library has it."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **kwargs)
        k = kwargs["k"] if "k" in kwargs else args[1]
        values, index = args[0].sort(dim=-1, descending=True, stable=True)
        return torch.return_types.topk((values[..., :k], index[..., :k]))


def train_by_transformers(family: str, router: str, dtype: torch.dtype, count: int, steps: int) -> dict[str, Any]:
    """The same by the untouched model, `count` micro-batches a step, with torch's clipping."""
    with _StableTopK():
        return _train_by_transformers(family, router, dtype, count, steps)


def _train_by_transformers(family: str, router: str, dtype: torch.dtype, count: int, steps: int) -> dict[str, Any]:
    model = build(family, router, dtype)
    use_own_code(model)
    found: dict[str, Any] = {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        for index, batch in enumerate(_micro_batches(step, count)):
            output = model(**batch)
            (output.loss / count).backward()
            found[f"logits {step} {index}"] = output.logits.detach()
            found[f"loss {step} {index}"] = output.loss.detach()
        if step in (0, steps - 1):
            found[f"gradients {step}"] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found[f"norm {step}"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    found["parameters"] = {name: p.detach() for name, p in model.named_parameters()}
    return found
