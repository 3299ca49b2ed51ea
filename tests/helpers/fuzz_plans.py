"""Random models of plain torch modules with random plans: `parallelize` is right, or it refuses.

A model is plain data, a list of blocks and the style that the plan gives to each module (None: no pattern names it).
Most plans are what a careful user writes; others have a style that does not fit the model. Whatever the plan,
one of three things is right: an error of `parallelize` (with verify=True, where it has that), an error of the first
forward, or a model whose outputs and gradients are the unsharded model's, and TP=1's byte for byte.
"""

import inspect
import json

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from meshes import init_device_mesh
from torch import nn

import tp_invariant as tpi
from tp_invariant.comm.group import Group
from tp_invariant.data_parallel import MicroBatchTree
from tp_invariant.regions import gather_sequence

ALLOWED = 1e-3  # norm-wise, in fp32; what is wrong is off by percents


# --- the models -----------------------------------------------------------------------------------------------------


class Gain(nn.Module):
    """x times a learned vector, or number."""

    def __init__(self, features):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(features))

    def forward(self, x):
        return x * self.gain


def norm_of(kind, features):
    norm = nn.LayerNorm(features) if kind == "LayerNorm" else nn.RMSNorm(features, eps=1e-5)
    for p in norm.parameters():
        nn.init.normal_(p)
    return norm


class Mlp(nn.Module):
    """up, an activation, down; `fused`: gate and up are one projection."""

    def __init__(self, size, inner, fused, bias, between, activation):
        super().__init__()
        self.fused = fused
        self.up = nn.Linear(size, inner * (2 if fused else 1), bias=bias)
        self.act = {"silu": nn.SiLU, "gelu": nn.GELU, "relu": nn.ReLU}[activation]()
        self.between = None
        if between:
            features = {"number": 1, "vector": inner}.get(between)
            self.between = Gain(features) if features else norm_of(between, inner)
        self.down = nn.Linear(inner, size, bias=bias)

    def forward(self, x):
        y = self.up(x)
        if self.fused:
            gate, y = y.chunk(2, -1)
            y = self.act(gate) * y
        else:
            y = self.act(y)
        return self.down(y if self.between is None else self.between(y))


class Attention(nn.Module):
    """Projections of q, k and v, apart or fused into one; norms of each head; gains of the heads."""

    def __init__(self, size, heads, kv_heads, head_dim, fused, bias, norm, causal):
        super().__init__()
        self.fused, self.head_dim, self.causal = fused, head_dim, causal
        self.sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        if fused:
            self.qkv = nn.Linear(size, sum(self.sizes), bias=bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(size, n, bias=bias) for n in self.sizes)
        self.q_norm = norm_of(norm, head_dim) if norm else None
        self.k_norm = norm_of(norm, head_dim) if norm else None
        self.o_proj = nn.Linear(heads * head_dim, size, bias=bias)

    def forward(self, x):
        if self.fused:
            y = self.qkv(x)
            q, k, v = y.split([n * y.shape[-1] // sum(self.sizes) for n in self.sizes], -1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if k.shape[1] != q.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """One of the above after a norm, beside a residual."""

    def __init__(self, norm, inner, outer):
        super().__init__()
        self.norm, self.inner, self.outer = norm, inner, outer

    def forward(self, x):
        y = self.inner(x if self.norm is None else self.norm(x))
        return x + (y if self.outer is None else self.outer(y))


class Model(nn.Module):
    def __init__(self, program):
        super().__init__()
        size = program["size"]
        self.embedding = nn.Embedding(program["vocabulary"], size)
        self.blocks = nn.ModuleList(_block(block, size) for block in program["blocks"])
        self.last = norm_of("LayerNorm", size)
        self.head = nn.Linear(size, program["vocabulary"], bias=False)
        if program["tied"]:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def _block(block, size):
    options = {k: v for k, v in block.items() if k not in ("kind", "before", "after", "plan")}
    inner = {"mlp": Mlp, "attention": Attention}[block["kind"]](size, **options)
    before = norm_of(block["before"], size) if block["before"] else None
    return Block(before, inner, Gain(size) if block["after"] else None)


def build(program):
    torch.manual_seed(program["seed"])
    return Model(program)


def plan_of(program):
    plan = {name: style for name, style in program["plan"].items() if style is not None}
    for number, block in enumerate(program["blocks"]):
        plan |= {f"blocks.{number}.{name}": style for name, style in block["plan"].items() if style is not None}
    return plan


# --- drawing --------------------------------------------------------------------------------------------------------

STYLES = (
    "colwise", "rowwise", "colwise_gather_output", "packed_colwise", "rowwise_split_input", "packed_rowwise",
    "replicate", None,
)  # fmt: skip


@st.composite
def plans(draw, most=3):
    def pick(*options):
        return draw(st.sampled_from(options))

    def rarely(odds=5):
        return draw(st.integers(0, odds)) == odds

    degree = pick(2, 4, 3)
    size = degree * pick(8, 4, 6)
    blocks = []
    for _ in range(draw(st.integers(1, most))):
        fused = rarely(2)
        block = {"fused": fused, "bias": rarely(1), "before": pick(None, "LayerNorm", "RMSNorm"), "after": rarely(3)}
        if pick("mlp", "attention") == "mlp":
            between = pick(None, None, None, None, "number", "vector", "LayerNorm", "RMSNorm")
            block |= {
                "kind": "mlp", "inner": degree * pick(8, 4, 12), "between": between,
                "activation": pick("silu", "gelu", "relu"),
            }  # fmt: skip
            plan = {"inner.up": "packed_colwise" if fused else "colwise", "inner.down": "rowwise"}
            if between:
                plan["inner.between"] = pick(None, "replicate")
        else:
            kv = degree * pick(1, 2)
            block |= {
                "kind": "attention", "heads": kv * pick(1, 2), "kv_heads": kv, "head_dim": pick(4, 8),
                "norm": pick(None, None, None, "RMSNorm", "LayerNorm"), "causal": rarely(1),
            }  # fmt: skip
            if fused and not rarely(2):
                block["heads"] = kv
            qkv = ["inner.qkv"] if fused else ["inner.q_proj", "inner.k_proj", "inner.v_proj"]
            plan = {**dict.fromkeys(qkv, "colwise"), "inner.o_proj": "rowwise"}
            if fused:
                plan = {
                    "inner.qkv": pick("in pieces", "colwise", "colwise_gather_output", "in pieces"),
                    "inner.o_proj": "rowwise",
                }
                if plan["inner.qkv"] == "colwise_gather_output":
                    plan["inner.o_proj"] = "rowwise_split_input"
            if block["norm"]:
                style = pick("of heads", "of heads", "replicate", None)
                plan |= {"inner.q_norm": style, "inner.k_norm": style}
        if block["after"]:
            plan["outer"] = pick("replicate", "replicate", None)
        if rarely(5):  # a plan that does not fit
            plan[pick(*plan)] = pick(*STYLES)
        blocks.append(block | {"plan": plan})
    head = pick(None, "colwise_gather_output", "replicate")
    return {
        "seed": draw(st.integers(0, 9)), "degree": degree, "size": size, "vocabulary": degree * 5,
        "tied": rarely(2), "blocks": blocks, "plan": {"head": head, "embedding": pick(None, "embedding_rowwise")},
        "batch": pick(2, 1), "length": pick(5, 3),
    }  # fmt: skip


@st.composite
def plans_with_context(draw):
    """In a layout (cp, tp), with chunks of the sequence."""
    program = draw(plans())
    degree = program["degree"]
    cp = draw(st.sampled_from([n for n in (degree, 2, 1) if degree % n == 0]))
    chunks = cp * draw(st.sampled_from([1, 2, 3]))
    length = chunks * draw(st.sampled_from([2, 1, 3]))
    return program | {"layout": [cp, degree // cp], "chunks": chunks, "length": length}


# --- running --------------------------------------------------------------------------------------------------------


def _style(style):
    from tp_invariant.conversion.plans import HEADS_STYLE, Part

    if style == "in pieces":
        return Part("colwise", partition_stride=3)
    return Part(HEADS_STYLE, heads_dim=2) if style == "of heads" else style


def _ids(program):
    generator = torch.Generator().manual_seed(program["seed"] + 100)
    return torch.randint(0, program["vocabulary"], (program["batch"], program["length"]), generator=generator)


def _backward(model, program, dtype):
    y = model(_ids(program))
    torch.manual_seed(program["seed"] + 200)
    y.backward(torch.randn(y.shape).to(dtype))
    return y


def unsharded(program):
    """Output and gradients of the plain model in float64."""
    model = build(program).double()
    y = _backward(model, program, torch.float64)
    return {"y": y.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def _sharded_backward(model, program, mesh):
    """Of a model in a layout: this rank's part of the tokens, and sums over all chunks of them."""
    if "layout" not in program:
        return _backward(model, program, torch.float32)
    cp, group = (None, Group(None, 0, 1)) if mesh is None else (mesh["cp"], None)
    tree = MicroBatchTree(model.parameters(), group, 1, mesh=mesh)
    y = _backward(lambda ids: gather_sequence(model(tpi.sequence_part(ids, cp)), cp, 1), program, torch.float32)
    tree.add()
    tree.reduce()
    return y


def sharded(tp_group, program, mode=True, plan=None):
    """Output and gradients of the parallelized model in fp32; or ("refused" | "failed", why)."""
    verify = {}
    if "verify" in inspect.signature(tpi.parallelize).parameters:
        verify = {"verify": True, "example_inputs": _ids(program)}
    mesh = None
    if "layout" in program:
        verify["sequence_chunks"] = program["chunks"]
        if tp_group is not None:
            mesh = init_device_mesh("cpu", tuple(program["layout"]), mesh_dim_names=("cp", "tp"))
            tp_group, verify["mesh"] = None, mesh
    with tpi.set_tp_invariant_mode(mode):
        styles = {name: _style(style) for name, style in (plan or plan_of(program)).items()}
        try:
            model = tpi.parallelize(build(program), tp_group, styles, **verify)
        except (ValueError, RuntimeError) as error:
            return "refused", str(error)
        try:
            y = _sharded_backward(model, program, mesh)
        except (ValueError, RuntimeError, TypeError) as error:
            return "failed", str(error)
        return {"y": y.detach(), **tpi.testing.full_grads(model)}


def run_plans(tp_group, programs):
    """For each program (outcome, what is wrong) on this rank."""
    found = []
    for program in programs:
        many = sharded(tp_group, program)
        if isinstance(many, tuple):
            found.append((many[0], []))
            continue
        one, exact, problems = sharded(None, program), unsharded(program), []
        if isinstance(one, tuple):
            found.append((one[0], [f"TP=1 {one[0]} what TP={program['degree']} takes: {one[1]}"]))
            continue
        for name, want in exact.items():
            scale = want.norm()
            off = float((many[name].double() - want).norm() / scale) if many[name] is not None else float("inf")
            if scale > 1e-9 and not off <= ALLOWED:
                problems.append(f"TP={program['degree']}, {name}: off by {off:.1e} from the unsharded model's")
            if many[name] is not None and tpi.testing.digest(many[name]) != tpi.testing.digest(one[name]):
                problems.append(f"TP={program['degree']}, {name}: differs from TP=1's")
        found.append(("right" if not problems else "wrong", problems))
    return found


def check_plans(programs, device="cpu", counts=None):
    """What is wrong with each program: a list of sentences, empty where `parallelize` is right or refuses."""
    problems = [[] for _ in programs]
    for degree in sorted({p["degree"] for p in programs}):
        here = [i for i, p in enumerate(programs) if p["degree"] == degree]
        some = [programs[i] for i in here]
        for rank, results in enumerate(tpi.testing.run_ranks(run_plans, degree, some, device="cpu")):
            for index, (outcome, wrong) in zip(here, results, strict=True):
                problems[index] += [f"rank {rank}: {line}" for line in wrong]
                if counts is not None and rank == 0:
                    counts[outcome] += 1
    return problems


def script(program):
    """A program of its own: this file's models, and what their plan makes of them."""
    return "\n".join(
        [
            f"# {json.dumps(plan_of(program), indent=2)}".replace("\n", "\n# "),
            "# From the folder tests of the repository:",
            "import json",
            "",
            "from fuzz_plans import check_plans",
            "",
            'if __name__ == "__main__":',
            f"    program = json.loads({json.dumps(program)!r})",
            "    print(*check_plans([program])[0], sep='\\n')",
            "",
        ]
    )
