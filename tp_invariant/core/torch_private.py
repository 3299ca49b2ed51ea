"""Every private name of torch, and of Python, that this library uses. No other file uses any, which a test holds.

`TABLE` says of each where torch has it and why no public name does. tests/core/test_torch_private.py says whether the
installed torch has it. A name enters here when there is no public way, also no slower one.

This module imports nothing of this library, so that every wing may import it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, _guards, nn, overrides
from torch._C._dynamo import eval_frame
from torch._library import effects, simple_registry
from torch.utils import _python_dispatch, _pytree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


class PrivateName(NamedTuple):
    """A name of this module, torch's own name for it, and why it is needed."""

    name: str
    path: str
    reason: str


TABLE = (
    PrivateName(
        "local_tensor",
        "torch.distributed.tensor.DTensor._local_tensor",
        "to_local() returns a new view at each call, so that writes to the parameter's memory have no fixed tensor",
    ),
    PrivateName(
        "spec_of",
        "torch.distributed.tensor.DTensor._spec",
        "from_local() infers sizes anew, and cannot be called on the way back without a node of its own",
    ),
    PrivateName(
        "StridedShard",
        "torch.distributed.tensor.placement_types._StridedShard",
        "the placement of a parameter with partition_stride; torch has no public one for several pieces per rank",
    ),
    PrivateName(
        "version_of",
        "torch.Tensor._version",
        "whether a weight was written to since it was gathered; only autograd counts writes",
    ),
    PrivateName(
        "node_class",
        "torch.autograd.Function._backward_cls",
        "which function of this library made a tensor's grad_fn; a node's public name() may be anybody's",
    ),
    PrivateName(
        "function_of",
        "torch.autograd.Function._backward_cls._forward_cls",
        "the autograd function whose node a graph has, of anybody's, to know what it moves between ranks",
    ),
    PrivateName(
        "current_backward",
        "torch._C._current_graph_task_id",
        "whether, and in which backward, this thread runs; there is no public question for it",
    ),
    PrivateName(
        "after_backward",
        "torch.autograd.Variable._execution_engine.queue_callback",
        "what one backward gives a parameter in several calls is added first; no public hook runs at a backward's end",
    ),
    PrivateName(
        "will_execute",
        "torch._C._will_engine_execute_node",
        "ctx.needs_input_grad tells what some backward wants; this tells what the one that runs wants",
    ),
    PrivateName(
        "dispatch_modes",
        "torch.utils._python_dispatch",
        "TorchDispatchMode, an extension point in a private module; which modes must see each operator (selective "
        "checkpointing, FakeTensorMode); and checks that a mode must neither see nor replace by fake tensors",
    ),
    PrivateName(
        "function_modes",
        "torch.overrides._get_current_function_mode_stack",
        "which modes of functions a model's code is called under",
    ),
    PrivateName(
        "count_groups_from",
        "torch.distributed.distributed_c10d._world.group_count",
        "torch numbers process groups in each process, and ranks of a pool that make other ones part in their numbers",
    ),
    PrivateName(
        "register_process_group",
        "torch._C._distributed_c10d._register_process_group",
        "symmetric memory finds a group by name, and counts the exchanges of all public groups in one row",
    ),
    PrivateName(
        "unregister_process_group",
        "torch._C._distributed_c10d._unregister_process_group",
        "what was registered by name would stay when its group ends",
    ),
    PrivateName(
        "INDUCTOR_CONFIG",
        "torch._inductor.config",
        "documented as the place of torch.compile's options, in a private module; by name, as its import is slow",
    ),
    PrivateName(
        "mark_constant",
        "torch.compiler.assume_constant_result._dynamo_marked_constant",
        "what that function sets; itself it imports the compiler, which `import tp_invariant` must not",
    ),
    PrivateName(
        "mark_disabled",
        "torch.compiler.disable._torchdynamo_disable",
        "what that function sets; itself it imports the compiler",
    ),
    PrivateName("mark_disabled_reason", "torch.compiler.disable._torchdynamo_disable_msg", "as _torchdynamo_disable"),
    PrivateName(
        "eval_frame",
        "torch._C._dynamo.eval_frame",
        "code that torch.compile must leave as it is, with all below it, as torch.compiler.disable has it do",
    ),
    PrivateName(
        "TracingContext",
        "torch._guards.TracingContext",
        "whether torch traces gradients or runs the graph op by op",
    ),
    PrivateName(
        "register_ordered",
        "torch._library",
        "collectives of a compiled graph run in one order on all ranks; torch.library has no public function for it",
    ),
    PrivateName(
        "flattened",
        "torch.distributed.device_mesh.DeviceMesh._flatten",
        "a group over several dims of a mesh, which all ranks must make: a part of a mesh does not know the others",
    ),
    PrivateName(
        "process_groups",
        "torch.distributed.distributed_c10d._world.pg_map",
        "a group of given ranks among those that exist, as a new one would need every rank of the job",
    ),
    PrivateName(
        "symmetric_memory",
        "torch._C._distributed_c10d._SymmetricMemory",
        "memory of other GPUs; symmetric_memory.empty takes it from a pool, where a buffer has no address of its own",
    ),
    PrivateName(
        "resolve_process_group",
        "torch.distributed.distributed_c10d._resolve_process_group",
        "the process group of a name, which a compiled graph holds in its place",
    ),
    PrivateName(
        "DisableTorchFunction",
        "torch._C.DisableTorchFunction",
        "layers inside of a mode of this library: torch calls it for every function, which takes 1 us",
    ),
    PrivateName(
        "fsdp_records",
        "torch.distributed._composable_state._module_state_mapping",
        "which memory fully_shard frees and fills again, at another address and no other version: no tensor says so",
    ),
    PrivateName(
        "fsdp_records_of_groups",
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group",
        "fully_shard's record of each parameter; `_fsdp_param_groups` where a torch has several groups",
    ),
    PrivateName(
        "fsdp_whole",
        "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._unsharded_param",
        "the tensor that fully_shard has gathered",
    ),
    PrivateName("tree", "torch.utils._pytree", "the tensors in arguments and results of any structure"),
    PrivateName(
        "schema_of",
        "torch._ops.OpOverload._schema",
        "the arguments of an operator, to find the one that a function acts on",
    ),
    PrivateName(
        "DispatchKey",
        "torch._C.DispatchKey",
        "batch_invariant(): where functions are registered for one thread",
    ),
    PrivateName("DispatchKeySet", "torch._C.DispatchKeySet", "which modes and subclasses a call still has to pass"),
    PrivateName("dispatch_key", "torch._C._dispatch_key_parse", "keys that have no name in Python"),
    PrivateName("keys_after", "torch._C._dispatch_keyset_full_after", "a call goes on after a registered function"),
    PrivateName(
        "included",
        "torch._C._dispatch_tls_is_dispatch_key_included",
        "whether batch_invariant() is on for this thread; torch copies it to the threads of a backward",
    ),
    PrivateName("include", "torch._C._dispatch_tls_set_dispatch_key_included", "turns it on and off"),
    PrivateName("exclude", "torch._C._dispatch_tls_set_dispatch_key_excluded", "lets modes and subclasses come first"),
    PrivateName(
        "TellsInference",
        "torch.distributed.pipelining.PipelineStage._prepare_forward_infra",
        "when a stage runs its module to learn shapes, since torch 2.13 on memory with other values on each rank",
    ),
    PrivateName(
        "forward_hooks_of",
        "torch.nn.Module._forward_hooks",
        "whether a module has hooks, which can only be registered by public names",
    ),
    PrivateName("forward_pre_hooks_of", "torch.nn.Module._forward_pre_hooks", "as _forward_hooks"),
    PrivateName("gradient_hooks_of", "torch.Tensor._backward_hooks", "whether a tensor has hooks"),
    PrivateName(
        "accumulation_hooks_of", "torch.Tensor._post_accumulate_grad_hooks", "whether a parameter has such hooks"
    ),
    PrivateName(
        "environment",
        "os._Environ._data",
        "Python's: torch.compile takes os.environ for a constant, but guards this dict, so that compiled code notices "
        "a change of the mode's variable",
    ),
)

environment: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]


# --- DTensors --------------------------------------------------------------------------------------------------------


def local_tensor(x: DTensor) -> Tensor:
    """The tensor that x has of this rank, always the same object, outside of autograd."""
    return x._local_tensor


def spec_of(x: DTensor) -> Any:
    """x's mesh, placements and global sizes."""
    return x._spec


def StridedShard(dim: int, *, split_factor: int) -> Any:
    """The placement of a dim that is cut into `split_factor` pieces, each of which is sharded."""
    from torch.distributed.tensor.placement_types import _StridedShard  # slow to import

    return _StridedShard(dim, split_factor=split_factor)


# --- fully_shard -----------------------------------------------------------------------------------------------------


def fsdp_records() -> Iterator[Any]:
    """fully_shard's record of each parameter of this process, with `sharded_param`; none before it is used."""
    from torch.distributed._composable_state import _module_state_mapping

    for state in {reference() for reference in list(_module_state_mapping.values())}:
        yield from fsdp_records_of_groups(state)


def fsdp_records_of_groups(state: Any) -> list[Any]:
    """Those of one module; none of what is not fully_shard's."""
    groups = getattr(state, "_fsdp_param_groups", None)  # in later versions of torch several
    groups = [getattr(state, "_fsdp_param_group", None)] if groups is None else groups
    return [record for group in groups if group is not None for record in group.fsdp_params]


def fsdp_whole(record: Any) -> Any:
    """This rank's tensor that is gathered over the data-parallel ranks; None before the first forward."""
    return getattr(record, "_unsharded_param", None)


# --- autograd --------------------------------------------------------------------------------------------------------

current_backward = torch._C._current_graph_task_id  # -1 outside of backward
will_execute = torch._C._will_engine_execute_node


def after_backward(function: Callable[[], None]) -> None:
    """Calls it when the backward that runs here has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def version_of(x: Tensor) -> int:
    """How often x's memory was written to through x or its views.

    Raises:
        RuntimeError: x is an inference tensor, which has no count.
    """
    return x._version


def node_class(function: type[torch.autograd.Function]) -> Any:
    """The class of the nodes that `function` leaves in the graph."""
    return function._backward_cls


def function_of(node: Any) -> Any:
    """The autograd function in Python whose node this is, or None."""
    return getattr(type(node), "_forward_cls", None)


# --- torch.compile ---------------------------------------------------------------------------------------------------

TracingContext = _guards.TracingContext


def mark_constant(fn: Any) -> Any:
    """Has torch.compile call fn while it traces, as torch.compiler.assume_constant_result does."""
    fn._dynamo_marked_constant = True
    return fn


def mark_disabled(fn: Any, reason: str) -> Any:
    """Has torch.compile break the graph where fn is called, as torch.compiler.disable does."""
    fn._torchdynamo_disable, fn._torchdynamo_disable_msg = True, reason
    return fn


def skip_code(fn: Any) -> None:
    """Has torch.compile run the code of fn, and all that it calls, as it is."""
    frames: Any = eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(fn.__code__, frames._FrameExecStrategy(skip, skip))


def with_cells(fn: FunctionType, cells: tuple[CellType, ...]) -> FunctionType:
    """A function of fn's code and globals, without its defaults, whose closure is `cells`."""
    return FunctionType(fn.__code__, fn.__globals__, fn.__name__, None, cells)


def register_ordered(name: str) -> None:
    """Has torch.compile run the operator `name` ("namespace::name") after earlier such ones and before later ones."""
    simple_registry.singleton.find(name).effect.register(effects.EffectType.ORDERED)


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh with one dim of all its ranks in order. All ranks of the mesh that it is a part of must call."""
    return mesh._flatten()


def process_groups() -> list[Any]:
    """All that this process is in, in the order in which they were made."""
    from torch.distributed import distributed_c10d

    return list(distributed_c10d._world.pg_map)


def symmetric_memory() -> Any:
    """torch's class of memory that GPUs share.

    Raises:
        ImportError: this build of torch has none.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory


def resolve_process_group(name: str) -> Any:
    """The process group of this name.

    Raises:
        LookupError: none has it, as after its destruction.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


# --- operators -------------------------------------------------------------------------------------------------------

DisableTorchFunction = torch._C.DisableTorchFunction
tree = _pytree
INDUCTOR_CONFIG = "torch._inductor.config"
function_modes = overrides._get_current_function_mode_stack
dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack
without_dispatch_modes = _python_dispatch._disable_current_modes
TorchDispatchMode = _python_dispatch.TorchDispatchMode

OpOverload: TypeAlias = Any  # the overload of an operator
DispatchKey: TypeAlias = torch._C.DispatchKey
DispatchKeySet: TypeAlias = torch._C.DispatchKeySet
dispatch_key: Any = torch._C._dispatch_key_parse
keys_after: Any = torch._C._dispatch_keyset_full_after
included = torch._C._dispatch_tls_is_dispatch_key_included
include = torch._C._dispatch_tls_set_dispatch_key_included
exclude: Any = torch._C._dispatch_tls_set_dispatch_key_excluded


def schema_of(op: Any) -> Any:
    """The schema of an operator's overload."""
    return op._schema


# --- process groups --------------------------------------------------------------------------------------------------


def count_groups_from(number: int) -> None:
    """The number in the name of the next process group."""
    torch.distributed.distributed_c10d._world.group_count = number


def register_process_group(name: str, group: Any) -> None:
    torch._C._distributed_c10d._register_process_group(torch.distributed.distributed_c10d.GroupName(name), group)


def unregister_process_group(name: str) -> None:
    torch._C._distributed_c10d._unregister_process_group(torch.distributed.distributed_c10d.GroupName(name))


class TellsInference:
    """Comes before PipelineStage among the bases of a class. `infers`: whether the stage only learns shapes now."""

    infers = False

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        self.infers = True
        try:
            return super()._prepare_forward_infra(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.infers = False


# --- hooks -----------------------------------------------------------------------------------------------------------


def forward_hooks_of(module: nn.Module) -> dict[int, Any]:
    return module._forward_hooks


def forward_pre_hooks_of(module: nn.Module) -> dict[int, Any]:
    return module._forward_pre_hooks


def gradient_hooks_of(x: Tensor) -> dict[int, Any] | None:
    """None if x never had one."""
    return x._backward_hooks


def accumulation_hooks_of(x: Tensor) -> dict[int, Any] | None:
    """None if x never had one."""
    return x._post_accumulate_grad_hooks
