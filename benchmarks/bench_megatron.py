"""A Megatron GPT with layers of Qwen3-8B's sizes: its digest, or a step's time with the mode on over the mode off.

torchrun --nproc-per-node 4 benchmarks/bench_megatron.py --layers 16 --tokens 2048 8192
torchrun --nproc-per-node 4 benchmarks/bench_megatron.py --layers 24 --digest --steps 50 --distributed-optimizer

The tensor-parallel degree is the number of ranks. Needs GPUs, Python 3.12 and megatron-core 0.19.2
(`pip install --no-deps megatron-core==0.19.2`). Both sides are this library's modules in Megatron's model, with
Megatron's DistributedDataParallel, finalize_model_grads and Adam. "captured" is one CUDA graph of forward and backward.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import tp_invariant as tpi
from tp_invariant.integrations import megatron
from tp_invariant.testing import digest

VOCABULARY = 151936


class Training:
    """A model, its optimizer, and batches of random tokens."""

    def __init__(self, layers: int, longest: int, distributed: bool) -> None:
        config = TransformerConfig(
            num_layers=layers, hidden_size=4096, ffn_hidden_size=12288, num_attention_heads=32, num_query_groups=8,
            kv_channels=128, qk_layernorm=True, normalization="RMSNorm", gated_linear_unit=True, activation_func=F.silu,
            add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16, bf16=True,
            tensor_model_parallel_size=dist.get_world_size(), sequence_parallel=dist.get_world_size() > 1,
            gradient_accumulation_fusion=True, bias_dropout_fusion=False, bias_activation_fusion=False,
            masked_softmax_fusion=False, apply_rope_fusion=False, persist_layer_norm=False,
        )  # fmt: skip
        spec = megatron.gpt_block_spec(config)
        self.model = GPTModel(config, spec, VOCABULARY, longest, position_embedding_type="rope", rotary_base=1000000)
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
        self.ddp = DistributedDataParallel(config, settings, Float16Module(config, self.model.cuda()))
        adam = OptimizerConfig(
            optimizer="adam", lr=1e-4, clip_grad=1.0, bf16=True, params_dtype=torch.bfloat16,
            use_distributed_optimizer=distributed,
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(adam, [self.ddp])
        self.generator = torch.Generator().manual_seed(1)

    def batch(self, tokens: int) -> tuple[Tensor, ...]:
        """ids, labels and positions, [1, tokens] each."""
        ids = torch.randint(0, VOCABULARY, (1, tokens + 1), generator=self.generator).cuda()
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.arange(tokens, device="cuda")[None]

    def gradients(self, ids: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        loss = self.ddp(ids, positions, None, labels=labels).float().mean()
        loss.backward()
        finalize_model_grads([self.ddp])
        return loss

    def step(self, fill: Callable[[], Tensor | None]) -> tuple[Tensor | None, float]:
        """A step whose loss and gradients `fill` computes: (loss, gradient norm)."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = fill()
        return loss, self.optimizer.step()[1]

    def captured(self, batch: tuple[Tensor, ...]) -> Callable[[], None]:
        """`gradients` of this batch as a CUDA graph."""
        for _ in range(2):
            self.step(partial(self.gradients, *batch))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            self.gradients(*batch)
        return graph.replay


def print_digest(training: Training, tokens: int, steps: int) -> None:
    seen = []
    for step in range(steps):
        loss, norm = training.step(partial(training.gradients, *training.batch(tokens)))
        assert loss is not None
        seen.append((float(loss), float(norm)))
        if dist.get_rank() == 0 and step in (0, steps - 1):
            print(f"step {step}: loss {float(loss)!r}, gradient norm {float(norm)!r}", flush=True)
    whole = tpi.full_state_dict(training.model)
    if dist.get_rank() == 0:
        print(f"TP={dist.get_world_size()} digest {digest((seen, whole))}", flush=True)


def print_times(training: Training, tokens: int, rounds: int) -> None:
    batch = training.batch(tokens)
    fills: dict[tuple[str, bool], Callable] = {}
    for mode in (True, False):
        with tpi.set_tp_invariant_mode(mode):
            for _ in range(3):
                training.step(partial(training.gradients, *batch))
            fills["from Python", mode] = partial(training.gradients, *batch)
            fills["captured", mode] = training.captured(batch)
    times: dict[tuple[str, bool], list[float]] = {key: [] for key in fills}
    for _ in range(rounds + 1):
        for (form, mode), fill in fills.items():
            with tpi.set_tp_invariant_mode(mode):
                torch.cuda.synchronize()
                dist.barrier()
                start = time.perf_counter()
                training.step(fill)
                torch.cuda.synchronize()
                times[form, mode].append(1e3 * (time.perf_counter() - start))
    medians = {key: statistics.median(value[1:]) for key, value in times.items()}
    if dist.get_rank() == 0:
        for form in ("from Python", "captured"):
            on, off = medians[form, True], medians[form, False]
            text = (
                f"TP={dist.get_world_size()} {tokens} tokens, {form}: on {on:.1f} ms, off {off:.1f} ms, {on / off:.3f}"
            )
            print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048])
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--digest", action="store_true", help="of losses, norms and whole parameters, not times")
    parser.add_argument("--steps", type=int, default=50, help="with --digest")
    parser.add_argument("--off", action="store_true", help="with --digest: the mode off")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(123, use_cudagraphable_rng=True)
    torch.manual_seed(7)
    # the graph is captured on the stream on which the hooks of DistributedDataParallel are made
    torch.cuda.set_stream(torch.cuda.Stream())
    tpi.owners.weight_cache.ahead_in_graphs = True
    megatron.install()
    with tpi.set_tp_invariant_mode(not args.off):
        training = Training(args.layers, max(args.tokens), args.distributed_optimizer)
        for tokens in args.tokens:
            if args.digest:
                print_digest(training, tokens, args.steps)
            else:
                print_times(training, tokens, args.rounds)
    os._exit(0)  # captured graphs hold the communicator


if __name__ == "__main__":
    main()
