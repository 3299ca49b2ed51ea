"""Cases of whole training steps: a plain torch transformer that `parallelize` shards, and its state between degrees."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..checkpoint import save_load as checkpoint
from ..checkpoint.full_optimizer_state import full_optimizer_state_dict, load_full_optimizer_state_dict
from ..checkpoint.full_state import full_state_dict, load_full_state_dict
from ..conversion.convert import parallelize
from ..conversion.plans import Part
from ..core.bits import assert_bitwise_equal, digest
from ..core.mode import set_tp_invariant_mode
from ..functional.cross_entropy import vocab_parallel_cross_entropy
from ..gemm.gemm_fn import set_default_gemm_fn
from ..layers.grad_norm import clip_grad_norm_
from ..testing.checks import full_grads, full_parameters, run_ranks
from .verify_case import Case, Outcome, Results, load_gemm_fn, run_cases

PLAN: dict[str, str | Part] = {
    "embed": "embedding_rowwise",
    "layers.*.attention.q_proj": "colwise",
    "layers.*.attention.k_proj": "colwise",
    "layers.*.attention.v_proj": "colwise",
    "layers.*.attention.q_norm": Part("replicated_with_grad_allreduce", heads_dim=2),
    "layers.*.attention.out": "rowwise",
    "layers.*.mlp.gate_up": Part("colwise", partition_stride=2),
    "layers.*.mlp.down": "rowwise",
    "head": "colwise",
}


class _Attention(nn.Module):
    """[B, S, H] -> [B, S, H], causal, with a norm of each head of q and half as many heads of k and v."""

    def __init__(self, hidden: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, heads * head_dim // 2, bias=False)
        self.v_proj = nn.Linear(hidden, heads * head_dim // 2, bias=True)
        self.q_norm = nn.RMSNorm(head_dim, eps=1e-6)
        self.out = nn.Linear(heads * head_dim, hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            rearrange(t, "b s (h d) -> b s h d", d=self.head_dim)
            for t in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(rearrange(attended, "b h s d -> b s (h d)"))


class _MLP(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * ffn, bias=False)
        self.act = nn.SiLU()
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


class _Block(nn.Module):
    def __init__(self, hidden: int, heads: int, head_dim: int, ffn: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden, eps=1e-6), nn.RMSNorm(hidden, eps=1e-6)
        self.attention, self.mlp = _Attention(hidden, heads, head_dim), _MLP(hidden, ffn)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class _Transformer(nn.Module):
    """tokens [B, S] -> logits [B, S, V], or this rank's columns of them; plain torch, and its own reference."""

    def __init__(self, layers: int, hidden: int, heads: int, head_dim: int, ffn: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(_Block(hidden, heads, head_dim, ffn) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@dataclasses.dataclass(frozen=True)
class TrainingCase(Case):
    """Steps of AdamW with clipping. All sharded sizes are multiples of `unit`, which the degrees divide."""

    unit: int
    sequence_parallel: bool = False
    layers: int = 1
    hidden: int = 96
    head_dim: int = 16
    steps: int = 3

    def _multiple(self, usual: int) -> int:
        """About `usual`, that `unit` divides."""
        return -(-usual // self.unit) * self.unit

    @property
    def vocabulary(self) -> int:
        return self._multiple(128)

    @property
    def as_reference(self) -> TrainingCase:
        return self.with_(sequence_parallel=False)

    @property
    def allowed(self) -> float:
        return 4.0  # AdamW divides by small numbers, which magnifies rounding errors

    @property
    def noise(self) -> float:
        return max(super().noise, torch.finfo(self.dtype).eps)  # a loss is one number: torch's may be right by chance

    def _plain(self) -> _Transformer:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = _Transformer(
                self.layers, self.hidden, 2 * self.unit, self.head_dim, self._multiple(128), self.vocabulary
            )
        return model.to(self.device, self.dtype)  # rounded to the case's dtype before any other

    def model(self, tp_group: Any) -> nn.Module:
        return parallelize(self._plain(), tp_group, PLAN, sequence_parallel=self.sequence_parallel)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(self.seed + step + 1)
        windows = torch.randint(self.vocabulary, (1, self._multiple(8) + 1), generator=g).to(self.device)
        return windows[:, :-1], windows[:, 1:]

    def train(self, tp_group: Any, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> Results:
        """Losses and gradient norms of the steps, and the full gradients and parameters of the last step."""
        results: Results = {}
        with set_tp_invariant_mode(self.mode):
            for step in steps:
                tokens, targets = self._batch(step)
                loss = vocab_parallel_cross_entropy(model(tokens), targets, tp_group=tp_group)
                optimizer.zero_grad()
                loss.backward()
                norm = clip_grad_norm_(model.parameters(), 1.0, tp_group=tp_group)
                optimizer.step()
                results |= {f"loss{step}": loss.detach(), f"norm{step}": norm}
        results |= {f"d_{name}": grad for name, grad in full_grads(model).items()}
        return results | full_parameters(model)

    def run(self, tp_group: Any) -> Results:
        model = self.model(tp_group)
        return self.train(tp_group, model, self.optimizer(model), range(self.steps))

    def torch_results(self, dtype: torch.dtype) -> dict[str, Tensor]:
        model = self._plain().to(dtype)
        optimizer = self.optimizer(model)
        results: dict[str, Tensor] = {}
        for step in range(self.steps):
            tokens, targets = self._batch(step)
            logits = model(tokens)
            wider = logits if dtype == torch.float64 else logits.float()
            loss = F.cross_entropy(wider.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            results |= {f"loss{step}": loss.detach(), f"norm{step}": norm}
        return results | {name: p.detach() for name, p in model.named_parameters()}


# --- from one degree to another -------------------------------------------------------------------------------------

STOP = 1  # the step before which the state is taken


def _save(tp_group: Any, case: TrainingCase, path: str | None, gemm_fn: str | None) -> Any:
    """Trains up to STOP and writes a checkpoint to path; if path is None, returns the state instead."""
    set_default_gemm_fn(load_gemm_fn(gemm_fn))
    model = case.model(tp_group)
    optimizer = case.optimizer(model)
    case.train(tp_group, model, optimizer, range(STOP))
    if path is not None:
        checkpoint.save(path, model, optimizer, group=tp_group)
        return None
    state = full_state_dict(model, cpu_offload=True), full_optimizer_state_dict(model, optimizer, cpu_offload=True)
    return state if tp_group.rank() == 0 else None


def _resume(tp_group: Any, case: TrainingCase, saved: Any, forget: bool, gemm_fn: str | None) -> Results:
    """Resumes from what _save wrote or returned; with `forget`, the control, without the optimizer's state."""
    set_default_gemm_fn(load_gemm_fn(gemm_fn))
    model = case.with_(seed=case.seed + 1).model(tp_group)  # other weights, which loading must replace
    optimizer = case.optimizer(model)
    if isinstance(saved, str):
        checkpoint.load(saved, model, None if forget else optimizer, group=tp_group)
    else:
        load_full_state_dict(model, saved[0])
        if not forget:
            load_full_optimizer_state_dict(model, optimizer, saved[1])
    results = case.train(tp_group, model, optimizer, range(STOP, case.steps))
    return {name: None if t is None else t.cpu() for name, t in results.items()}


def check_state(case: TrainingCase, degrees: Sequence[int], *, to_disk: bool, gemm_fn: str | None = None) -> Outcome:
    """Compares runs that stop at each degree and resume at the next one with a run at TP=1 that does not stop.

    The control resumes without the optimizer's state, once.

    Raises:
        AssertionError: names the degrees and the first tensor that differs.
        RankError: saving or loading failed.
    """
    outcome = Outcome(cases=len(degrees))

    def on_ranks(fn: Any, degree: int, *args: Any) -> list[Any]:
        return run_ranks(fn, degree, *args, gemm_fn, device=case.device)

    ((whole,),) = on_ranks(run_cases, 1, [case])
    for saved_at, resumed_at in zip(degrees, [*degrees[1:], degrees[0]], strict=True):
        where = f"saved at TP={saved_at} and resumed at TP={resumed_at}"
        with tempfile.TemporaryDirectory(prefix="tp_invariant_verify_") as folder:
            path = f"{folder}/checkpoint" if to_disk else None
            saved = on_ranks(_save, saved_at, case, path)[0]
            for rank, result in enumerate(on_ranks(_resume, resumed_at, case, path or saved, False)):
                try:
                    assert_bitwise_equal(result, {name: whole[name] for name in result})
                except AssertionError as problem:
                    raise AssertionError(f"{where}, rank {rank} differs from an unstopped run: {problem}") from None
                outcome.count(result)
            if not outcome.controls:
                result = on_ranks(_resume, resumed_at, case, path or saved, True)[0]
                if digest(result) == digest({name: whole[name] for name in result}):
                    raise AssertionError(f"the control, {where} without the optimizer's state, does not differ")
                outcome.controls += 1
    return outcome
