"""Whether all ranks are about to make the same call. Where they are not, collectives would hang or mix up data.

Two questions, each asked by gathering eight bytes over the group: once for a group, whether its ranks run the same
software on the same kind of device with the same settings (environment.py); and for each kind of call, the first time
it is seen, whether all make it. With TP_INVARIANT_CHECK=1 every call is compared, and the gradients that backward gets.
A first call therefore always begins with the same collective, whatever ranks have different, and what is different is
an error on every rank, after which the group is as usable as before.

Layers of one shape are told apart by a number: each layer takes the next one of its tp_group when it is made or copied.
So ranks that call them in another order get an error in the first call. What a layer's later calls have different is
seen on gloo as soon as it moves bytes (comm/call_records.py), elsewhere with TP_INVARIANT_CHECK=1.
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import distributed_c10d as c10d

from ..comm import call_records, liveness
from ..comm.call_records import doing
from ..comm.collectives import Group, gather_major
from ..comm.watch import watch_group
from ..comm.wire import gather_objects
from ..core.compiled import at_run_time, group_name, group_named, plain
from ..core.layout import fresh_view
from ..core.mode import is_call_check_enabled
from .differences import differences, format_values, mark
from .environment import environment_facts

_MOST = 4096  # how many different calls are remembered as agreed on
_MOST_SETTLED = 512
_SHOWN = 8  # differences in one error
_OWN_ERROR = "an error before the call"
_NUMBER = "the layer's number"

_introduced: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()  # kinds of device
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set[Hashable]] = weakref.WeakKeyDictionary()


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()  # layers so far


def forget_layers() -> None:
    """Layers that are made from now on are numbered from 1 again, in every group. For all ranks alike."""
    _made.clear()


class Agreed(set[Hashable]):
    """The calls of a layer that its ranks have agreed on, and `settled`: what its checks found about a kind of call.

    That is looked up, by all that the checks look at, when the call comes again; with TP_INVARIANT_CHECK=1 nothing is.
    Ranks agree on the same, but a rank may settle more kinds of what is agreed on than another: so none outlives that,
    or one rank would go ahead where another compares.

    `number` tells the layer from others of its group: 1, 2, .. in the order in which they are made, the same on ranks
    that make the same layers; 0 in a group of one. A copy is another layer: it has a number of its own, and nothing is
    agreed on or settled.
    """

    def __init__(self, group: Group | None = None) -> None:
        super().__init__()
        self.settled: dict[tuple, Any] = {}
        self.name = "not yet called"  # in messages
        self.number, self._group = 0, group
        if group is not None and group.process_group is not None:
            self.number = _made[group.process_group] = _made.get(group.process_group, 0) + 1

    def found(self, key: tuple | None) -> Any:
        """What was settled under `key`; None if nothing was."""
        try:
            return None if key is None else self.settled.get(key)
        except TypeError:  # sizes that are symbols, or an identity that is a list
            return None

    def settle(self, key: tuple | None, found: Any) -> Any:
        """`found`, kept under `key` if there is one that can be looked up."""
        if key is not None:
            if len(self.settled) >= _MOST_SETTLED:
                self.settled.clear()
            with suppress(TypeError):
                self.settled[key] = found
        return found

    def clear(self) -> None:
        super().clear()
        self.settled.clear()

    def __reduce__(self) -> tuple:  # of a pickled one; no process group can be
        return Agreed, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Agreed:
        return Agreed(self._group)


def agreed_in(group: Group) -> set[Hashable]:
    """The agreed calls of a group, for callers that are functions and have no place of their own to keep them."""
    if torch.compiler.is_compiling():
        return set()  # compiled calls take the group's own when they run, see _check_named
    return set() if group.process_group is None else _agreed.setdefault(group.process_group, set())


def check_agreement(facts: Mapping[str, Any], group: Group, device: torch.device, agreed: set[Hashable]) -> None:
    """Compares `facts` (name -> value) over the group, unless these very facts are in `agreed` already.

    The first call with some facts costs an all-gather of eight bytes and a wait for it, the very first of a group two
    more; later ones nothing. It finds ranks that differ in their first call, or that change at the same time; not one
    that differs alone later on. That takes TP_INVARIANT_CHECK=1, which compares at every call (core/mode.py has its
    cost).

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
    if isinstance(agreed, Agreed):
        facts[_NUMBER] = agreed.number
        agreed.name = facts.get("the layer", agreed.name)
    _compare(facts, group, device, agreed)
    if len(agreed) >= _MOST:
        agreed.clear()  # on all ranks alike, as all have agreed on the same
    agreed.add(known)


def _news(facts: Mapping[str, Any], agreed: Collection[Hashable]) -> str:
    """What of a call is new, beside the one most like it among those that were agreed on: for an error."""
    now = {name: repr(value) for name, value in facts.items()}
    most_like: dict[str, str] = {}
    for known in agreed:
        if isinstance(known, tuple) and len(known) == 3 and known[1:2]:
            before = dict(zip(known[1], map(repr, known[2]), strict=True))
            if before.keys() <= now.keys() and _alike(before, now) >= _alike(most_like, now):
                most_like = before
    called = " and ".join(now[name] for name in _CALLED if name in now)
    parts = [f"{called}, {_NUMBER} {now[_NUMBER]}"] if _NUMBER in now else []
    for name, value in now.items():
        if name == _NUMBER or (_NUMBER in now and name in _CALLED):
            continue
        if not most_like and (name in _CALLED or name.startswith(_TELLING)):
            parts.append(f"{name} is {value}")
        elif most_like and most_like.get(name, value) != value:
            parts.append(f"{name} is {value}, so far {most_like[name]}")
    return " | ".join(parts[:_SHOWN]) if parts else ", ".join(list(now)[:_SHOWN])


_CALLED = ("the layer", "the call", "the layer whose backward runs")
_TELLING = ("the shape of", "the dtype of")


def _alike(one: Mapping[str, str], other: Mapping[str, str]) -> int:
    return sum(other.get(name) == value for name, value in one.items())


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
        _compare(facts, group, device)
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

        def gather(own: bytes) -> list[bytes]:
            data = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(group_device(group, device))
            return [bytes(row.tolist()) for row in gather_major(data, group).cpu()]

        contacts = [liveness.Contact.decode(contact) for contact in gather(liveness.own_contact().encode())]
        liveness.remember(contacts)
        watch_group(contacts, group)
        if "cpu:gloo" in dist.get_backend_config(group.process_group):
            call_records.share(group, gather)
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
    _compare(facts, group, device)


# --- comparing ------------------------------------------------------------------------------------------------------


def group_device(group: Group, device: torch.device) -> torch.device:
    """Where a group's small messages travel: a matter of the group, as ranks may have their tensors in other places."""
    if "cpu:" in dist.get_backend_config(group.process_group):
        return torch.device("cpu")
    return device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())


def _compare(
    facts: Mapping[str, Any], group: Group, device: torch.device, agreed: Collection[Hashable] = frozenset()
) -> None:
    own = torch.tensor([mark(sorted(facts.items()))], dtype=torch.int64, device=group_device(group, device))
    doing.comparing = partial(_news, facts, agreed)
    try:
        everyones = gather_major(own, group).view(-1).tolist()
    finally:
        doing.comparing = None
    if len(set(everyones)) == 1:
        return
    assert group.process_group is not None
    told = {name: repr(value) for name, value in facts.items()}, _made.get(group.process_group, 0)
    everyone, made = zip(*gather_objects(told, group), strict=True)
    _made[group.process_group] = max(made)  # so that they can go on, with layers that are made from now on
    found = differences(everyone)
    names = sorted(found, key=lambda name: name not in (_NUMBER, "the layer"))  # first, where there are many
    parts = [f"{name} is {format_values(found[name])}" for name in ([_OWN_ERROR] if _OWN_ERROR in found else names)]
    if len(parts) > _SHOWN:
        parts[_SHOWN:] = [f"and {len(parts) - _SHOWN} more"]
    order = (
        ". Layers are numbered in the order in which they are made for a tp_group: make the same layers on every rank, "
        "and call them in the same order"
    )
    raise RuntimeError(
        f"the {group.size} ranks of tp_group disagree: {' | '.join(parts)}. They must make the same calls with the "
        "same settings, and under sequence_parallel the degree must divide the sequence"
        + (order if any(part.startswith(f"{_NUMBER} is ") for part in parts) else "")
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
