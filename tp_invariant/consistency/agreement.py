"""Ranks compare a call when it is new to them; if they differed, collectives would hang or mix up data.

Once for each group its ranks compare their software, devices and settings (environment.py). At the first call of each
kind they compare the call, the ids (of an embedding), target (of a loss), whole parameters, and what must be another
part on each (shards.py); with TP_INVARIANT_CHECK=1 at every call. A difference raises an error on every rank, and the
group remains usable.

Layers of the same shape are distinguished by a number: each layer gets the next number of its tp_group when it is built
or copied. So ranks that call such layers in different orders get an error in the first call. A difference in a later
call of a layer is detected on gloo as soon as the call moves bytes (comm/call_records.py), elsewhere only with
TP_INVARIANT_CHECK=1. Equal layers share one compiled graph, which therefore cannot contain a number: the layer's weight
has it as an attribute, and the graph takes the weight.
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm import call_records, liveness
from ..comm.collectives import Group, gather_major
from ..comm.meeting import on_all_ranks
from ..core.bits import tensor_hash
from ..core.compiled import as_runtime_op, group_by_name, group_name, specialize
from ..core.dtensors import local_of
from ..core.mode import is_call_check_enabled
from ..core.torch_private import without_dispatch_modes
from .compare import CALL_NAMES, HASH_OF, HASH_OF_PARAMETER, LAYER_NUMBER, LOCAL_ERROR, compare, group_device
from .environment import environment_facts
from .shards import Part, check_parts, part_numbers

_MAX_AGREED = 4096  # how many different calls are remembered as agreed on
_MAX_RESOLVED = 512

# The kinds of device on which a group's ranks have compared their environments.
_compared_devices: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, set[Hashable]]] = weakref.WeakKeyDictionary()
_layer_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()  # layers so far


def forget_layers() -> None:
    """Numbers the layers that are built from now on from 1 again, in every group. Call it on all ranks."""
    _layer_counts.clear()
    _agreed.clear()  # calls of compiled layers, among whose facts is the number


@contextmanager
def numbers_given_back() -> Iterator[None]:
    """Around what makes layers: if it raises, layers that are made later get the numbers of those made in it.

    So ranks that have failed at different places number later layers alike.
    """
    counts = dict(_layer_counts)
    try:
        yield
    except BaseException:
        _layer_counts.clear()
        _layer_counts.update(counts)
        raise


class AgreedCalls(set[Hashable]):
    """The calls of a layer on which its ranks have agreed, and `resolved`: the result of the checks for each signature.

    `number` distinguishes the layer from others of its group: 1, 2, .. in the order in which they are built, the same
    on ranks that build the same layers; 0 in a group of one. A copy is another layer: it has its own number and no
    agreed calls.
    """

    def __init__(self, group: Group | None = None) -> None:
        super().__init__()
        self.resolved: dict[tuple, Any] = {}
        self.name = "not yet called"  # in messages
        self.tried: Any = None  # the gemm_fn that has passed the check of a layer's first call
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


def agreed_in(group: Group, layer: int = 0) -> set[Hashable]:
    """The agreed calls of a group, for functions, which unlike layers cannot store them themselves.

    layer: the number of a layer, for its compiled calls; 0 for all others. Each number has a set of its own, as in
        eager mode, so that many layers with many lengths do not fill one.
    """
    if torch.compiler.is_compiling() or group.process_group is None:
        return set()  # compiled calls use the group's own set when they run, see _check_named
    return _agreed.setdefault(group.process_group, {}).setdefault(layer, set())


def check_agreement(
    facts: Mapping[str, Any],
    group: Group,
    device: torch.device,
    agreed: set[Hashable],
    sharded_weight: Tensor | None = None,
    shards_may_be_equal: bool = False,
    weight: Tensor | None = None,
    part: Part | None = None,
    same: Mapping[str, Tensor] | None = None,
    whole: Mapping[str, Tensor] | None = None,
    name: str = "tp_group",
) -> None:
    """Compares `facts` (name -> value) over the group, unless `agreed` contains exactly these facts already.

    This detects ranks that differ in their first call, or that change at the same time, but not a single rank that
    differs later. For that, TP_INVARIANT_CHECK=1 compares at every call (core/mode.py states its cost).

    Args:
        device: the device of this call's tensors; its kind is one of the facts.
        sharded_weight: a parameter of which each rank holds another part. At a layer's first call it is checked that
            these differ and are parts of one full weight (shards.py); not in compiled code.
        shards_may_be_equal: what the layer says; the parameter and the input may say it, too.
        weight: the layer's, by which compiled code knows the layer's number; `sharded_weight` if not given.
        part: the input, if each rank must pass another part of it; whether it does is checked whenever facts are
            compared, not in compiled code.
        same: tensors (name -> tensor) whose values must be the same on every rank. A hash of each is compared whenever
            facts are, not in compiled code. A call is not new because of other values.
        whole: parameters that every rank holds whole. Their hashes are compared at a layer's first call, and with
            TP_INVARIANT_CHECK=1 at every call; not in compiled code.
        name: that of the argument which gives the group, for errors.

    Raises:
        RuntimeError: the same on every rank; names what differs and which ranks have which value, or the ranks whose
            parts of the weight are equal.
    """
    if torch.compiler.is_compiling():
        _check_when_run(facts, group, device, local_of(sharded_weight if weight is None else weight))
        return
    compare_environments(group, device, name)
    known: Hashable = (device.type, tuple(facts), tuple(facts.values()))
    try:
        hash(known)
    except TypeError:  # lists
        known = repr(known)
    if known in agreed and not is_call_check_enabled():
        return
    facts = {**facts, "the kind of device": device.type}
    if isinstance(agreed, AgreedCalls):
        facts[LAYER_NUMBER] = agreed.number
        agreed.name = facts.get("the layer", agreed.name)
    hashed = {f"{HASH_OF} {key}": tensor for key, tensor in (same or {}).items()}
    if not agreed or is_call_check_enabled():
        hashed |= {f"{HASH_OF_PARAMETER} {key}": local_of(tensor) for key, tensor in (whole or {}).items()}
    # selective checkpointing would give what these operators return to the same operators of the recomputed layer
    with without_dispatch_modes():
        numbers = part_numbers(None if agreed else sharded_weight, part, shards_may_be_equal)
        for key, tensor in hashed.items():
            if type(tensor) in (Tensor, nn.Parameter) and tensor.numel():  # fake tensors have no values
                facts[key] = int(tensor_hash(tensor))
        rows = compare(facts, group, device, numbers, name=name, describe=partial(_describe, facts))
        check_parts(rows, facts.get("the layer", ""), part, sharded_weight, name)
    if len(agreed) >= _MAX_AGREED:
        agreed.clear()  # at the same call on all ranks, because all have agreed on the same calls
    agreed.add(known)


def _describe(facts: Mapping[str, Any]) -> str:
    called = [repr(facts[name]) for name in CALL_NAMES if name in facts]
    shown = (LAYER_NUMBER, LOCAL_ERROR, "the shape of ", "the dtype of ")
    parts = [f"{name} is {value!r}" for name, value in facts.items() if name.startswith(shown)]
    return " | ".join([*called, *parts] or facts)


# --- compiled code --------------------------------------------------------------------------------------------------


def _check_when_run(facts: Mapping[str, Any], group: Group, device: torch.device, weight: Tensor | None) -> None:
    """check_agreement when the code that is being compiled runs: what is fixed becomes a text, sizes remain numbers."""
    shapes = [name for name in facts if name.startswith("the shape of ")]
    fixed = [(name, specialize(value)) for name, value in facts.items() if name not in shapes]
    sizes = [size for name in shapes for size in facts[name]]
    dims = [(name, len(facts[name])) for name in shapes]
    place = torch.empty(0, device=device) if weight is None else weight
    _check_later(place, repr((group_name(group), fixed, dims)), sizes)


def _check_named(place: Tensor, text: str, sizes: Sequence[int]) -> None:
    """check_agreement for compiled code; its arguments fit into a graph.

    place: the layer's weight, or an empty tensor on the call's device.
    text: the group's name, the facts, and of each shape among them its name and how many of `sizes` it has.
    """
    name, fixed, dims = _literal(text)
    group, number = group_by_name(name), getattr(place, "layer_number", 0)
    if group.process_group is None:
        return
    facts, left = dict(fixed), tuple(sizes)
    if number:
        facts[LAYER_NUMBER] = number
    for shape, dim in dims:
        facts[shape], left = left[:dim], left[dim:]
    check_agreement(facts, group, place.device, agreed_in(group, number))


_literal = lru_cache(maxsize=4096)(ast.literal_eval)
_check_later = as_runtime_op(_check_named, name="check_agreement", arguments="Tensor place, str text, SymInt[] sizes")


# --- a group's first call -------------------------------------------------------------------------------------------


def compare_environments(group: Group, device: torch.device, name: str = "tp_group") -> None:
    """Compares the ranks' environments, once for each group and kind of device, and exchanges liveness contacts.

    Raises:
        RuntimeError: the same on every rank, at each call until the environments are equal; or this rank has waited in
            vain for ranks that have not come to the group's first call, which it names.
    """
    if group.process_group is None:
        return
    kinds = _compared_devices.setdefault(group.process_group, set())
    if device.type in kinds:
        return
    with without_dispatch_modes():  # as in check_agreement
        facts = environment_facts(device)
        if kinds:
            compare(facts, group, device, name=name)
        else:
            _first_comparison(facts, group, device, name)
    kinds.add(device.type)


def _first_comparison(facts: Mapping[str, Any], group: Group, device: torch.device, name: str) -> None:
    assert group.process_group is not None
    with on_all_ranks(group, "the group's first call", name=name, warns=False):
        compare(facts, group, device, name=name)

    def gather(own: bytes) -> list[bytes]:
        data = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(group_device(group, device))
        return [bytes(row.tolist()) for row in gather_major(data, group).cpu()]

    liveness.remember_contacts([liveness.Contact.decode(one) for one in gather(liveness.own_contact().encode())])
    if "cpu:gloo" in dist.get_backend_config(group.process_group):
        call_records.share_records(group, gather)


def share_error(
    error: Exception, group: Group, device: torch.device, agreed: set[Hashable], name: str = "tp_group"
) -> None:
    """Shares an error that this rank has found in its call with the other ranks, which would otherwise wait for it.

        except (TypeError, ValueError) as error:
            share_error(error, group, x.device, self._agreed)
            raise

    Communicates only if the other ranks are certain to compare this call: the first call, or any call with
    TP_INVARIANT_CHECK=1. Returns if all ranks have found an error.

    Raises:
        RuntimeError: the same on every rank; says which rank has found which error.
    """
    if group.process_group is None or group.size == 1 or (agreed and not is_call_check_enabled()):
        return
    if torch.compiler.is_compiling():  # no rank has called anything yet: each rank's compiler raises its own error
        return
    compare_environments(group, device, name)
    compare(_error_facts(error, group), group, device, name=name)


def compare_call(
    numbers: Tensor, facts: Mapping[str, Any], group: Group, name: str, error: Exception | None = None
) -> list[list[int]]:
    """Every rank's `numbers`, at every call, where a call must gather them at its start anyway. A collective.

    numbers: 1-D and integers, of one length in all calls of the group. So a rank that leaves out a layer meets the
        others with its next call.
    name: that of the argument which gives the group, for errors.
    error: what this rank has found wrong in its call.

    Raises:
        RuntimeError: the same on every rank: the ranks' facts differ, or some have found an error.
        Exception: `error`, if all ranks have found one.
    """
    compare_environments(group, numbers.device, name)
    facts = facts if error is None else _error_facts(error, group)
    rule = "They must make the same calls in the same order, in each micro-batch of a step"
    rows = compare(facts, group, numbers.device, numbers, name=name, rule=rule)
    if error is not None:
        raise error
    return rows


def _error_facts(error: Exception, group: Group) -> dict[str, Any]:
    return {LOCAL_ERROR: f"{type(error).__name__}: {error}".replace(f" on rank {group.rank}", " here")}
