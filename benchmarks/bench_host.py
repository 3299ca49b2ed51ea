"""What a call of each layer costs the host, forward and backward, beside torch's, in microseconds.

    python benchmarks/bench_host.py                          # on a CPU: one process, TP=1
    python benchmarks/bench_host.py --tp 2                   # and the part of TP=2 that is Python
    python benchmarks/bench_host.py --profile LayerNormLinear
    torchrun --nproc-per-node 2 benchmarks/bench_host.py     # on GPUs, with kernels and collectives

On a CPU the bundled kernels only allocate their results: a stand-in for launches, which leaves the layers' own work.
torch's operators compute there, so sizes are small. With --tp the ranks of the group are torch's fake ones, whose
collectives send nothing. On a GPU nothing waits for the kernels: keep --tokens small, so that the host is behind.

    ours        plain shards
    DTensors    tp_group is a DeviceMesh
    in a model  plain shards, inside a module whose scaled_dot_product_attention is replaced, as parallelize's are

Times are the least of many runs in turn. --profile says how many Python functions one call takes, and which.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import inspect
import os
import pstats
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tp_invariant as tpi
from tp_invariant.functional.attention_choice import SafeSdpa
from tp_invariant.kernels.select import _MODULES, select
from tp_invariant.layers.parameters import KeepsAttributes

CALLS = 20  # of a run
PROFILED = 50
HEADS = 4
_TELLING = (Tensor, torch.dtype)  # arguments on which the form of a kernel's results depends


# --- kernels that only allocate -------------------------------------------------------------------------------------


def allocating(function: Callable) -> Callable:
    """The function, which computes what it has not been called with before, and then allocates as much again."""
    known: dict[tuple, Any] = {}

    def allocate(*args: Any, **kwargs: Any) -> Any:
        key = tuple([(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in args if isinstance(x, _TELLING)])
        if key not in known:
            known[key] = function(*args, **kwargs)
        made = known[key]
        if isinstance(made, tuple):
            return tuple([torch.empty_like(x) if isinstance(x, Tensor) else x for x in made])
        return torch.empty_like(made) if isinstance(made, Tensor) else made

    return allocate


def replace_kernels() -> None:
    for operation in _MODULES:
        module = select(operation, "cpu")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith(("_", "check")):
                setattr(module, name, allocating(function))


# --- what is called -------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """torch's call; ours, of a group; the shape of the input at TP=1, and its dim of which each rank has a part."""

    torchs: Callable[..., Tensor]
    ours: Callable[..., Any]
    shape: tuple[int, ...]
    sharded_dim: int | None = None

    def local_shape(self, world: int) -> tuple[int, ...]:
        return tuple(n // world if dim == self.sharded_dim else n for dim, n in enumerate(self.shape))


class Surrounded(nn.Module):
    def __init__(self, call: Callable) -> None:
        super().__init__()
        self.call = call
        SafeSdpa(self)

    def forward(self, *args: Any) -> Any:
        return self.call(*args)


def cases(tokens: int, hidden: int, like: dict[str, Any]) -> dict[str, Case]:
    x, heads = (1, tokens, hidden), (1, HEADS, tokens, hidden // HEADS)
    target = torch.randint(hidden, (tokens,), device=like["device"])
    linear = nn.Linear(hidden, hidden, **like)

    def layer(kind: type, *args: Any, **options: Any) -> Callable:
        return lambda group: kind(*args, tp_group=group, **options, **like)

    def ours(**options: Any) -> Callable:
        return layer(tpi.Linear, hidden, hidden, **options)

    return {
        "Linear": Case(linear, ours(), x),
        "Linear, column": Case(linear, ours(parallel_mode="column"), x),
        "Linear, column, SP": Case(
            linear, ours(parallel_mode="column", sequence_parallel=True, sequence_dim=1), x, sharded_dim=1
        ),
        "Linear, row": Case(linear, ours(parallel_mode="row"), x, sharded_dim=2),
        "LayerNormLinear": Case(
            nn.Sequential(nn.LayerNorm(hidden, **like), linear),
            layer(tpi.LayerNormLinear, hidden, hidden, parallel_mode="column"),
            x,
        ),
        "ParallelNorm": Case(nn.RMSNorm(hidden, **like), layer(tpi.ParallelNorm, hidden), x),
        "attention": Case(
            lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
            lambda group: lambda q: tpi.attention(q, q, q, causal=True),
            heads,
        ),
        "cross-entropy": Case(
            lambda logits: F.cross_entropy(logits, target),
            lambda group: lambda logits: tpi.vocab_parallel_cross_entropy(logits, target, tp_group=group),
            (tokens, hidden),
            sharded_dim=1,
        ),
    }


# --- measurements ---------------------------------------------------------------------------------------------------


def timed(call: Callable, shape: tuple[int, ...], like: dict[str, Any]) -> tuple[float, float]:
    """Microseconds of a forward and of a backward."""
    on_gpu = like["device"].type == "cuda"
    now = time.perf_counter if on_gpu else time.thread_time  # on a GPU backward has a thread of its own
    parameters = list(call.parameters()) if isinstance(call, nn.Module) else []
    forward = backward = 0.0
    for _ in range(CALLS):
        x = torch.ones(shape, requires_grad=True, **like)
        start = now()
        y = call(x)
        forward += now() - start
        grad = torch.ones_like(y)
        for p in parameters:
            p.grad = None
        start = now()
        y.backward(grad)
        backward += now() - start
    if on_gpu:
        torch.cuda.synchronize()
    return 1e6 * forward / CALLS, 1e6 * backward / CALLS


def compare(name: str, case: Case, mesh: DeviceMesh, runs: int, like: dict[str, Any]) -> str:
    """A line of the table."""
    plain, shape = case.ours(mesh.get_group()), case.local_shape(mesh.size())
    calls = {"torch": (case.torchs, case.shape), "ours": (plain, shape), "in a model": (Surrounded(plain), shape)}
    if isinstance(plain, nn.Module):
        calls["DTensors"] = case.ours(mesh), shape
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in calls}
    for _ in range(runs):
        for kind, call in calls.items():
            times[kind].append(timed(*call, like))
    least = {kind: [min(part) for part in zip(*found, strict=True)] for kind, found in times.items()}
    columns = [f"{kind} {forward:.0f} + {backward:.0f}" for kind, (forward, backward) in least.items()]
    ratios = [f"{our / torchs:.2f}" for our, torchs in zip(least["ours"], least["torch"], strict=True)]
    return "   ".join([f"{name:19}", *columns, f"ours / torch {', '.join(ratios)}"])


def profile(call: Callable, shape: tuple[int, ...], like: dict[str, Any]) -> None:
    timed(call, shape, like)  # first calls are another matter
    forward, backward = cProfile.Profile(), cProfile.Profile()
    for _ in range(PROFILED):
        x = torch.ones(shape, requires_grad=True, **like)
        y = forward.runcall(call, x)
        backward.runcall(y.backward, torch.ones_like(y))
    for name, profiler in {"forward": forward, "backward": backward}.items():
        stats: Any = pstats.Stats(profiler)
        print(f"\n{name}: {stats.total_calls / PROFILED:.0f} functions a call")
        stats.sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="on a CPU: ranks of the group, all but this one fake")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--profile", metavar="NAME", help="of one layer, with plain shards")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # ranks must have the same whole parameters and target
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
        dist.init_process_group("nccl", **alone)
    else:
        device = torch.device("cpu")
        importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=options.tp)
        replace_kernels()
        KeepsAttributes.shards_may_be_equal = True  # fake ranks answer with what they are asked
    like = dict(device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    world, first = dist.get_world_size(), dist.get_rank() == 0
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("tp",))
    known = cases(options.tokens, options.hidden, like)
    with tpi.set_tp_invariant_mode(True):
        if options.profile is not None:
            case = known[options.profile]
            profile(case.ours(mesh.get_group()), case.local_shape(world), like)
        else:
            where = "GPUs" if device.type == "cuda" else "a CPU, kernels allocate"
            if first:
                print(f"torch {torch.__version__}, TP={world} on {where}: us, forward + backward")
            for name, case in known.items():
                line = compare(name, case, mesh, options.runs, like)
                if first:
                    print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
