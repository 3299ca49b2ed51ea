"""Checks that all ranks are about to make the same call; if they are not, collectives would hang or mix up data.

There are two checks, each by a gather of 24 bytes over the group: once for each group, that its ranks run the same
software on the same kind of device with the same settings (environment.py); and at the first call of each kind, that
all ranks make this call, with the same ids (of an embedding), target (of a loss) and whole parameters. With
TP_INVARIANT_CHECK=1 every call is compared, and the gradients that backward gets. So a first call begins with the same
collective on every rank, whatever differs between the ranks. A difference raises an error on every rank, and the group
remains usable.

Layers of the same shape are distinguished by a number: each layer gets the next number of its tp_group when it is built
or copied. So ranks that call such layers in different orders get an error in the first call. A difference in a later
call of a layer is detected on gloo as soon as the call moves bytes (comm/call_records.py), elsewhere only with
TP_INVARIANT_CHECK=1. Equal layers share one compiled graph, which therefore cannot contain a number: the layer's weight
has it as an attribute, and the graph takes the weight.
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..comm import call_records, liveness
from ..comm.call_records import call_context
from ..comm.collectives import Group, gather_major
from ..comm.wire import gather_objects
from ..core.bits import tensor_hash
from ..core.compiled import as_runtime_op, group_by_name, group_name, specialize
from ..core.differentiation import once_differentiable
from ..core.dtensors import local_of
from ..core.layout import fresh_view
from ..core.mode import is_call_check_enabled
from .differences import differences, format_values, mark
from .environment import environment_facts
from .equal_shards import check_shards, shard_hash
from .same_draws import check_sources, source_of

_MAX_AGREED = 4096  # how many different calls are remembered as agreed on
_MAX_RESOLVED = 512
_SHOWN = 8  # differences in one error
_LATE = timedelta(seconds=5)  # how much later than another rank's failure a rank may reach the group's first call
_LOCAL_ERROR = "an error before the call"
_NUMBER = "the layer's number"
_HASH_OF = "the hash of the values of"
_HASH_OF_PARAMETER = "the hash of the whole parameter"

# The kinds of device on which a group's ranks have compared their environments.
_compared_devices: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, _AgreedOfGroup]] = weakref.WeakKeyDictionary()


_layer_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()  # layers so far


def forget_layers() -> None:
    """Numbers the layers that are built from now on from 1 again, in every group. Call it on all ranks."""
    _layer_counts.clear()
    _agreed.clear()  # calls of compiled layers, among whose facts is the number


class AgreedCalls(set[Hashable]):
    """The calls of a layer on which its ranks have agreed, and `resolved`: the result of the checks for each signature.

    `resolved` is looked up by the call's signature when the same call comes again; with TP_INVARIANT_CHECK=1 it is not
    used. The agreed calls are the same on all ranks, but ranks may have resolved different signatures of them. So
    `resolved` is cleared together with the agreed calls; else one rank would continue where another compares.

    `number` distinguishes the layer from others of its group: 1, 2, .. in the order in which they are built, the same
    on ranks that build the same layers; 0 in a group of one. A copy is another layer: it has its own number, no agreed
    calls and nothing resolved.
    """

    def __init__(self, group: Group | None = None) -> None:
        super().__init__()
        self.resolved: dict[tuple, Any] = {}
        self.name = "not yet called"  # in messages
        self.number, self._group = 0, group
        if group is not None and group.process_group is not None:
            self.number = _layer_counts[group.process_group] = _layer_counts.get(group.process_group, 0) + 1

    def lookup(self, key: tuple | None) -> Any:
        """The result stored under `key`; None if there is none."""
        try:
            return None if key is None else self.resolved.get(key)
        except TypeError:  # unhashable: symbolic sizes, or a list as an identity
            return None

    def store(self, key: tuple | None, found: Any) -> Any:
        """Returns `found`, and stores it under `key` if that is hashable and not None."""
        if key is not None:
            if len(self.resolved) >= _MAX_RESOLVED:
                self.resolved.clear()
            with suppress(TypeError):
                self.resolved[key] = found
        return found

    def clear(self) -> None:
        super().clear()
        self.resolved.clear()

    def __reduce__(self) -> tuple:  # without the group: process groups cannot be pickled
        return AgreedCalls, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> AgreedCalls:
        return AgreedCalls(self._group)


class _AgreedOfGroup(set[Hashable]):
    """Agreed calls of a group; `compiled`: those of compiled code among them, as it makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: set[tuple] = set()

    def clear(self) -> None:
        super().clear()
        self.compiled.clear()


def agreed_in(group: Group, layer: int = 0) -> set[Hashable]:
    """The agreed calls of a group, for functions, which unlike layers cannot store them themselves.

    layer: the number of a layer, for its compiled calls; 0 for all others. Each number has a set of its own, as in
        eager mode, so that many layers with many lengths do not fill one.
    """
    if torch.compiler.is_compiling() or group.process_group is None:
        return set()  # compiled calls use the group's own set when they run, see _check_named
    return _agreed_of(group.process_group, layer)


def _agreed_of(process_group: dist.ProcessGroup, layer: int) -> _AgreedOfGroup:
    of_group = _agreed.get(process_group)
    if of_group is None:
        of_group = _agreed[process_group] = {}
    return of_group.get(layer) or of_group.setdefault(layer, _AgreedOfGroup())


def check_agreement(
    facts: Mapping[str, Any],
    group: Group,
    device: torch.device,
    agreed: set[Hashable],
    sharded_weight: Tensor | None = None,
    shards_may_be_equal: bool = False,
    weight: Tensor | None = None,
    same: Mapping[str, Tensor] | None = None,
    whole: Mapping[str, Tensor] | None = None,
) -> None:
    """Compares `facts` (name -> value) over the group, unless `agreed` contains exactly these facts already.

    The first call with given facts costs an all-gather of 24 bytes and a wait for it, a group's very first call
    two more gathers; later calls cost nothing. This detects ranks that differ in their first call, or that change at
    the same time, but not a single rank that differs later. For that, TP_INVARIANT_CHECK=1 compares at every call
    (core/mode.py states its cost).

    Args:
        device: the device of this call's tensors; its kind is one of the facts.
        sharded_weight: a parameter of which each rank holds another part. At a layer's first call it is checked that
            these differ (equal_shards.py), and are parts of one full weight where that is known (same_draws.py); not
            in compiled code.
        shards_may_be_equal: what the layer says; the parameter may say it, too.
        weight: the layer's, by which compiled code knows the layer's number; `sharded_weight` if not given.
        same: tensors (name -> tensor) whose values must be the same on every rank. A hash of each is compared whenever
            facts are, not in compiled code. A call is not new because of other values.
        whole: parameters that every rank holds whole. Their hashes are compared at a layer's first call, and with
            TP_INVARIANT_CHECK=1 at every call; not in compiled code.

    Raises:
        RuntimeError: the same on every rank; names what differs and which ranks have which value, or the ranks whose
            parts of the weight are equal.
    """
    if torch.compiler.is_compiling():
        shapes = [name for name in facts if name.startswith("the shape of ")]
        fixed = [(name, specialize(value)) for name, value in facts.items() if name not in shapes]
        sizes = [size for name in shapes for size in facts[name]]
        dims = [(name, len(facts[name])) for name in shapes]
        weight = local_of(sharded_weight if weight is None else weight)
        place = torch.empty(0, device=device) if weight is None else weight
        _check_later(place, repr((group_name(group), fixed, dims)), sizes)
        return
    compare_environments(group, device)
    known: Hashable = (device.type, tuple(facts), tuple(facts.values()))
    try:
        hash(known)
    except TypeError:  # lists
        known = repr(known)
    if known in agreed and not is_call_check_enabled():
        return
    facts = {**facts, "the kind of device": device.type}
    if isinstance(agreed, AgreedCalls):
        facts[_NUMBER] = agreed.number
        agreed.name = facts.get("the layer", agreed.name)
    hashed = {f"{_HASH_OF} {name}": tensor for name, tensor in (same or {}).items()}
    if not agreed or is_call_check_enabled():
        hashed |= {f"{_HASH_OF_PARAMETER} {name}": local_of(tensor) for name, tensor in (whole or {}).items()}
    # selective checkpointing would give what these operators return to the same operators of the recomputed layer
    with _disable_current_modes():
        shard = source = 0
        if sharded_weight is not None and not agreed:
            allowed = shards_may_be_equal or getattr(sharded_weight, "shards_may_be_equal", False)
            shard = shard_hash(local_of(sharded_weight), allowed)
            source = source_of(sharded_weight)
        for name, tensor in hashed.items():
            if type(tensor) in (Tensor, nn.Parameter) and tensor.numel():  # fake tensors have no values
                facts[name] = int(tensor_hash(tensor))
        _compare(facts, group, device, agreed, shard, source)
    if len(agreed) >= _MAX_AGREED:
        agreed.clear()  # at the same call on all ranks, because all have agreed on the same calls
    agreed.add(known)


def _describe_new_call(facts: Mapping[str, Any], agreed: Collection[Hashable]) -> str:
    """How a call differs from the most similar agreed call, for an error."""
    now = {name: repr(value) for name, value in facts.items()}
    most_like: dict[str, str] = {}
    for known in agreed:
        if isinstance(known, tuple) and len(known) == 3 and known[1:2]:
            before = dict(zip(known[1], map(repr, known[2]), strict=True))
            if before.keys() <= now.keys() and _facts_in_common(before, now) >= _facts_in_common(most_like, now):
                most_like = before
    called = " and ".join(now[name] for name in _CALL_NAMES if name in now)
    parts = [f"{called}, {_NUMBER} {now[_NUMBER]}"] if _NUMBER in now else []
    for name, value in now.items():
        if name == _NUMBER or (_NUMBER in now and name in _CALL_NAMES):
            continue
        if not most_like and (name in _CALL_NAMES or name.startswith(_SHAPE_AND_DTYPE)):
            parts.append(f"{name} is {value}")
        elif most_like and most_like.get(name, value) != value:
            parts.append(f"{name} is {value}, so far {most_like[name]}")
    return " | ".join(parts[:_SHOWN]) if parts else ", ".join(list(now)[:_SHOWN])


_CALL_NAMES = ("the layer", "the call", "the layer whose backward runs")
_SHAPE_AND_DTYPE = ("the shape of", "the dtype of")


def _facts_in_common(one: Mapping[str, str], other: Mapping[str, str]) -> int:
    return sum(other.get(name) == value for name, value in one.items())


def _check_named(place: Tensor, text: str, sizes: Sequence[int]) -> None:
    """check_agreement for compiled code; its arguments fit into a graph.

    place: the layer's weight, or an empty tensor on the call's device.
    text: the group's name, the facts, and of each shape among them its name and how many of `sizes` it has.
    """
    name, fixed, dims = _literal(text)
    group, number, device = group_by_name(name), getattr(place, "layer_number", 0), place.device
    if group.process_group is None:
        return
    agreed, call = _agreed_of(group.process_group, number), (text, device, *sizes)
    if call in agreed.compiled and not is_call_check_enabled():
        return
    facts, left = dict(fixed), tuple(sizes)
    if number:
        facts[_NUMBER] = number
    for shape, dim in dims:
        facts[shape], left = left[:dim], left[dim:]
    check_agreement(facts, group, device, agreed)
    agreed.compiled.add(call)


_literal = lru_cache(maxsize=4096)(ast.literal_eval)
_check_later = as_runtime_op(_check_named, name="check_agreement", arguments="Tensor place, str text, SymInt[] sizes")


def _announce_arrival(group: Group) -> None:
    """Records in the group's store that this rank has reached the group's first call, for the error of another rank."""
    assert group.process_group is not None
    store = group.process_group.get_group_store()
    store.set(f"tp_invariant: came to the first call/{group.rank}", "")


def _ranks_not_arrived(group: Group) -> list[int]:
    """The ranks that have not reached the group's first call; [] if the store has ended, too.

    A rank that ends breaks the others' connections at once, while a third rank may still be on its way: it has
    ``_LATE`` to arrive before it is named.
    """
    assert group.process_group is not None
    store = group.process_group.get_group_store()
    keys = [f"tp_invariant: came to the first call/{rank}" for rank in range(group.size)]
    try:
        with suppress(RuntimeError):  # the time has passed
            store.wait(keys, _LATE)
        return [rank for rank, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:
        return []


def compare_environments(group: Group, device: torch.device) -> None:
    """Compares the ranks' environments, once for each group and kind of device, and exchanges liveness contacts.

    Raises:
        RuntimeError: the same on every rank, at each call until the environments are equal.
    """
    if group.process_group is None:
        return
    kinds = _compared_devices.setdefault(group.process_group, set())
    if device.type in kinds:
        return
    with _disable_current_modes():  # as in check_agreement
        _compare_environments(group, device, kinds)
    kinds.add(device.type)


def _compare_environments(group: Group, device: torch.device, kinds: set[str]) -> None:
    assert group.process_group is not None
    facts = environment_facts(device)
    if not kinds:
        _announce_arrival(group)
    try:
        _compare(facts, group, device)
    except RuntimeError as error:
        missing = [] if kinds else _ranks_not_arrived(group)
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
        liveness.remember_contacts(contacts)
        if "cpu:gloo" in dist.get_backend_config(group.process_group):
            call_records.share_records(group, gather)


def share_error(error: Exception, group: Group, device: torch.device, agreed: set[Hashable]) -> None:
    """Shares an error that this rank has found in its call with the other ranks, which would otherwise wait for it.

        except (TypeError, ValueError) as error:
            share_error(error, group, x.device, self._agreed)
            raise

    Communicates only if the other ranks are certain to compare this call: the first call, or any call with
    TP_INVARIANT_CHECK=1. Returns if all ranks have found the same error.

    Raises:
        RuntimeError: the same on every rank; says which rank has found which error.
    """
    if group.process_group is None or group.size == 1 or (agreed and not is_call_check_enabled()):
        return
    if torch.compiler.is_compiling():  # no rank has called anything yet: each rank's compiler raises its own error
        return
    compare_environments(group, device)
    text = f"{type(error).__name__}: {error}".replace(f" on rank {group.rank}", " here")
    facts = {_LOCAL_ERROR: text}
    _compare(facts, group, device)


# --- comparing ------------------------------------------------------------------------------------------------------


def group_device(group: Group, device: torch.device) -> torch.device:
    """The device of a group's small messages, the same kind on all ranks even if their tensors' devices differ."""
    if "cpu:" in dist.get_backend_config(group.process_group):
        return torch.device("cpu")
    return device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())


def _compare(
    facts: Mapping[str, Any],
    group: Group,
    device: torch.device,
    agreed: Collection[Hashable] = frozenset(),
    shard: int = 0,
    source: int = 0,
) -> None:
    numbers = mark(sorted(facts.items())), shard, source
    own = torch.tensor(numbers, dtype=torch.int64, device=group_device(group, device))
    call_context.comparing = partial(_describe_new_call, facts, agreed)
    try:
        marks, shards, sources = gather_major(own, group).view(-1, 3).t().tolist()
    finally:
        call_context.comparing = None
    if len(set(marks)) == 1:
        check_shards(shards, facts.get("the layer", ""))
        check_sources(sources, facts.get("the layer", ""))
        return
    assert group.process_group is not None
    report = {name: repr(value) for name, value in facts.items()}, _layer_counts.get(group.process_group, 0)
    everyone, made = zip(*gather_objects(report, group), strict=True)
    _layer_counts[group.process_group] = max(made)  # so that layers which are built after the error have equal numbers
    found = differences(everyone)
    hashes = (_HASH_OF, _HASH_OF_PARAMETER)
    found = {name: values for name, values in found.items() if not name.startswith(hashes)} or found  # of other calls
    names = sorted(found, key=lambda name: name not in (_NUMBER, "the layer"))  # first, where there are many
    parts = [f"{name} is {format_values(found[name])}" for name in ([_LOCAL_ERROR] if _LOCAL_ERROR in found else names)]
    if len(parts) > _SHOWN:
        parts[_SHOWN:] = [f"and {len(parts) - _SHOWN} more"]
    order = (
        ". Layers are numbered in the order in which they are made for a tp_group: make the same layers on every rank, "
        "and call them in the same order"
    )
    batch = (
        ". Ranks of a tp_group must be given the same batch: a data loader divides it over data parallel ranks alone"
    )
    seed = ". Seed all ranks alike before the layers are made, or load one checkpoint on every rank"
    raise RuntimeError(
        f"the {group.size} ranks of tp_group disagree: {' | '.join(parts)}. They must make the same calls with the "
        "same settings, and under sequence_parallel the degree must divide the sequence"
        + (order if any(part.startswith(f"{_NUMBER} is ") for part in parts) else "")
        + (batch if any(name.startswith(_HASH_OF) for name in found) else "")
        + (seed if any(name.startswith(_HASH_OF_PARAMETER) for name in found) else "")
    )


# --- backward -------------------------------------------------------------------------------------------------------


class _CheckedGradient(torch.autograd.Function):
    """The identity; its adjoint compares the shape and dtype of the ranks' gradients before they are used."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor | None, layer: str, group: Group, agreed: set[Hashable]) -> Tensor:
        ctx.layer, ctx.group, ctx.agreed = layer, group, agreed
        ctx.save_for_backward(weight)
        return fresh_view(y, y.shape)

    @staticmethod
    @partial(once_differentiable, traced=True)
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        facts = {
            "the layer whose backward runs": ctx.layer,
            "the shape of its gradient": tuple(dy.shape),
            "the dtype of its gradient": str(dy.dtype),
        }
        check_agreement(facts, ctx.group, dy.device, ctx.agreed, weight=ctx.saved_tensors[0])
        return dy, None, None, None, None


def check_gradient(y: Tensor, layer: str, group: Group, agreed: set[Hashable], weight: Tensor | None = None) -> Tensor:
    """y; with TP_INVARIANT_CHECK=1 the ranks compare its gradient's shape and dtype when backward reaches it.

    weight: as for check_agreement.
    """
    if not y.requires_grad or group.size == 1 or not is_call_check_enabled():
        return y
    known_by = local_of(weight) if torch.compiler.is_compiling() else None
    return _CheckedGradient.apply(y, known_by, layer, group, agreed)
