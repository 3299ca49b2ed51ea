"""A log of digests, one line for each step, to compare runs at different degrees: see diff.py.

The digests are those of full tensors, but no tensor is gathered. A sharded tensor is cut into slices, one for each
index of its sharded dim, because at every degree some rank holds such a slice whole. Each rank hashes its slices on its
device, and one collective for the whole model gathers the hashes, 8 bytes each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..checkpoint.full_state import WHOLE, Entry, entry_of, run_on_all_ranks
from ..comm.collectives import Group, gather_major, resolve_group
from ..consistency.agreement import check_agreement
from ..core import bits
from ..core.bits import slice_hashes
from ..core.layout import unshard
from ..core.mode import is_tp_invariant_mode_enabled
from ..layers.parameters import ShardSpec, named_shard_specs
from ..version import __version__

FORMAT = "tp_invariant digest log 1"
_ABSENT = bytes(16)  # in place of the digest of a gradient that is None


def _number(value: Tensor | float) -> float:
    return value.detach().item() if isinstance(value, Tensor) else float(value)


class DigestLog(AbstractContextManager["DigestLog"]):
    """Appends a line of JSON to a file after each step: loss, gradient norm, every gradient and every parameter.

        log = tpi.DigestLog("run.log", model, tp_group=tp_group)
        ...
        optimizer.step()
        log.write(step, loss=loss, gradient_norm=norm)

    Create it and call `write` on every rank; rank 0 alone opens the file. A resumed run may append to the same file:
    each part begins with a header, and if a step is written twice the later line counts. The unfinished last line of a
    run that was killed is removed.

    Args:
        path: the file; its folder must exist.
        model: of this library's layers; parameters of other modules count as whole on every rank.
        tp_group: a ProcessGroup or 1-D DeviceMesh; None is TP=1.
    """

    def __init__(
        self, path: str | os.PathLike, model: nn.Module, *, tp_group: dist.ProcessGroup | DeviceMesh | Group | None
    ) -> None:
        self.group, self.model = resolve_group(tp_group), model
        self._agreed: set[Hashable] = set()  # see consistency/agreement.py
        header = {
            "format": FORMAT,
            "tp_invariant": __version__,
            "torch": torch.__version__,
            "degree": self.group.size,
            "mode": is_tp_invariant_mode_enabled(),
            "device": next((_device_name(p) for p in model.parameters()), "none"),
            "parameters": {
                name: f"{str(p.dtype).removeprefix('torch.')} {list(_entry(name, p, spec).full_shape)}"
                for name, p, spec in named_shard_specs(model)
            },
        }
        self._file = run_on_all_ranks(self.group, f"opening {path}", lambda: self._open(Path(path)))
        self._append(header)

    def _open(self, path: Path) -> Any:
        if self.group.rank:
            return None
        file = path.open("ab+")
        file.seek(0)
        end = 0
        for line in file:
            end += len(line) if line.endswith(b"\n") else 0
        file.truncate(end)
        return file

    def _append(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()

    def write(
        self, step: int, *, loss: Tensor | float | None = None, gradient_norm: Tensor | float | None = None
    ) -> str:
        """Logs the step with gradients and parameters as they are now. A collective; waits for the device.

        Returns:
            The digest of all of the line's tensors, the same on every rank.
        """
        scalars = {"loss": loss, "gradient norm": gradient_norm}
        entries = {name: _scalar_entry(value) for name, value in scalars.items() if value is not None}
        named = list(named_shard_specs(self.model))
        gradients = {
            f"gradient {name}": None if p.grad is None else _entry(name, p.grad, spec) for name, p, spec in named
        }
        parameters = {f"parameter {name}": _entry(name, p, spec) for name, p, spec in named}
        tensors, differ = self._digests({**entries, **gradients, **parameters})
        digest = bits.digest(tensors)[:32]
        record: dict[str, Any] = {"step": step}
        record |= {name.replace(" ", "_"): None if value is None else _number(value) for name, value in scalars.items()}
        record |= {"digest": digest, "tensors": tensors}
        self._append(record | ({"ranks_differ": differ} if differ else {}))
        return digest

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _digests(self, entries: dict[str, Entry | None]) -> tuple[dict[str, str | None], dict[str, list[int]]]:
        """Rank 0's digests by name; and for each tensor that differs between ranks, those that differ from rank 0."""
        present = {name: entry for name, entry in entries.items() if entry is not None}
        device = next(self.model.parameters()).device
        if self.group.size > 1:
            what = {name: (str(e.tensor.dtype), tuple(e.full_shape)) for name, e in present.items()}
            facts = {
                "the TP-invariant mode": is_tp_invariant_mode_enabled(),
                "what there is to log": f"{len(what)} tensors, {bits.digest(what)[:12]}",
            }
            check_agreement(facts, self.group, device, self._agreed)
        hashes = _gathered_hashes(present.values(), self.group)
        mine = {
            name: bytes.fromhex(bits.digest((str(entry.tensor.dtype), tuple(entry.full_shape), leaves))[:32])
            for (name, entry), leaves in zip(present.items(), hashes, strict=True)
        }
        own = [list(mine.get(name, _ABSENT)) for name in entries]
        everyone = gather_major(torch.tensor(own, dtype=torch.uint8, device=device), self.group).cpu()
        digests: dict[str, str | None] = {}
        differ: dict[str, list[int]] = {}
        for index, name in enumerate(entries):
            first, *others = map(bytes, everyone[:, index].tolist())
            digests[name] = None if first == _ABSENT else first.hex()
            if ranks := [rank for rank, theirs in enumerate(others, start=1) if theirs != first]:
                differ[name] = ranks
        return digests, differ


def _device_name(tensor: Tensor) -> str:
    return torch.cuda.get_device_name(tensor.device) if tensor.device.type == "cuda" else tensor.device.type


def _entry(name: str, tensor: Tensor, spec: ShardSpec) -> Entry:
    entry = entry_of(tensor, spec)
    if entry.placed is not None:
        raise ValueError(
            f"{name} is placed as {entry.placed.placements} on {entry.placed.device_mesh} (fully_shard): DigestLog "
            "needs slices that a rank holds whole. Compare tp_invariant.full_state_dict(model), which gathers"
        )
    return entry


def _scalar_entry(value: Tensor | float) -> Entry:
    return Entry(value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu"), WHOLE)


def _gathered_hashes(entries: Iterable[Entry], group: Group) -> list[Tensor]:
    """For each tensor the hashes of its slices in TP=1's order, on the CPU."""
    entries = list(entries)
    hashes = [slice_hashes(e.tensor if e.tensor.dim() else e.tensor.view(1), e.spec.dim or 0) for e in entries]
    sharded = [i for i, e in enumerate(entries) if e.spec.dim is not None and e.spec.group.size > 1]
    if sharded:
        sizes = [hashes[i].numel() for i in sharded]
        gathered = gather_major(torch.cat([hashes[i] for i in sharded]), group).cpu().split(sizes, dim=1)
        for i, major in zip(sharded, gathered, strict=True):
            hashes[i] = unshard(major, dim=0, stride=entries[i].spec.stride)
    for i, entry in enumerate(entries):
        if entry.spec.padding:
            hashes[i] = hashes[i][: entry.full_shape[entry.spec.dim or 0]]
    return [leaves.cpu() for leaves in hashes]
