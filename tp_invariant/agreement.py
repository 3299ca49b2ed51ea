"""Whether all ranks are about to make the same call. Where they are not, collectives would hang or mix up data.

Two questions, each asked by gathering eight bytes over the group: once for a group, whether its ranks run the same
software on the same kind of device with the same settings (environment.py); and for each kind of call, the first time
it is seen, whether all make it. With TP_INVARIANT_CHECK=1 every call is compared, and the gradients that backward gets.
A first call therefore always begins with the same collective, whatever ranks have different, and what is different is
an error on every rank, after which the group is as usable as before.
"""

from __future__ import annotations

import ast
import hashlib
import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import distributed_c10d as c10d

from . import liveness
from .collectives import Group, gather_major
from .compiled import at_run_time, group_name, group_named, plain
from .environment import environment_facts
from .layout import fresh_view
from .mode import is_call_check_enabled
from .watch import watch_group
from .wire import gather_objects

_MOST = 4096  # how many different calls are remembered as agreed on
_MOST_SETTLED = 512
_SHOWN = 8  # differences in one error
_OWN_ERROR = "an error before the call"

_introduced: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()  # kinds of device
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set[Hashable]] = weakref.WeakKeyDictionary()


class Agreed(set[Hashable]):
    """The calls of a layer that its ranks have agreed on, and `settled`: what its checks found about a kind of call.

    That is looked up, by all that the checks look at, when the call comes again; with TP_INVARIANT_CHECK=1 nothing is.
    Ranks agree on the same, but a rank may settle more kinds of what is agreed on than another: so none outlives that,
    or one rank would go ahead where another compares. A copy, also a pickled one, has nothing settled.
    """

    def __init__(self, calls: Iterable[Hashable] = ()) -> None:
        super().__init__(calls)
        self.settled: dict[tuple, Any] = {}

    def settle(self, key: tuple | None, found: Any) -> Any:
        """`found`, kept under `key` if there is one."""
        if key is not None:
            if len(self.settled) >= _MOST_SETTLED:
                self.settled.clear()
            self.settled[key] = found
        return found

    def clear(self) -> None:
        super().clear()
        self.settled.clear()

    def __reduce__(self) -> tuple:
        return Agreed, (list(self),)


def agreed_in(group: Group) -> set[Hashable]:
    """The agreed calls of a group, for callers that are functions and have no place of their own to keep them."""
    if torch.compiler.is_compiling():
        return set()  # compiled calls take the group's own when they run, see _check_named
    return set() if group.process_group is None else _agreed.setdefault(group.process_group, set())


def check_agreement(facts: Mapping[str, Any], group: Group, device: torch.device, agreed: set[Hashable]) -> None:
    """Compares `facts` (name -> value) over the group, unless these very facts are in `agreed` already.

    The first call with some facts costs an all-gather of eight bytes and a wait for it, the very first of a group two
    more; later ones nothing. It finds ranks that differ in their first call, or that change at the same time; not one
    that differs alone later on. That takes TP_INVARIANT_CHECK=1, which compares at every call (mode.py has its cost).

    Args:
        device: of the tensors of this call; its kind is one of the facts.

    Raises:
        RuntimeError: the same on every rank; names what differs and which ranks have which value.
    """
    if torch.compiler.is_compiling():
        shapes = [name for name in facts if name.startswith("the shape of ")]
        fixed = [(name, plain(value)) for name, value in facts.items() if name not in shapes]
        sizes = [size for name in shapes for size in facts[name]]
        dims = [(name, len(facts[name])) for name in shapes]
        _check_later(torch.empty(0, device=device), group_name(group), repr(fixed), repr(dims), sizes)
        return
    introduce(group, device)
    known: Hashable = (device.type, tuple(facts), tuple(facts.values()))
    try:
        hash(known)
    except TypeError:  # lists
        known = repr(known)
    if known in agreed and not is_call_check_enabled():
        return
    facts = {**facts, "the kind of device": device.type}
    _compare(_mark(facts), facts, group, device)
    if len(agreed) >= _MOST:
        agreed.clear()  # on all ranks alike, as all have agreed on the same
    agreed.add(known)


def _check_named(place: Tensor, name: str, fixed: str, dims: str, sizes: Sequence[int]) -> None:
    """check_agreement of compiled code, told in what a graph can hold; `place` is empty, and on the call's device."""
    facts, left = dict(_literal(fixed)), tuple(sizes)
    for shape, dim in _literal(dims):
        facts[shape], left = left[:dim], left[dim:]
    group = group_named(name)
    check_agreement(facts, group, place.device, agreed_in(group))


_literal = lru_cache(maxsize=4096)(ast.literal_eval)
_check_later = at_run_time(
    _check_named, name="check_agreement", arguments="Tensor place, str group, str facts, str dims, SymInt[] sizes"
)


def _came(group: Group) -> None:
    """Tells the ranks of the group, should one have to say who did not, that this one has come to its first call."""
    assert group.process_group is not None
    store = c10d._get_process_group_store(group.process_group)
    store.set(f"tp_invariant: came to the first call/{group.rank}", "")


def _not_come(group: Group) -> list[int]:
    """The ranks that have not; none where the store has ended, too."""
    assert group.process_group is not None
    store = c10d._get_process_group_store(group.process_group)
    try:
        return [r for r in range(group.size) if not store.check([f"tp_invariant: came to the first call/{r}"])]
    except RuntimeError:
        return []


def introduce(group: Group, device: torch.device) -> None:
    """Compares the ranks' environments, once for a group and kind of device, and exchanges where they listen.

    Raises:
        RuntimeError: the same on every rank, each time until they agree.
    """
    if group.process_group is None:
        return
    kinds = _introduced.setdefault(group.process_group, set())
    if device.type in kinds:
        return
    facts = environment_facts(device)
    if not kinds:
        _came(group)
    try:
        _compare(_mark(facts), facts, group, device)
    except RuntimeError as error:
        missing = [] if kinds else _not_come(group)
        if not missing:
            raise
        ranks = dist.get_process_group_ranks(group.process_group)
        named = ", ".join(f"{rank} (global rank {ranks[rank]})" for rank in missing)
        raise RuntimeError(
            f"rank {group.rank} of tp_group has waited for rank {named}, which has not come to the group's first call: "
            f"it has ended before, or makes no such call. See its log; every rank of tp_group must ({error})"
        ) from error
    if not kinds:
        own = torch.frombuffer(bytearray(liveness.own_contact().encode()), dtype=torch.uint8)
        everyone = gather_major(own.to(group_device(group, device)), group).cpu()
        contacts = [liveness.Contact.decode(bytes(row.tolist())) for row in everyone]
        liveness.remember(contacts)
        watch_group(contacts, group)
    kinds.add(device.type)


def refuse(error: Exception, group: Group, device: torch.device, agreed: set[Hashable]) -> None:
    """For a call that this rank finds wrong by itself, before it raises `error`: tells the others, who would wait.

        except (TypeError, ValueError) as error:
            refuse(error, group, x.device, self._agreed)
            raise

    Only where the others are sure to ask: in the first call, or with TP_INVARIANT_CHECK=1. Returns if all ranks found
    the same.

    Raises:
        RuntimeError: the same on every rank; names who found what.
    """
    if group.process_group is None or group.size == 1 or (agreed and not is_call_check_enabled()):
        return
    if torch.compiler.is_compiling():  # nobody has called anything yet: each rank's compiler says what it found
        return
    introduce(group, device)
    text = f"{type(error).__name__}: {error}".replace(f" on rank {group.rank}", " here")
    facts = {_OWN_ERROR: text}
    _compare(_mark(facts), facts, group, device)


# --- comparing ------------------------------------------------------------------------------------------------------


def _mark(facts: Mapping[str, Any]) -> int:
    text = repr(sorted(facts.items()))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def group_device(group: Group, device: torch.device) -> torch.device:
    """Where a group's small messages travel: a matter of the group, as ranks may have their tensors in other places."""
    if "cpu:" in dist.get_backend_config(group.process_group):
        return torch.device("cpu")
    return device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())


def _compare(mark: int, facts: Mapping[str, Any], group: Group, device: torch.device) -> None:
    own = torch.tensor([mark], dtype=torch.int64, device=group_device(group, device))
    if len(set(gather_major(own, group).view(-1).tolist())) == 1:
        return
    everyone = gather_objects({name: repr(value) for name, value in facts.items()}, group)
    parts = []
    names = list(dict.fromkeys(name for theirs in everyone for name in theirs))
    for name in [_OWN_ERROR] if _OWN_ERROR in names else names:
        ranks_with: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            ranks_with.setdefault(theirs.get(name, "nothing"), []).append(rank)
        if len(ranks_with) > 1:
            values = (f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in ranks_with.items())
            parts.append(f"{name} is {'; '.join(values)}")
    if len(parts) > _SHOWN:
        parts[_SHOWN:] = [f"and {len(parts) - _SHOWN} more"]
    raise RuntimeError(
        f"the {group.size} ranks of tp_group disagree: {' | '.join(parts)}. They must make the same calls with the "
        "same settings, and under sequence_parallel the degree must divide the sequence"
    )


# --- backward -------------------------------------------------------------------------------------------------------


class _CheckedGradient(torch.autograd.Function):
    """The identity; its adjoint compares what gradient the ranks got, before anything is done with it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, layer: str, group: Group, agreed: set[Hashable]) -> Tensor:
        ctx.layer, ctx.group, ctx.agreed = layer, group, agreed
        return fresh_view(y, y.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        facts = {
            "the layer whose backward runs": ctx.layer,
            "the shape of its gradient": tuple(dy.shape),
            "the dtype of its gradient": str(dy.dtype),
        }
        check_agreement(facts, ctx.group, dy.device, ctx.agreed)
        return dy, None, None, None


def check_gradient(y: Tensor, layer: str, group: Group, agreed: set[Hashable]) -> Tensor:
    """y; with TP_INVARIANT_CHECK=1 one whose gradient is compared over the group when backward comes to it."""
    if not y.requires_grad or group.size == 1 or not is_call_check_enabled():
        return y
    return _CheckedGradient.apply(y, layer, group, agreed)
