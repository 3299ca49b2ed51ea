"""Defects that a library like this one may have, planted into the ranks, to show that the fuzzer finds them.

Each is a context manager for a rank's process. The function that it changes is looked up by name in all modules of
the library, so that the helper does not depend on the module.
"""

import contextlib
import itertools
import sys

import fuzz_runtime
import torch
from fuzz_runtime import restrided
from torch import nn

import tp_invariant as tpi
from tp_invariant.comm.collectives import resolve_group


@contextlib.contextmanager
def _replaced(names, name, new):
    """names[name] is `new` within the context."""
    old, names[name] = names[name], new
    try:
        yield
    finally:
        names[name] = old


@contextlib.contextmanager
def _attribute(cls, name, new):
    old = getattr(cls, name)
    setattr(cls, name, new)
    try:
        yield
    finally:
        setattr(cls, name, old)


@contextlib.contextmanager
def _in_place_of(name, make):
    """make(the library's function `name`) replaces that function in every module that imported it."""
    modules = [m for n, m in list(sys.modules.items()) if n.partition(".")[0] == "tp_invariant" and name in vars(m)]
    old = {id(vars(m)[name]): vars(m)[name] for m in modules}
    if len(old) != 1:
        raise LookupError(f"the library has {len(old)} things called {name}")
    (old,) = old.values()
    new = make(old)
    for module in modules:
        setattr(module, name, new)
    try:
        yield
    finally:
        for module in modules:
            setattr(module, name, old)


@contextlib.contextmanager
def gathered_in_rank_order():
    """Pieces of partition_stride > 1 stay in rank order."""
    from tp_invariant.layers import grad_partial_sums

    try:
        with _in_place_of("deinterleave", lambda old: lambda tensor, *, dim, world, stride: tensor):
            yield
    finally:
        grad_partial_sums._gather_plan.cache_clear()  # it holds orders that are made with the defect


@contextlib.contextmanager
def whole_layers_count_as_sharded():
    """Parameters of layers without tp_group are marked as sharded over all ranks: the norm counts them P times."""
    old = fuzz_runtime.clip

    def clip(parameters, max_norm, norm_type, world, told=False):
        group = resolve_group(world)
        for p in parameters:
            if not getattr(p, "tensor_model_parallel", True) and p.dim() == 2 and group.size > 1:
                p.tensor_model_parallel, p.partition_dim, p.partition_stride, p.tp_group = True, 0, 1, group
        return old(parameters, max_norm, norm_type, world, told)

    with _replaced(vars(fuzz_runtime), "clip", clip):
        yield


class _Restrided(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return restrided(grad)


@contextlib.contextmanager
def gradients_with_other_strides():
    """The gradient of a layer's input has the strides of a transposed tensor, so torch's own sums of it differ."""
    old = tpi.Linear.forward
    with _attribute(tpi.Linear, "forward", lambda self, x: old(self, _Restrided.apply(x))):
        yield


@contextlib.contextmanager
def sums_on_the_wire():
    """Row-parallel layers add the ranks' results, as stock tensor parallelism does."""
    from tp_invariant.functional import stock
    from tp_invariant.layers import linear

    with _replaced(linear._INVARIANT, "row", stock.row_linear):
        yield


def tokens_in_reverse():
    """Gathered tokens are in the reverse order of ranks."""

    def make(old):
        def gather_dim(local, dim, group):
            gathered = old(local, dim, group)
            return torch.cat(gathered.tensor_split(group.size, dim)[::-1], dim) if group.size > 1 else gathered

        return gather_dim

    return _in_place_of("gather_dim", make)


@contextlib.contextmanager
def parameters_given_twice_count_twice():
    """The norm takes a tensor as often as the caller gives it."""
    from tp_invariant.layers import grad_norm

    numbers = itertools.count()
    grad_norm.id = lambda _: next(numbers)
    try:
        yield
    finally:
        del grad_norm.id


@contextlib.contextmanager
def new_parameters_carry_no_group():
    """A parameter that takes another's place is not marked as a shard."""
    from tp_invariant.layers.parameters import KeepsAttributes, ShardedModule

    def nothing(*args):
        pass

    with (
        _attribute(KeepsAttributes, "register_parameter", nn.Module.register_parameter),
        _attribute(ShardedModule, "register_parameter", nn.Module.register_parameter),
        _attribute(ShardedModule, "_mark_replacement", nothing),
    ):
        yield


@contextlib.contextmanager
def ranks_are_not_compared():
    """Neither calls nor gradients are."""

    def nothing(*args, **options):
        pass

    from tp_invariant.layers import grad_norm
    from tp_invariant.optim import step_checks

    with (
        _in_place_of("check_agreement", lambda old: nothing),
        _replaced(vars(grad_norm), "compare_gradients", nothing),
        _replaced(vars(step_checks), "compare_gradients", nothing),
    ):
        yield


@contextlib.contextmanager
def plans_are_not_checked():
    """`parallelize` believes each plan: no survey of what a module does, no trial, no look at the first forward."""
    from tp_invariant.conversion.gradient_flow import FirstForward
    from tp_invariant.conversion.survey import Survey

    old = tpi.parallelize

    def parallelize(model, tp_group, plan):  # without verify=
        return old(model, tp_group, plan)

    with (
        _attribute(Survey, "_problem", lambda *args: None),
        _attribute(FirstForward, "__call__", lambda *args: None),
        _replaced(vars(tpi), "parallelize", parallelize),
    ):
        yield


@contextlib.contextmanager
def results_off_by_a_thousandth():
    """Norms whose results are wrong by 0.1% at every degree."""
    from tp_invariant.kernels.rowwise import reference_norm

    old = reference_norm.norm_forward

    def norm_forward(*args, **options):
        y, mean, rstd = old(*args, **options)
        return y * 1.001, mean, rstd

    with _replaced(vars(reference_norm), "norm_forward", norm_forward):
        yield


AT_DEGREES = {
    f.__name__: f
    for f in (
        gathered_in_rank_order,
        whole_layers_count_as_sharded,
        gradients_with_other_strides,
        sums_on_the_wire,
        tokens_in_reverse,
        parameters_given_twice_count_twice,
        new_parameters_carry_no_group,
    )
}

# programs without these never call what the defect changes
NEEDS = {
    "parameters_given_twice_count_twice": lambda program: program["twice"],
    "new_parameters_carry_no_group": lambda program: any(layer.get("replace") for layer in program["layers"]),
}
