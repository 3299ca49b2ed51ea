"""One rank of the runs of test_faults.py: trains a tiny model with checkpoints and a digest log, and may be killed.

A process of its own, on gloo or NCCL: no torchrun, which ends the other ranks by itself when one dies.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import tp_invariant as tpi
from tp_invariant.consistency.environment import environment_facts
from tp_invariant.data_parallel import MicroBatchTree, fixed_order_hook


def build(tp_group, device):
    torch.manual_seed(0)
    common = dict(tp_group=tp_group, device=device, sequence_parallel=True)
    model = torch.nn.Sequential(
        tpi.LayerNormLinear(32, 48, parallel_mode="column", **common), tpi.Linear(48, 32, parallel_mode="row", **common)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def train(tp_group, device, options):
    rank, world = dist.get_rank(tp_group), dist.get_world_size(tp_group)
    folder = Path(options["folder"])
    model, optimizer = build(tp_group, device)
    first = 0
    if options.get("resume"):
        # `pretend`: the number of a step that the checkpoint is not of
        first = tpi.checkpoint.load(folder / "checkpoint", model, optimizer)["step"] + options.get("pretend", 0)
    log = tpi.DigestLog(folder / options["log"], model, tp_group=tp_group)

    def die(grad):
        os.kill(os.getpid(), signal.SIGKILL)

    for step in range(first, options["steps"]):
        x = torch.randn(12, 32, generator=torch.Generator().manual_seed(100 + step)).chunk(world)[rank].to(device)
        hidden = model[0](x)
        if step == options.get("die_at") and rank == options["who"]:
            hidden.register_hook(die)  # when backward has gone through the second layer
        loss = gathered_mean_square(model[1](hidden), tp_group)
        optimizer.zero_grad()
        loss.backward()
        norm = tpi.clip_grad_norm_(model.parameters(), 1.0, tp_group=tp_group)
        optimizer.step()
        log.write(step, loss=loss, gradient_norm=norm)
        if (step + 1) % 2 == 0 and options.get("save"):
            tpi.checkpoint.save(folder / "checkpoint", model, optimizer, extra={"step": step + 1})
    log.close()


def gathered_mean_square(y, tp_group):
    return tpi.regions.gather_sequence(y, tp_group).square().mean()


def main(rank, world, port, options):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = torch.device(options["device"], rank) if options["device"] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(seconds=options["timeout"]))
    with tpi.set_tp_invariant_mode(options.get("mode", True)):
        for one in options["runs"]:  # several, since a start takes seconds
            train(dist.group.WORLD, device, {**options, **one})
    dist.destroy_process_group()


def in_a_process(output, environment, *args):
    """A rank's process: what it prints goes into a file, since a full pipe would hold it up."""
    with open(output, "w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.update(environment)
    main(*args)


def before_the_first_call(outcomes, rank, port):
    """Rank 1 does not come to the first call of a group, while it lives; then, in another group, it ends before it.

    The groups' time-out, which passes, is short; what takes longer on a busy machine is done before it counts.
    """
    patience = timedelta(seconds=300)
    store = dist.TCPStore("127.0.0.1", port, 3, rank == 0, timeout=patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=patience)
    groups = {what: dist.new_group([0, 1, 2]) for what in ("stays away", "ends")}
    tpi.Linear(12, 12)(torch.ones(4, 12))
    environment_facts(torch.device("cpu"))
    for what, group in groups.items():
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=6), group)
        dist.barrier()
        if rank == 1 and what == "ends":
            sys.exit(3)
        if rank == 0:  # late, but it comes: the rank that fails earlier must not name it
            time.sleep(1.5)
        if rank != 1:
            layer = tpi.Linear(12, 12, parallel_mode="row", tp_group=group)
            try:
                with tpi.set_tp_invariant_mode(True):
                    layer(torch.ones(4, 4))
            except RuntimeError as error:
                Path(outcomes, f"{what} {rank}").write_text(str(error))
        store.set(f"{what} {rank}", "")
        store.wait([f"{what} 0", f"{what} 2"], patience)
    if rank == 0:  # it has the store, so that the other's wait would fail if it ended now
        store.wait(["all seen"], patience)
    else:
        store.set("all seen", "")


def a_hook_alone_and_a_death(folder, rank):
    """Rank 0 alone calls a hook. Then rank 2 ends; rank 0 finds out in its MicroBatchTree, rank 1 in its hook.

    None has a tensor-parallel layer.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 3), rank=rank, world_size=3)
    trees, hooks, lonely = (dist.new_group(ranks) for ranks in ([0, 2], [1, 2], [0, 1]))
    bucket = SimpleNamespace(buffer=lambda: torch.ones(6), index=lambda: 0, parameters=list)
    if rank == 0:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), lonely)
        try:
            fixed_order_hook(lonely, bucket)
        except RuntimeError as error:
            Path(folder, "alone").write_text(str(error))
    if rank != 1:
        tree = MicroBatchTree([torch.nn.Parameter(torch.zeros(3))], trees, micro_batches=2)
        tree.add()
    if rank != 0:
        fixed_order_hook(hooks, bucket)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        tree.reduce() if rank == 0 else fixed_order_hook(hooks, bucket)
    except RuntimeError as error:
        Path(folder, f"died {rank}").write_text(f"{type(error).__name__}: {error}")
