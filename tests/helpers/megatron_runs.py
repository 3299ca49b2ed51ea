"""Steps of small Megatron models on gloo ranks. Megatron asks for CUDA in a few places, which are CPUs here."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import tp_invariant as tpi
from tp_invariant import testing

_PRELOADED = [
    "tp_invariant",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.dist_checkpointing",
]


def on_new_ranks(fn: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """fn(rank, world, *args) on new processes, which alone are in the default group: Megatron makes groups of it."""
    root = str(Path(__file__).parents[2])  # new processes import fn as tests.<..>, as pytest names it
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(sys, "path", [*sys.path, root]):
        # the server of new processes imports Megatron once, which takes seconds
        torch.multiprocessing.set_forkserver_preload(_PRELOADED)
        torch.multiprocessing.start_processes(_on_rank, (fn, world, folder, args), world, start_method="forkserver")
        return [torch.load(Path(folder, f"result{rank}"), weights_only=False) for rank in range(world)]


def _on_rank(rank: int, fn: Callable[..., Any], world: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    torch.save(fn(rank, world, *args), Path(folder, f"result{rank}"))
    torch.distributed.destroy_process_group()


class _CpuForCuda(TorchFunctionMode):
    """Tensors that are to be on a GPU are on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:  # which Megatron asserts is one of torch.cuda's
            return f"torch.cuda.{func(*args).rpartition('.')[2]}"
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


@contextlib.contextmanager
def on_cpus() -> Any:
    """What Megatron asks of torch.cuda, answered with the CPU's generator."""
    import megatron.core.tensor_parallel.random as megatron_random

    get, put = (lambda *_, **__: torch.get_rng_state()), (lambda state, *_, **__: torch.set_rng_state(state))
    cuda = dict(
        current_device=lambda: torch.device("cpu"), get_rng_state=get, set_rng_state=put, synchronize=lambda *_: None,
        manual_seed=torch.manual_seed, current_stream=lambda *_: None, FloatTensor=torch.FloatTensor,
        HalfTensor=torch.HalfTensor, BFloat16Tensor=torch.BFloat16Tensor,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(megatron_random, "_get_cuda_rng_state", get))
        stack.enter_context(mock.patch.object(megatron_random, "_set_cuda_rng_state", put))
        stack.enter_context(_CpuForCuda())
        yield


def config_of(tp: int, **changes: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    options = dict(
        num_layers=2, hidden_size=32, num_attention_heads=8, num_query_groups=4, ffn_hidden_size=48,
        use_cpu_initialization=True, params_dtype=torch.float32, tensor_model_parallel_size=tp, hidden_dropout=0.0,
        attention_dropout=0.0, add_bias_linear=False, gated_linear_unit=True, activation_func=F.silu,
        normalization="RMSNorm", bias_dropout_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False,
        apply_rope_fusion=False, gradient_accumulation_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    options |= changes
    if tp == 1:
        options["sequence_parallel"] = False
    options["bf16"] = options["params_dtype"] == torch.bfloat16
    return TransformerConfig(**options)


def batch(step: int) -> tuple[torch.Tensor, ...]:
    """(ids, labels, positions), [2, 8] each."""
    ids = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.arange(8).expand(2, -1).contiguous()


def full(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The whole of which this rank has `tensor`, laid out as `parameter` is."""
    group = getattr(parameter, "tp_group", None)
    if group is None or not parameter.tensor_model_parallel:
        return tensor
    parts = [torch.empty_like(tensor.contiguous()) for _ in range(group.size)]
    torch.distributed.all_gather(parts, tensor.contiguous(), group=group.process_group)
    pieces = [part.chunk(parameter.partition_stride, parameter.partition_dim) for part in parts]
    return torch.cat([p[i] for i in range(parameter.partition_stride) for p in pieces], parameter.partition_dim)


def trained(config: Any, model: Any, distributed: bool = False) -> tuple[Any, Any]:
    """Megatron's DDP of a model and its optimizer, Adam: the distributed one, or the plain one."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    ddp = DistributedDataParallel(config, ddp_config, model)
    options = OptimizerConfig(
        optimizer="adam", lr=1e-2, clip_grad=1.0, bf16=config.bf16, params_dtype=config.params_dtype,
        use_distributed_optimizer=distributed,
    )  # fmt: skip
    return ddp, get_megatron_optimizer(options, [ddp])


@contextlib.contextmanager
def on_degree(tp: int, mode: bool = True, install: bool = True, **degrees: int) -> Any:
    """Megatron's groups of this degree, the mode, and install()."""
    from megatron.core import parallel_state, tensor_parallel

    from tp_invariant.integrations import megatron

    with on_cpus(), tpi.set_tp_invariant_mode(mode), contextlib.ExitStack() as stack:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, **degrees)
        stack.callback(parallel_state.destroy_model_parallel)
        tensor_parallel.model_parallel_cuda_manual_seed(123)
        torch.manual_seed(7)
        if install:
            megatron.install()
            stack.callback(megatron.uninstall)
        yield


def model_of(
    config: Any, tied: bool = False, local: bool = False, hybrid: bool = False, position: str = "rope", **stage: Any
) -> Any:
    """A model of 96 ids: of Megatron's own layers (local), or what install() makes of it."""
    from tp_invariant.integrations import megatron

    options = dict(position_embedding_type=position, share_embeddings_and_output_weights=tied, **stage)
    if hybrid:
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        return HybridModel(config, megatron.hybrid_stack_spec(), 96, 8, hybrid_layer_pattern="*-*-", **options)
    from megatron.core.models.gpt import GPTModel

    layers = megatron.gpt_block_spec(config)
    if local:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        layers = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    return GPTModel(config, layers, 96, 8, **options)


def loss_of(model: Any, step: int = 0) -> torch.Tensor:
    ids, labels, positions = batch(step)
    return model(ids, positions, torch.ones(8, 8, dtype=torch.bool).triu(1)[None, None], labels=labels)


def steps(
    tp: int, mode: bool, changes: dict[str, Any], tied: bool = False, local: bool = False, hybrid: bool = False,
    distributed: bool = False, number: int = 5,
) -> dict[str, Any]:  # fmt: skip
    """Steps of Megatron's DDP, finalize_model_grads and Adam: losses, gradients, logged norms, parameters.

    Each data-parallel rank has a batch of its own. The names are those of the package's modules. With the distributed
    optimizer there are no gradients: each data-parallel rank has a part.
    """
    with on_degree(tp, mode, not local):
        config = config_of(tp, **changes)
        model = model_of(config, tied, local, hybrid)
        ddp, optimizer = trained(config, model, distributed)
        out: dict[str, Any] = {}
        for step in range(number):
            out |= one_step(model, ddp, optimizer, step, gradients=not distributed)
        for name, p in model.named_parameters():
            out[f"parameter {name}"] = full(p.detach(), p).clone()
    return out


def one_step(model: Any, ddp: Any, optimizer: Any, step: int, gradients: bool = True) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    loss = loss_of(ddp, step + 10 * parallel_state.get_data_parallel_rank())
    loss.mean().backward()
    out = {f"loss {step}": loss.detach().clone()}
    finalize_model_grads([ddp])
    for name, p in model.named_parameters() if gradients else ():
        name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        out[f"gradient {step} {name}"] = full(p.main_grad, p).clone()
    return out | {f"norm {step}": float(optimizer.step()[1])}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if testing.digest(one[name]) != testing.digest(other[name])]
