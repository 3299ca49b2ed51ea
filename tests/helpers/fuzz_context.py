"""Random models with a cp dim: composed ones of layers by hand, in layouts (cp, tp) of up to four ranks.

A program is one of fuzz_programs.py with sequence_chunks C, the dim of the sequence, and layouts whose cp divides C.
What they are compared with is one rank with the same C. Left out is what cannot be had by chunk (see
context_parallel_): tokens in another order, fused gradients, and layers on another group than the mesh's tp. Where a
rank holds several chunks there is no sequence parallelism by hand, so such a program has only layouts without.
"""

import json
import math

import torch
from fuzz_programs import WHOLE, _Builder, types
from fuzz_runtime import Run
from fuzz_source import layers_source
from hypothesis import strategies as st
from meshes import init_device_mesh
from torch import nn

import tp_invariant as tpi
from tp_invariant.comm.group import Group, resolve_group
from tp_invariant.data_parallel import MicroBatchTree
from tp_invariant.layers.sequence_chunks import context_parallel_
from tp_invariant.regions import gather_sequence, scatter_sequence

LAYOUTS = [(cp, tp) for cp in (1, 2, 3, 4) for tp in (1, 2, 3, 4) if 1 < cp * tp <= 4]


# --- drawing --------------------------------------------------------------------------------------------------------


class _ContextBuilder(_Builder):
    def __init__(self, draw):
        sizes = st.sampled_from([(4, 4), (2, 4), (3, 3), (2, 2), (6, 12), (4, 2), (4, 4), (2, 4), (6, 3), (1, 4)])
        self.chunks, degree = draw(sizes)
        self.dim, self.sequence_parallel = draw(st.sampled_from([1, 1, 0])), draw(st.booleans())
        super().__init__(draw, frozenset(), (degree,))
        self.values = self.pick("normal", self.values)  # attention is not drawn for wide ones

    def _tokens(self):
        batch, length = self.pick(2, 1, 3, self.unit), self.chunks * self.pick(*(1, 2, 3) * self.dim, self.unit)
        batch = min(batch, max(1, 144 // length))
        return (batch, length) if self.dim == 1 else (length, batch)[: self.pick(1, 2)]

    def group(self):
        return self.pick("world", "world", "none")

    def sequence_dims(self, t):
        """The dims of which each rank of cp has a part that tp divides."""
        whole = [dim for dim in range(len(t.tokens)) if len(t.tokens) == 2 and dim != self.dim]
        parts = [size // (1 if dim in whole else self.chunks) for dim, size in enumerate(t.tokens)]
        return [dim for dim, size in enumerate(parts) if self.sequence_parallel and size % self.unit == 0]

    def do_permute(self, x, t):
        self.do_act(x, t)

    def do_attention(self, x, t):
        if len(t.tokens) == len(self.tokens) and len(t.tokens) == 1 + self.dim:
            super().do_attention(x, t)

    def finish(self):
        program = super().finish()
        for layer in self.layers:
            layer["fuse"] = False
            if layer["kind"] == "norm" and self.dim == 0:
                layer["transposed"] = False
        for op in self.ops:
            if op["op"] == "cross_entropy":
                op["reduction"] = "none"
        program |= {"chunks": self.chunks, "dim": self.dim, "tokens": list(self.tokens)}
        sp = any(t.place[0] == "tokens" for t in types(program))
        return program | {
            "layouts": [
                (cp, tp) for cp, tp in LAYOUTS
                if self.chunks % cp == 0 and self.unit % (cp * tp) == 0 and (cp == self.chunks or tp == 1 or not sp)
            ]
        }  # fmt: skip


@st.composite
def programs(draw, most=12):
    builder = _ContextBuilder(draw)
    for _ in range(draw(st.integers(1, 2))):
        builder.start()
    for number, t in enumerate(builder.types[:]):
        if t.place == WHOLE:
            getattr(builder, builder.pick("do_attention", "do_column"))(number, t)
    for _ in range(draw(st.integers(1, most))):
        builder.step()
    return builder.finish()


# --- running --------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """A user's own module, which adds or multiplies by a parameter."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x, op):
        return op(x, self.p)

    def __radd__(self, x):
        return self(x, torch.add)

    def __rmul__(self, x):
        return self(x, torch.mul)


class Model(nn.Module):
    """The layers, whose forward is the program's; `tokens` tell context_parallel_ B and S."""

    def __init__(self, layers, run):
        super().__init__()
        self.layers, self.run = nn.ModuleList(layers), run

    def forward(self, tokens):
        self.run()


class ContextRun(Run):
    """A Run of one rank of (cp, tp): inputs are cut, outputs gathered, over cp, and their gradients the other way."""

    def __init__(self, layout, chunks, dim, tokens, **options):
        super().__init__(None, **options)
        alone = math.prod(layout) == 1
        self.mesh = None if alone else init_device_mesh("cpu", tuple(layout), mesh_dim_names=("cp", "tp"))
        self.cp = Group(None, 0, 1) if alone else self.mesh["cp"]
        self.world = None if layout[1] == 1 else self.mesh["tp"].get_group()
        self.groups = {"world": self.world, "half": None, "none": None}
        self.chunks, self.dim, self.tokens, self.layers = chunks, dim, list(tokens), {}

    def over_cp(self, move, x, lengths):
        """`move` along the sequence, also where the tokens are flattened; lengths: of the sequence, in `x`."""
        sizes = [*self.tokens]
        sizes[self.dim] = lengths
        if list(x.shape[: len(sizes)]) == sizes:
            return move(x, self.cp, self.dim)
        return move(x.unflatten(0, sizes), self.cp, self.dim).flatten(0, 1)

    def cut(self, x, over=None, dim=None):
        move = scatter_sequence if x.requires_grad else tpi.sequence_part
        x = self.over_cp(move, x, self.tokens[self.dim])
        return x if dim is None else move(x, self.group(over), dim)

    def input(self, name, tokens, features, layout="plain", over=None, dim=None, stride=1, grad=True):
        if dim == len(tokens):
            return self.cut(super().input(name, tokens, features, layout, over, dim, stride, grad))
        return self.cut(super().input(name, tokens, features, layout, grad=grad), over, dim)

    def ids(self, *args):
        return self.cut(super().ids(*args))

    def chosen(self, *args, over=None, dim=None):
        return tuple(self.cut(x, over, dim) for x in super().chosen(*args))

    def attention(self, *args, **options):
        return super().attention(*args, cp_group=self.cp, **options)

    def output(self, name, y, over=None, dim=None, stride=1, cotangent="random"):
        if dim is not None and dim < y.dim() - 1:
            y, dim = gather_sequence(y, self.group(over), dim), None
        y = self.over_cp(gather_sequence, y, self.tokens[self.dim] // resolve_group(self.cp).size)
        super().output(name, y, over, dim, stride, cotangent)

    def parameter(self, module, *args, **options):
        self.layers[id(module)] = module
        super().parameter(module, *args, **options)

    def plain(self, name, features, center=0.0):
        super().plain(name, features, center)
        module = Plain(self.places[-1][1].p)
        return self.layers.setdefault(id(module), module)

    def prepared(self, forward, parameters, micro_batches):
        if not any(p.requires_grad for p in parameters):
            return super().prepared(forward, parameters, micro_batches)
        model = Model(self.layers.values(), forward)
        context_parallel_(model, self.cp, sequence_chunks=self.chunks, sequence_dim=self.dim)
        group = Group(None, 0, 1) if self.mesh is None else None
        tree = MicroBatchTree(parameters, group, micro_batches, mesh=self.mesh)
        tokens = tpi.sequence_part(torch.zeros(self.tokens, dtype=torch.int64), self.cp, self.dim)
        return (lambda: model(tokens)), tree.add, tree.reduce


def run_context(case, layout, program, mode, options):
    """case(r) in a layout -> its results on this rank."""
    with tpi.set_tp_invariant_mode(mode):
        r = ContextRun(layout, *(program[key] for key in ("chunks", "dim", "tokens")), **options)
        case(r)
        return r.results()


def script(program):
    """A program that runs a drawn one again, with the text of its functions."""
    return f"""# From the folder tests/helpers of the repository:
import json

import fuzz_runner

{layers_source(program)}

if __name__ == "__main__":
    print(*fuzz_runner.check([json.loads({json.dumps(program)!r})])[0], sep="\\n")
"""
