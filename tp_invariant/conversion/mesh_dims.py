"""A DeviceMesh whose dims are pp, dp, cp and tp. docs/layouts.md says what travels along each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.collectives import Group, resolve_group
from ..comm.wire import gather_objects
from ..consistency.agreement import agreed_in, check_agreement
from ..consistency.same_weights import check_same_model
from ..consistency.shards import Part
from ..core.module_hooks import with_key
from ..core.torch_private import flattened
from ..hugging_face.models import is_attention

DIMS = ("pp", "dp", "cp", "tp")
_ALONE = Group(None, 0, 1)
# transformers' kinds of rotary embedding whose frequencies follow from the largest position of a call
_BY_LENGTH = ("dynamic", "longrope")


class MeshDims(NamedTuple):
    """The groups of this rank along the dims of a mesh; one rank along a dim that is missing."""

    pp: Group = _ALONE
    dp: Group = _ALONE
    cp: Group = _ALONE
    tp: Group = _ALONE

    @classmethod
    def of(cls, mesh: DeviceMesh, tp_group: Any) -> MeshDims:
        """
        Raises:
            TypeError: mesh is no DeviceMesh.
            ValueError: a dim without a name or of another name; tp_group beside it.
        """
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh={mesh!r} is a {type(mesh).__name__}: pass a DeviceMesh")
        names = mesh.mesh_dim_names or ()
        if tp_group is not None:
            raise ValueError(f'mesh with the dims {names} and tp_group were both given: mesh["tp"] is tp_group')
        if unknown := [name for name in names if name not in DIMS]:
            advice = ""
            if "ep" in unknown:
                advice = '. Leave it out, and give expert_parallel_group=mesh["dp", "tp"] to divide experts over both'
            raise ValueError(f"mesh has the dims {', '.join(unknown)}: known are {', '.join(DIMS)}{advice}")
        if not names:
            raise ValueError(f"mesh={mesh} has no mesh_dim_names: known are {', '.join(DIMS)}")
        return cls(**{name: resolve_group(mesh[name]) for name in names})

    def check_alike(self, what: str, value: Any) -> None:
        """Whether all ranks of the mesh give the same; before a collective of some of them. A collective.

        Raises:
            RuntimeError: on every rank: they do not.
        """
        found = {value}
        for group in self:
            found = set().union(*gather_objects(found, group))
        if len(found) > 1:
            raise RuntimeError(
                f"rank {dist.get_rank()}: ranks of the mesh give {what} as {', '.join(sorted(map(repr, found)))}: give "
                "the same on every rank"
            )

    @staticmethod
    def check_experts(mesh: DeviceMesh, ranks: Sequence[int]) -> None:
        """Whether the ranks over which experts are divided are, of this mesh, at this rank's place of pp and cp.

        Raises:
            ValueError: some are not.
        """
        place = mesh.get_coordinate()
        assert place is not None and mesh.mesh_dim_names is not None
        named = zip(mesh.mesh_dim_names, place, strict=True)
        here = mesh.mesh[tuple(slice(None) if name in ("dp", "tp") else at for name, at in named)].flatten().tolist()
        if others := sorted({*ranks} & {*mesh.mesh.flatten().tolist()} - {*here}):
            raise ValueError(
                f"expert_parallel_group has the global ranks {[*ranks]} on rank {dist.get_rank()}, of which {others} "
                'are at another place of the dims pp or cp: give mesh["dp", "tp"], or mesh["tp"]'
            )

    def check_same(self, model: nn.Module, facts: dict[str, Any]) -> None:
        """Whether all ranks of the mesh hold the same whole model, and have the same arguments. A collective.

        Raises:
            RuntimeError: on every rank of the mesh: what differs along one of its dims.
        """
        found = ""
        for name, group in self._asdict().items():
            try:
                check_same_model(model, group, facts, name=f'mesh["{name}"]')
            except RuntimeError as error:
                found = found or str(error)
        for group in self:  # what one line of ranks has found, all ranks are told
            found = next((text for text in gather_objects(found, group) if text), "")
        if found:
            raise RuntimeError(found)


def one_dim_of(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of one dim with all ranks of this one in order, for mesh["dp", "tp"]. A collective if two dims are long.

    Raises:
        ValueError: the dims have no names.
    """
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(f'expert_parallel_group={mesh} has no mesh_dim_names: pass mesh["dp", "tp"]')
    several = [name for name, size in zip(names, mesh.shape, strict=True) if size > 1]
    return flattened(mesh) if len(several) > 1 else mesh[(several or names)[-1]]


# --- Hugging Face models over cp ------------------------------------------------------------------------------------


def problems_over_cp(model: nn.Module, group: Group, attention_stays: bool) -> list[str]:
    """Why a Hugging Face model cannot have its tokens divided over a group, one line each."""
    if group.size == 1:
        return []
    problems = []
    if attention_stays:
        problems.append(
            f"cp={group.size}: the model's own attention, which parallelize leaves, sees this rank's tokens"
        )
    for name, module in model.named_modules():
        kinds: Any = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        if kind := next((kind for kind in kinds if kind in _BY_LENGTH), None):
            problems.append(f"cp={group.size}: {name} has rope_type={kind!r}, which goes by the positions of a rank")
    return problems


def install_over_cp(model: nn.Module, group: Group) -> None:
    """Attention over the group, and arguments of the model's forward that are of this rank's tokens."""
    if group.size == 1:
        return
    for module in model.modules():
        if is_attention(module):
            module.context_parallel_group = group  # type: ignore[assignment]
    with_key(model.register_forward_pre_hook(_Arguments(group), with_kwargs=True), "context_parallel")


class _Arguments:
    """A pre-hook of the model: positions are absolute."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """
        Raises:
            ValueError: an argument that needs whole sequences: padding, labels, a cache, router losses.
            RuntimeError: on every rank: all have the same tokens, or not as many.
        """
        begin = f"{type(model).__name__} on rank {self.group.rank} of {self.group.size} of cp_group is given"
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and (mask.dim() != 2 or not mask.all()):
            raise ValueError(
                f"{begin} an attention_mask with padding: leave it out, and the loss of padding, which comes last"
            )
        if kwargs.get("labels") is not None:
            raise ValueError(
                f"{begin} labels, whose shift needs the next rank's first token: give tpi.sequence_part of shifted "
                "targets to a loss of your own, and gather each token's loss (tpi.regions.gather_sequence)"
            )
        for name in ("use_cache", "past_key_values"):
            if kwargs.get(name):
                raise ValueError(f"{begin} {name}: a rank would have the keys of its own tokens. Generate with cp=1")
        routed = kwargs.get("output_router_logits")
        if getattr(model.config, "output_router_logits", False) if routed is None else routed:
            raise ValueError(
                f"{begin} output_router_logits=True, whose aux_loss would be of this rank's tokens: use a hook on the "
                "routers, and tpi.load_balancing_loss(.., cp_group=..)"
            )
        kwargs = {**kwargs, "attention_mask": None, "use_cache": False}
        x = next((x for x in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None), None)
        if isinstance(x, Tensor) and x.dim() > 1:
            self._check_tokens(x)
            length = x.shape[1]
            first = self.group.rank * length
            if kwargs.get("position_ids") is None:
                kwargs["position_ids"] = torch.arange(first, first + length, device=x.device).unsqueeze(0)
        return args, kwargs

    def _check_tokens(self, x: Tensor) -> None:
        """Whether ranks have other tokens, x [B, S, ..], at calls of a new shape."""
        if torch.compiler.is_compiling():
            return
        facts = {"the call": "the model", "the shape of its tokens": tuple(x.shape)}
        part = Part("the model's input", x, (1,), "Pass tpi.sequence_part(input_ids, cp_group)")
        check_agreement(facts, self.group, x.device, agreed_in(self.group), part=part, name="cp_group")
