"""What takes the place of a module or function takes its arguments by the same names, as by position."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import hf_models
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.functional.attention_choice import _safe_sdpa
from tp_invariant.hugging_face.experts import _linear, _top_k
from tp_invariant.hugging_face.models import CausalLMLoss, _HuggingFace

FAMILIES = ("llama", "qwen3", "gemma3", "phi3", "olmo2", "mixtral", "gpt_oss")


def calls_of(model: nn.Module, own: nn.Module, **inputs: Any) -> dict[str, tuple[dict[str, Any], Any]]:
    """{name of a module: its arguments by the names of the original's forward, and its output}, in the first call."""
    calls: dict[str, tuple[dict[str, Any], Any]] = {}
    signatures = {name: inspect.signature(module.forward) for name, module in own.named_modules()}

    def note(name: str, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        bound = signatures[name].bind(*args, **kwargs)
        kinds = {key: one.kind for key, one in signatures[name].parameters.items()}
        named: dict[str, Any] = {}
        for key, value in bound.arguments.items():
            named.update(value if kinds[key] is inspect.Parameter.VAR_KEYWORD else {key: value})
        calls.setdefault(name, (named, output))

    for name, module in model.named_modules():
        if name in signatures:
            module.register_forward_hook(
                lambda module, args, kwargs, output, name=name: note(name, args, kwargs, output), with_kwargs=True
            )
    model(**inputs)
    return calls


def by_name(own: nn.Module, tp_group: Any, **inputs: Any) -> set[str]:
    """Classes that stand-ins took the place of which were called again by name alone, and returned the same bytes."""
    model = tpi.parallelize(copy.deepcopy(own), tp_group, None if hasattr(own, "config") else {})
    called = set()
    with tpi.set_tp_invariant_mode(True), torch.no_grad():
        for name, (named, output) in calls_of(model, own, **inputs).items():
            former, module = own.get_submodule(name), model.get_submodule(name)
            if type(module) is type(former) and "act" not in name:
                continue
            again = module(**named)
            assert testing.digest(again) == testing.digest(output), name
            called.add(type(former).__name__)
    return called


def every_family(tp_group: Any) -> dict[str, set[str]]:
    inputs = dict(input_ids=torch.arange(3, 15).view(2, 6), use_cache=False)
    return {family: by_name(hf_models.build(family).eval(), tp_group, **inputs) for family in FAMILIES}


def test_modules_of_hugging_face_models():
    for degree in (1, 2):
        called = run_ranks(every_family, degree)[0]
        assert {"Embedding", "LlamaRMSNorm", "Linear", "LlamaMLP", "SiLUActivation"} <= called["llama"]
        assert "Gemma3TextScaledWordEmbedding" in called["gemma3"]
        assert "MixtralExperts" in called["mixtral"]


class OwnNorm(nn.LayerNorm):
    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h)


class Net(nn.Module):
    """Every module by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.first, self.second, self.own = (
            nn.Embedding(32, 16),
            nn.LayerNorm(16),
            nn.RMSNorm(16),
            OwnNorm(16),
        )
        self.up, self.act, self.down = nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 16)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.first(input=self.table(input=ids))
        h = self.second(**{next(iter(inspect.signature(nn.RMSNorm.forward).parameters.keys() - {"self"})): h})
        return self.down(input=self.act(input=self.up(input=self.own(h=h))))


def net(tp_group: Any, mode: bool) -> list[Tensor]:
    plan = {"table": "embedding_rowwise", "up": "colwise", "down": "rowwise"}
    with tpi.set_tp_invariant_mode(mode):
        model = tpi.parallelize(Net(), tp_group, plan)
        y = model(ids=torch.arange(24).view(2, 12))
        y.square().sum().backward()
    return [y.detach(), *testing.full_grads(model).values()]


def test_a_model_of_ones_own():
    own = Net()
    y = own(ids=torch.arange(24).view(2, 12))
    y.square().sum().backward()
    right = [y.detach(), *(p.grad for p in own.parameters())]
    one, two = (run_ranks(net, degree, True)[0] for degree in (1, 2))
    torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-5)
    testing.assert_bitwise_equal(one, two)
    assert testing.digest(run_ranks(net, 2, False)[0]) != testing.digest(one)  # the control


def test_functions():
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.loss.loss_utils import ForCausalLMLoss
    from transformers.models.llama.modeling_llama import eager_attention_forward

    stand_ins = {CausalLMLoss.__call__: [ForCausalLMLoss], _HuggingFace.__call__: [sdpa_attention_forward]}
    stand_ins[_HuggingFace.__call__].append(eager_attention_forward)
    for ours, replaced in stand_ins.items():
        for theirs in replaced:
            inspect.signature(ours).bind(None, **dict.fromkeys(inspect.signature(theirs).parameters))
    x = torch.randn(2, 2, 4, 8)
    options = dict(attn_mask=None, dropout_p=0.0, is_causal=True, scale=0.3, enable_gqa=False)
    right = F.scaled_dot_product_attention(query=x, key=x, value=x, **options)
    torch.testing.assert_close(_safe_sdpa(query=x, key=x, value=x, **options), right)
    torch.testing.assert_close(_linear(None, input=x, weight=x[0, 0], bias=None), F.linear(x, x[0, 0]))
    right = torch.topk(input=x, k=2, dim=-1, largest=True, sorted=True)
    testing.assert_bitwise_equal(_top_k(torch.topk, input=x, k=2, dim=-1, largest=True, sorted=True), right)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 40), nn.SiLU(inplace=True), nn.Linear(40, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(input=self.act(input=self.up(input=x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), Mlp()

    def forward(self, h: Tensor) -> Tensor:
        return h + self.mlp(x=self.norm(input=h))


class Stack(nn.Module):
    """Decoder layers, their blocks and the norms before and after them, all called by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.norm = nn.ModuleList([Layer(), Layer()]), OwnNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(h=x)
        for layer in self.layers:
            x = layer(h=x)
        return self.norm(h=x)


def stack(tp_group: Any, parallel: bool = True) -> list[Tensor]:
    model = Stack()
    if parallel:
        plan = {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}
        tpi.parallelize(model, tp_group, plan, sequence_parallel=True)
    with tpi.set_tp_invariant_mode(True):
        y = model(torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1)))
        y.square().sum().backward()
    return [y.detach(), *testing.full_grads(model).values()]


def test_layers_and_blocks_under_sequence_parallelism():
    one, two = (run_ranks(stack, degree)[0] for degree in (1, 2))
    testing.assert_bitwise_equal(one, two)
    torch.testing.assert_close(one, stack(None, parallel=False), rtol=1e-3, atol=1e-4)
