"""Cases of all other parts than linear layers: norms, vocabulary, gradient clipping, attention, data parallelism."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..comm.collectives import gather_major, resolve_group
from ..core.mode import set_tp_invariant_mode
from ..core.options import Normalization, Reduction
from ..data_parallel.micro_batch_tree import MicroBatchTree
from ..functional.attention_choice import safe_attention
from ..functional.cross_entropy import vocab_parallel_cross_entropy
from ..layers.grad_norm import clip_grad_norm_
from ..layers.parallel_norm import ParallelNorm
from ..layers.parameters import mark_sharded
from ..layers.vocab_embedding import VocabParallelEmbedding
from ..testing.checks import full_grads, wide_randn
from .verify_case import Case, Results, grad_of, part, whole, wide

_REDUCTIONS: tuple[Reduction, ...] = ("none", "mean")


@dataclasses.dataclass(frozen=True)
class NormCase(Case):
    """A ParallelNorm with its tokens or, with `heads`, its heads sharded: x [tokens, features] or [S, heads, features].

    tokens   heads is None: those of all ranks; else S
    """

    normalization: Normalization
    tokens: int
    features: int
    heads: int | None = None

    def _inputs(self) -> dict[str, Tensor]:
        g, dtype = self.generator(), self.dtype
        shape = (self.tokens, self.features) if self.heads is None else (self.tokens, self.heads, self.features)
        data = {"weight": wide(self.features, generator=g, dtype=dtype)}
        if self.normalization == "LayerNorm":
            data["bias"] = wide(self.features, generator=g, dtype=dtype)
        return data | {name: wide(*shape, generator=g, dtype=dtype) for name in ("x", "dy")}

    def run(self, tp_group: Any) -> Results:
        group = resolve_group(tp_group)
        data = {name: t.to(self.device) for name, t in self._inputs().items()}
        norm = ParallelNorm(
            self.features,
            normalization=self.normalization,
            bias=self.normalization == "LayerNorm",
            tp_group=tp_group,
            sequence_parallel=self.heads is None,
            heads=self.heads,
            heads_dim=None if self.heads is None else 1,
            device=self.device,
            dtype=self.dtype,
        )
        dim = 0 if self.heads is None else 1
        with set_tp_invariant_mode(self.mode), torch.no_grad():
            for name, parameter in norm.named_parameters():
                parameter.copy_(data[name])
            with torch.enable_grad():
                x = part(data["x"], dim, group)
                y = norm(x)
                y.backward(part(data["dy"], dim, group))
        results = {"y": whole(y, dim, group), "dx": whole(grad_of(x), dim, group)}
        return results | {f"d_{name}": grad for name, grad in full_grads(norm).items()}

    def torch_results(self, dtype: torch.dtype) -> dict[str, Tensor]:
        data = {name: t.to(self.device, dtype).requires_grad_() for name, t in self._inputs().items()}
        x, weight, size = data["x"], data["weight"], (self.features,)
        if self.normalization == "RMSNorm":
            y = F.rms_norm(x, size, weight, 1e-6)
        else:
            y = F.layer_norm(x, size, weight, data["bias"], 1e-6)
        y.backward(data["dy"])
        grads = {f"d_{name}": grad_of(data[name]) for name in ("weight", "bias") if name in data}
        return {"y": y.detach(), "dx": grad_of(x)} | grads


@dataclasses.dataclass(frozen=True)
class EmbeddingCase(Case):
    """A VocabParallelEmbedding; half of all ids are one id, and one row of the table is -0.0."""

    vocabulary: int
    features: int
    tokens: int
    sequence_parallel: bool = False

    @property
    def as_reference(self) -> EmbeddingCase:
        return self.with_(sequence_parallel=False)

    def _inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        g = self.generator()
        table = wide(self.vocabulary, self.features, generator=g, dtype=self.dtype)
        table[3] = -0.0  # which the stock path's sum over ranks turns into 0.0
        ids = torch.randint(self.vocabulary, (self.tokens,), generator=g)
        ids[::2], ids[1] = 5, 3
        return table, ids, wide(self.tokens, self.features, generator=g, dtype=self.dtype)

    def run(self, tp_group: Any) -> Results:
        group = resolve_group(tp_group)
        table, ids, dy = (t.to(self.device) for t in self._inputs())
        embedding = VocabParallelEmbedding(
            self.vocabulary,
            self.features,
            tp_group=tp_group,
            sequence_parallel=self.sequence_parallel,
            device=self.device,
            dtype=self.dtype,
        )
        with torch.no_grad():
            embedding.weight.copy_(embedding.shard_spec("weight").local(table))
        with set_tp_invariant_mode(self.mode):
            y = embedding(ids)
            y.backward(part(dy, 0, group) if self.sequence_parallel else dy)
        y = whole(y, 0, group) if self.sequence_parallel else y.detach()
        return {"y": y} | {f"d_{name}": grad for name, grad in full_grads(embedding).items()}

    def torch_results(self, dtype: torch.dtype) -> dict[str, Tensor]:
        table, ids, dy = (t.to(self.device) for t in self._inputs())
        table = table.to(dtype).requires_grad_()
        y = F.embedding(ids, table)
        y.backward(dy.to(dtype))
        return {"y": y.detach(), "d_weight": grad_of(table)}


@dataclasses.dataclass(frozen=True)
class LossCase(Case):
    """vocab_parallel_cross_entropy with label smoothing and ignored tokens, one loss for each token and their mean."""

    vocabulary: int
    tokens: int
    label_smoothing: float = 0.1

    @property
    def allowed(self) -> float:
        return 2.0  # both compute in fp32 and round 16-bit gradients once

    def _inputs(self) -> tuple[Tensor, Tensor]:
        g = self.generator()
        logits = (3 * torch.randn(self.tokens, self.vocabulary, generator=g)).to(self.dtype)
        target = torch.randint(self.vocabulary, (self.tokens,), generator=g)
        target[4::5] = -100
        return logits, target

    def run(self, tp_group: Any) -> Results:
        group = resolve_group(tp_group)
        full, target = (t.to(self.device) for t in self._inputs())
        results: Results = {}
        for reduction in _REDUCTIONS:
            logits = part(full, 1, group)
            with set_tp_invariant_mode(self.mode):
                loss = vocab_parallel_cross_entropy(
                    logits, target, tp_group=tp_group, label_smoothing=self.label_smoothing, reduction=reduction
                )
                loss.sum().backward()
            results |= {reduction: loss.detach(), f"dlogits_{reduction}": whole(grad_of(logits), 1, group)}
        return results

    def torch_results(self, dtype: torch.dtype) -> dict[str, Tensor]:
        full, target = (t.to(self.device) for t in self._inputs())
        results: dict[str, Tensor] = {}
        for reduction in _REDUCTIONS:
            # in fp32 at least, as this library's: torch's own loss would have 16 bits
            logits = full.to(dtype).requires_grad_()
            wider = logits if dtype == torch.float64 else logits.float()
            loss = F.cross_entropy(wider, target, label_smoothing=self.label_smoothing, reduction=reduction)
            loss.sum().backward()
            results |= {reduction: loss.detach(), f"dlogits_{reduction}": grad_of(logits)}
        return results


@dataclasses.dataclass(frozen=True)
class ClipCase(Case):
    """clip_grad_norm_ of column-, row-parallel, gated and whole parameters; many times, since a norm is one number."""

    features: int
    repeats: int = 16

    @property
    def allowed(self) -> float:
        return 2.0  # the norm is fp32 in both

    def _grads(self) -> list[dict[str, Tensor]]:
        g, n = self.generator(), self.features
        shapes = {"column": (n, 24), "row": (20, n), "gated": (2 * n, 3), "whole": (40,)}
        # 2^-8, so that fp16's squares stay in range in torch's own
        return [
            {name: (wide_randn(*shape, generator=g, spread=2) * 2**-8).to(self.dtype) for name, shape in shapes.items()}
            for _ in range(self.repeats)
        ]

    def run(self, tp_group: Any) -> Results:
        group = resolve_group(tp_group)
        places: dict[str, tuple[int | None, int]] = dict(column=(0, 1), row=(1, 1), gated=(0, 2), whole=(None, 1))
        norms, clipped = [], []
        for grads in self._grads():
            parameters = []
            for name, grad in grads.items():
                dim, stride = places[name]
                local = part(grad.to(self.device), dim, group, stride).detach()
                parameters.append(nn.Parameter(torch.zeros_like(local)))
                parameters[-1].grad = local
                mark_sharded(parameters[-1], dim, stride)
            with set_tp_invariant_mode(self.mode):
                norms.append(clip_grad_norm_(parameters, 2**-6, tp_group=tp_group))
            clipped.append(whole(grad_of(parameters[0]), 0, group))
        return {"norms": torch.stack(norms), "clipped": torch.stack(clipped)}

    def torch_results(self, dtype: torch.dtype) -> dict[str, Tensor]:
        norms, clipped = [], []
        for grads in self._grads():
            parameters = [nn.Parameter(torch.zeros_like(g, dtype=dtype, device=self.device)) for g in grads.values()]
            for parameter, grad in zip(parameters, grads.values(), strict=True):
                parameter.grad = grad.to(self.device, dtype)
            norms.append(nn.utils.clip_grad_norm_(parameters, 2**-6))
            clipped.append(grad_of(parameters[0]))
        return {"norms": torch.stack(norms), "clipped": torch.stack(clipped)}


@dataclasses.dataclass(frozen=True)
class AttentionCase(Case):
    """safe_attention over this rank's heads. The control takes the keys in another order on every rank.

    Stock kernels, with heads sharded, often give the same bits (on a CPU nearly always), so they are no control.
    """

    heads: int
    kv_heads: int
    sequence: int
    head_dim: int
    is_causal: bool = True

    @property
    def control(self) -> AttentionCase:
        return self.with_(mode=False, is_causal=False)

    @property
    def allowed(self) -> float:
        return 2.0  # flash and math kernels round in other places than this one

    def _inputs(self) -> list[Tensor]:
        g, s, d = self.generator(), self.sequence, self.head_dim
        q, k = (torch.randn(2, h, s, d, generator=g).to(self.dtype) for h in (self.heads, self.kv_heads))
        return [q, k, *(wide(2, h, s, d, generator=g, dtype=self.dtype) for h in (self.kv_heads, self.heads))]

    def run(self, tp_group: Any) -> Results:
        group = resolve_group(tp_group)
        q, k, v, dy = (part(t.to(self.device), 1, group) for t in self._inputs())
        moved = [k, v] if self.mode else [t.roll(group.size - 1, dims=2) for t in (k, v)]
        options = dict(is_causal=self.is_causal, enable_gqa=self.heads != self.kv_heads)
        with set_tp_invariant_mode(True):
            y = safe_attention(q, *moved, **options)  # type: ignore[arg-type]
            y.backward(dy)
        parts = {"y": y.detach(), "dq": grad_of(q), "dk": grad_of(k), "dv": grad_of(v)}
        return {name: whole(t, 1, group) for name, t in parts.items()}

    def torch_results(self, dtype: torch.dtype) -> dict[str, Tensor]:
        q, k, v, dy = (t.to(self.device, dtype).requires_grad_() for t in self._inputs())
        options: dict[str, Any] = dict(is_causal=self.is_causal, enable_gqa=self.heads != self.kv_heads)
        y = F.scaled_dot_product_attention(q, k, v, **options)
        y.backward(dy.detach())
        return {"y": y.detach(), "dq": grad_of(q), "dk": grad_of(k), "dv": grad_of(v)}


@dataclasses.dataclass(frozen=True)
class DataParallelCase(Case):
    """MicroBatchTree over data-parallel ranks. The control adds up rank by rank, in the gradient's dtype."""

    micro_batches: int
    features: int

    @property
    def allowed(self) -> float:
        return 2.0  # torch adds in the parameter's dtype

    def _inputs(self) -> Tensor:
        return wide(self.micro_batches, self.features, self.features, generator=self.generator(), dtype=self.dtype)

    def run(self, tp_group: Any) -> Results:
        grads = self._inputs().to(self.device)
        parameter = nn.Parameter(torch.zeros_like(grads[0]))
        tree = MicroBatchTree([parameter], resolve_group(tp_group), self.micro_batches)
        total = torch.zeros_like(grads[0])
        for index in tree.share:
            (parameter * grads[index]).sum().backward()
            total += grad_of(parameter)
            tree.add(count=1)
        tree.reduce()
        if self.mode:
            return {"grad": parameter.grad}
        naive = torch.zeros_like(total)
        for theirs in gather_major(total, resolve_group(tp_group)).flip(0):
            naive += theirs
        return {"grad": naive / self.micro_batches}

    def torch_results(self, dtype: torch.dtype) -> dict[str, Tensor]:
        grads = self._inputs().to(self.device, dtype)
        total = torch.zeros_like(grads[0])
        for grad in grads:
            total += grad
        return {"grad": total / self.micro_batches}
