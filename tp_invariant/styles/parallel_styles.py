"""torch's parallel styles with this library's layers: another import is all that a program with torch's has to change.

    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, ..    before
    from tp_invariant.styles import ColwiseParallel, RowwiseParallel, ..                  after

torch's RowwiseParallel computes a Partial sum and reduces it on the wire, and its ColwiseParallel does the same with
the gradient of the input. Here each module becomes a layer of this library: it gathers operands, and adds in TP=1's
order.

parallelize_module ignores what a style returns for a module of a plan, so the module itself, the same object, becomes
another layer (layers/in_place.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed.tensor.parallel as torch_styles
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..comm.collectives import Group, resolve_group
from ..consistency.agreement import numbers_given_back, share_error
from ..consistency.same_weights import check_same_model
from ..core.dtensors import sharded_already
from ..core.mode import is_tp_invariant_mode_enabled
from ..core.module_hooks import with_key
from ..layers.in_place import all_or_nothing, convert, problems_in_place
from ..layers.linear import Linear
from ..layers.parallel_norm import ParallelNorm
from ..layers.parameters import ShardedModule
from ..layers.vocab_embedding import VocabParallelEmbedding
from .activations import ActivationLayouts

_TOKENS = "Shard(dim) of a dim of tokens, dim >= 0"


def _check(style: Any, name: str, placement: Placement, allowed: tuple[Placement, ...], tokens: bool = False) -> None:
    known = placement in allowed and type(placement) in (Shard, Replicate)
    if not known and not (tokens and type(placement) is Shard and placement.dim >= 0):
        choices = [str(one) for one in allowed] + ([_TOKENS] if tokens else [])
        raise ValueError(f"{type(style).__name__}: {name}={placement} is not supported: choose {' or '.join(choices)}")


def _sequence(placement: Placement) -> dict[str, Any]:
    """The options of a layer outside of which activations are placed so."""
    return dict(sequence_parallel=True, sequence_dim=placement.dim) if isinstance(placement, Shard) else {}


class ColwiseParallel(torch_styles.ColwiseParallel):
    """torch's ColwiseParallel with this library's Linear: the same bits at every degree.

        parallelize_module(model, mesh["tp"], {"w1": tpi.ColwiseParallel(), "w2": tpi.RowwiseParallel()})

    Every rank must have the same weights, as in `parallelize`; they are compared. The module stays the same object;
    DTensors on the mesh take the places and attributes of its parameters, so make the optimizer afterwards. A weight
    that two modules share stays shared if both get a style that places it alike.

    Args:
        input_layouts: Replicate() (if None), or Shard(dim) of a dim of tokens, counted from the front: then the layer
            gathers the tokens.
        output_layouts: Shard(-1) (if None), or Replicate(): then the layer gathers the features.
        use_local_output: return plain tensors, else DTensors.

    Raises:
        ValueError: another layout; when applied, also a module that is no nn.Linear, has a forward of its own, is
            sharded already, has parameters with hooks, sizes that the degree does not divide, or weights that differ
            between ranks.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        _check(self, "input_layouts", self.input_layouts[0], (Replicate(),), tokens=True)
        _check(self, "output_layouts", self.output_layouts[0], (Shard(-1), Replicate()))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        taken, returned = self.input_layouts[0], self.output_layouts[0]
        options = dict(parallel_mode="column", gather_output=returned == Replicate(), **_sequence(taken))

        def make(group: Group) -> ShardedModule:
            if isinstance(module, nn.Embedding):
                raise ValueError(
                    f"{_named(self, module, group)} would shard its embedding_dim, which is not supported: take "
                    "RowwiseParallel(input_layouts=Replicate(), ..), which shards its rows"
                )
            _check_type(self, module, group, nn.Linear, "an nn.Linear")
            assert isinstance(module, nn.Linear)
            return Linear._on_meta(module, tp_group=group, **options)

        layouts = "input_layouts", taken, returned
        return _apply(self, module, device_mesh, make, layouts)


class RowwiseParallel(torch_styles.RowwiseParallel):
    """torch's RowwiseParallel with this library's Linear and VocabParallelEmbedding: the same bits at every degree.

    As ColwiseParallel, but for these arguments:

    Args:
        input_layouts: Shard(-1) (if None), or Replicate(). For an nn.Embedding it must be Replicate().
        output_layouts: Replicate() (if None), or Shard(dim) of a dim of tokens, counted from the front.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        _check(self, "input_layouts", self.input_layouts[0], (Shard(-1), Replicate()))
        _check(self, "output_layouts", self.output_layouts[0], (Replicate(),), tokens=True)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        taken, returned = self.input_layouts[0], self.output_layouts[0]
        options = _sequence(returned)

        def make(group: Group) -> ShardedModule:
            if isinstance(module, nn.Embedding):
                _check_type(self, module, group, nn.Embedding, "an nn.Embedding")
                if taken != Replicate():
                    raise ValueError(
                        f"{_named(self, module, group)} has input_layouts={taken}: an embedding needs all ids on every "
                        "rank, input_layouts=Replicate()"
                    )
                return VocabParallelEmbedding._on_meta(module, tp_group=group, **options)
            _check_type(self, module, group, nn.Linear, "an nn.Linear or nn.Embedding")
            assert isinstance(module, nn.Linear)
            is_parallel = taken == Shard(-1)
            return Linear._on_meta(
                module, parallel_mode="row", tp_group=group, input_is_parallel=is_parallel, **options
            )

        layouts = "input_layouts", taken, returned
        return _apply(self, module, device_mesh, make, layouts)


class SequenceParallel(torch_styles.SequenceParallel):
    """torch's SequenceParallel with this library's ParallelNorm: the same bits at every degree.

    For nn.LayerNorm, nn.RMSNorm and classes of one's own that compute the same; nn.Dropout only with p=0, or in
    evaluation. Weights need not be ones: they are kept, and every rank must have the same.

    Args:
        sequence_dim: the dim of x that is sharded, counted from the front.
        use_local_output: return plain tensors, else DTensors, which is the default, as in torch's.

    Raises:
        ValueError: a negative sequence_dim; when applied, see ColwiseParallel.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        super().__init__(sequence_dim=sequence_dim, use_local_output=use_local_output)
        if isinstance(sequence_dim, bool) or not isinstance(sequence_dim, int) or sequence_dim < 0:
            raise ValueError(f"SequenceParallel: sequence_dim={sequence_dim!r} must be an integer from 0")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        (sharding,) = self.sequence_sharding

        def make(group: Group) -> ShardedModule | None:
            if isinstance(module, nn.Dropout):
                return None
            return ParallelNorm._on_meta(module, tp_group=group, **_sequence(sharding))

        _apply(self, module, device_mesh, make, ("sequence_dim", sharding, sharding))
        if isinstance(module, nn.Dropout):
            name = _named(self, module, resolve_group(device_mesh))
            with_key(module.register_forward_pre_hook(partial(_refuse_mask, name, device_mesh.size())), "dropout")
        return module


def _refuse_mask(name: str, degree: int, module: nn.Dropout, args: Any) -> None:
    if module.training and module.p and degree > 1 and is_tp_invariant_mode_enabled():
        raise ValueError(f"{name} has p={module.p}: its mask would depend on the degree; set p to 0, or call eval()")


@numbers_given_back()
def _apply(
    style: torch_styles.ParallelStyle,
    module: nn.Module,
    mesh: DeviceMesh,
    make: Callable[[Group], ShardedModule | None],
    layouts: tuple[str, Placement, Placement],
) -> nn.Module:
    """`module`, which has become the layer that `make` returns (None: it stays what it is), with its activations'
    layouts. A collective, which compares what the ranks have; nothing is changed if that is an error."""
    group = resolve_group(mesh)
    try:
        _check_module(style, module, group)
        layer = make(group)
        layers = {} if layer is None else {"": layer}
        if problems := problems_in_place(module, layers, group):
            raise ValueError(f"{_named(style, module, group)}: " + "; ".join(problems))
    except (TypeError, ValueError) as error:
        share_error(error, group, torch.device("cpu"), set())
        raise
    check_same_model(module, group, {"the style": repr(style)})
    with all_or_nothing(module, group):
        convert(module, layers)
        ActivationLayouts(group, *layouts, style.use_local_output).install(module)  # type: ignore[attr-defined]
    return module


def _named(style: Any, module: nn.Module, group: Group) -> str:
    return f"{type(style).__name__} of {type(module).__name__} on rank {group.rank}"


def _check_type(style: Any, module: nn.Module, group: Group, wanted: type[nn.Module], name: str) -> None:
    if not isinstance(module, wanted) or type(module).forward is not wanted.forward:
        raise ValueError(f"{_named(style, module, group)}: the module must be {name}, without a forward of its own")


def _check_module(style: Any, module: nn.Module, group: Group) -> None:
    what = _named(style, module, group)
    if isinstance(module, ShardedModule):
        raise ValueError(f"{what}: the module is a layer of this library already; apply one style to it, once")
    if already := sharded_already(module):
        raise ValueError(f"{what}: {already}")
