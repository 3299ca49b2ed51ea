"""Random programs of tensor-parallel layers, as plain data: what the fuzzer builds, trains and compares.

A program is a dictionary that JSON can hold:

    seed, dtype, values   which numbers (fuzz_runtime.Data)
    degrees               the tensor-parallel degrees that divide its sizes
    layers                [options of a layer, ..]
    ops                   [an operation, ..]; each takes values by number and makes new ones
    the rest              training: micro_batches, optimizer, clipping, switches

`types(program)` says of each value what of it a rank holds. The strategy `programs()` draws only operations that fit
these types, so that every program is one that a user may write. What a rank holds of a value:

    ("whole", "none", 0)            all of it
    ("features", group, stride)     its part of the features, in `stride` stacked pieces
    ("tokens", group, dim)          its part of the tokens along `dim`
"""

import dataclasses
import math

from hypothesis import strategies as st

WHOLE = ("whole", "none", 0)


@dataclasses.dataclass(frozen=True)
class Type:
    tokens: tuple
    features: int  # None: a value of the tokens' shape, or a number
    place: tuple = WHOLE

    def at(self, *place):
        """The same elsewhere; on no group everything is whole."""
        return dataclasses.replace(self, place=WHOLE if place[1] == "none" else place)


def features_in(layer):
    """The place of what a layer takes."""
    group = layer["group"]
    if group == "none":
        return WHOLE
    if layer["kind"] == "linear" and layer["mode"] == "row":
        return ("features", group, layer["stride"]) if layer["input_is_parallel"] else WHOLE
    if layer["kind"] == "norm" and layer["heads"]:
        return ("features", group, 1)
    return ("tokens", group, layer["sequence_dim"]) if layer["sp"] else WHOLE


def accepts(layer, t, unit):
    """Whether a value of type `t` is what `layer` takes."""
    if layer["kind"] == "embedding" or t.features is None:
        return False
    if layer["sp"]:
        dim = layer["sequence_dim"]
        if dim >= len(t.tokens) or t.tokens[dim] % unit:
            return False
    if layer["kind"] == "norm" and layer["heads"]:
        fits = t.features == layer["features"] * layer["heads"] and len(t.tokens) == layer["token_dims"]
        return fits and t.place == features_in(layer)
    size = layer["features"] if layer["kind"] == "norm" else layer["in"]
    return t.features == size and t.place == features_in(layer)


def results(layer, t):
    """The types of what a layer makes of a value of type `t`."""
    if layer["kind"] in ("norm", "experts"):
        return [t]
    group, dim = layer["group"], layer["sequence_dim"]
    y = dataclasses.replace(t, features=layer["out"])
    if layer["mode"] == "column":
        y = y.at(*WHOLE) if layer["gather_output"] else y.at("features", group, layer["stride"])
    elif layer["mode"] == "row":
        y = y.at("tokens", group, dim) if layer["sp"] else y.at(*WHOLE)
    if not layer.get("return_norm"):
        return [y]
    return [y, t.at(*WHOLE) if layer["return_norm_gathered"] else t]


def types_after(op, types, layers):
    """The types of the values that an operation makes."""
    kind = op["op"]
    if kind == "input":
        return [Type(tuple(op["tokens"]), op["features"], tuple(op["place"]))]
    if kind == "embedding":
        layer = layers[op["layer"]]
        t = Type(tuple(op["tokens"]), layer["features"])
        return [t.at("tokens", layer["group"], layer["sequence_dim"]) if layer["sp"] else t]
    t = types[op["x"]]
    if kind == "call":
        return results(layers[op["layer"]], t)
    if kind == "glu":
        return [dataclasses.replace(t, features=t.features // 2).at(t.place[0], t.place[1], 1)]
    if kind == "attention":
        features = op["heads"] * op["head_dim"]
        place = t.place if op["fused"] is False or t.place == WHOLE else ("features", t.place[1], 1)
        return [dataclasses.replace(t, features=features, place=place)]
    if kind == "scatter":
        return [t.at("tokens", op["group"], op["dim"])]
    if kind in ("gather", "whole"):
        return [t.at(*WHOLE)]
    if kind == "permute":
        place = (t.place[0], t.place[1], 1 - t.place[2]) if t.place[0] == "tokens" else t.place
        return [Type((t.tokens[1], t.tokens[0]), t.features, place)]
    if kind == "flatten":
        return [dataclasses.replace(t, tokens=(math.prod(t.tokens),))]
    if kind == "cross_entropy":
        return [Type(t.tokens if op["reduction"] == "none" else (), None)]
    return [t]  # act, add, multiply, shift, gain, restride


def types(program):
    """The type of each value."""
    found = []
    for op in program["ops"]:
        found += types_after(op, found, program["layers"])
    return found


def outputs(program):
    """The numbers of the values that nothing takes, but those that are dropped."""
    used = {op[key] for op in program["ops"] for key in ("x", "y", "z") if op.get(key) is not None}
    return [i for i in range(len(types(program))) if i not in used and i not in program["dropped"]]


# --- drawing --------------------------------------------------------------------------------------------------------

SMOOTH = ("gelu", "silu", "tanh", "sigmoid", "gelu_tanh", "double")
ACTIVATIONS = (*SMOOTH, "relu", "leaky_relu", "abs", "hardtanh")


class _Builder:
    """A program as it grows; `without` are names of what is left out: the known defects of a version, say."""

    def __init__(self, draw, without, degrees=None):
        self.draw, self.without = draw, without
        self.layers, self.ops, self.types = [], [], []
        self.degrees = degrees or draw(st.sampled_from([(2,), (2, 3, 4), (3,), (4,), (2, 4)]))
        self.unit = math.lcm(*self.degrees)
        self.values = draw(st.sampled_from(["normal", "wide", "wide", "sparse", "tiny", "nonfinite"]))
        self.dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
        self.tokens = self._tokens()

    def pick(self, *options):
        return self.draw(st.sampled_from(options))

    def rarely(self, odds=5):
        return self.draw(st.integers(0, odds)) == odds

    def may(self, name, odds=5):
        return name not in self.without and self.rarely(odds)

    def _tokens(self):
        unit, dims = self.unit, self.pick(2, 1, 2, 3)
        sizes = [self.pick(unit, 2 * unit, 1, 3, 5) for _ in range(dims)]
        if self.rarely(3):
            sizes[-1] = self.pick(33, 70, 132)
        if self.may("zero tokens", 12):
            sizes[self.draw(st.integers(0, dims - 1))] = 0
        while math.prod(sizes) > 300:
            sizes[sizes.index(max(sizes))] = unit
            if max(sizes) <= unit:
                sizes[0] = 1
        return tuple(sizes)

    def size(self, multiple=1):
        return self.unit * multiple * self.pick(2, 1, 3, 4, 8, 5, 16 if multiple == 1 else 6)

    def group(self):
        if "mixed groups" in self.without:
            return "world"
        return self.pick("world", "world", "world", "half", "none")

    def activations(self):
        """None with a kink behind experts in 16 bits: where they round zero to either side, the gradient is another."""
        rounded = self.dtype != "float32" and any(layer["kind"] == "experts" for layer in self.layers)
        return SMOOTH if rounded else ACTIVATIONS

    def sequence_dims(self, t):
        """The dims of the tokens that every degree divides."""
        return [dim for dim, size in enumerate(t.tokens) if size % self.unit == 0]

    def add(self, **op):
        new = types_after(op, self.types, self.layers)
        self.ops.append(op)
        self.types += new
        return len(self.types) - len(new)

    # layers

    def _parameters(self, layer, names):
        """What is drawn for the parameters of any layer."""
        layer["frozen"] = [name for name in names if self.rarely(9)]
        layer["replace"] = None
        if self.may("replaced parameters", 9):
            layer["replace"] = self.pick("assign", "delete")
        layer["copied"] = self.rarely(9)
        self.layers.append(layer)
        return len(self.layers) - 1

    def linear(self, t, mode, normed=False, **options):
        """The number of a new Linear, or LayerNormLinear, that takes `t`; options fix what is else drawn."""
        place, group = t.place, options.pop("group", None)
        if place != WHOLE:
            group = place[1]
        group = group or self.group()
        sp, sequence_dim = place[0] == "tokens", place[2] if place[0] == "tokens" else 0
        stride = place[2] if place[0] == "features" else 1
        if mode == "row" and not sp and (dims := self.sequence_dims(t)) and self.rarely(1):
            sp, sequence_dim = True, self.pick(*dims)
        if mode is None and place == WHOLE and group == "none" and self.sequence_dims(t) and self.rarely(3):
            sp = True
            sequence_dim = self.pick(*self.sequence_dims(t))
        if mode == "column":
            stride = self.pick(1, 2, 1, 3)
        parallel = mode != "row" or place[0] == "features" or group == "none" or self.rarely(3)
        if mode == "row" and place == WHOLE:
            parallel = group == "none" and self.rarely(1)
            if group == "none" or not parallel:
                divides = [s for s in (1, 2, 3) if t.features % (self.unit * s) == 0]
                stride = self.pick(*divides) if divides else 1
        layer = {
            "kind": "linear", "in": t.features, "out": self.size(stride if mode == "column" else 1), "mode": mode,
            "group": group, "bias": not self.rarely(2), "sp": sp, "sequence_dim": sequence_dim, "stride": stride,
            "gather_output": False, "input_is_parallel": parallel, "return_bias": self.rarely(5), "norm": None,
            "owner_map": self.pick("auto", "rows", "cols", "replicate") if mode else "auto",
            "fuse": self.rarely(7), "late_stride": stride > 1 and self.rarely(3), "via": "init", "tied": None,
        }  # fmt: skip
        if mode == "column":
            layer["gather_output"] = self.rarely(3)
        if normed:
            gathered = self.rarely(3)
            layer |= {
                "norm": self.pick("LayerNorm", "RMSNorm"), "zero_centered": self.rarely(3),
                "return_norm": gathered or self.rarely(3), "return_norm_gathered": gathered,
            }  # fmt: skip
        elif self.rarely(5) and not layer["late_stride"]:
            layer["via"] = "from_linear"
        layer |= options
        if layer["fuse"] and layer["norm"] is None and self.rarely(1):
            layer["fuse"] = False
        names = ["weight"] + ["bias"] * layer["bias"] + ["layer_norm_weight"] * normed
        number = self._parameters(layer, names)
        twins = [
            i
            for i, other in enumerate(self.layers[:-1])
            if other["kind"] == "linear"
            and all(other[k] == layer[k] for k in ("in", "out", "mode", "group", "stride", "norm"))
            and other["tied"] is None
        ]
        if twins and self.rarely(2):
            layer |= {"tied": self.pick(*twins), "fuse": False, "via": "init", "replace": None, "copied": False}
            self.layers[layer["tied"]]["fuse"] = False
        return number

    def norm(self, t, heads=0):
        layer = {
            "kind": "norm", "features": t.features // max(heads, 1), "normalization": self.pick("RMSNorm", "LayerNorm"),
            "bias": self.rarely(2), "zero_centered": self.rarely(3), "group": t.place[1], "heads": heads,
            "sp": t.place[0] == "tokens", "sequence_dim": t.place[2] if t.place[0] == "tokens" else 0,
            "token_dims": len(t.tokens), "transposed": heads > 0 and len(t.tokens) == 2 and self.rarely(1),
        }  # fmt: skip
        if t.place == WHOLE and not heads:
            layer["group"] = self.group()
        return self._parameters(layer, ["weight"] + ["bias"] * layer["bias"])

    def embedding(self, features):
        group, dims = self.group(), self.sequence_dims(Type(self.tokens, features))
        size = self.pick(self.unit * 5, self.unit * 2, self.unit * 16, 7, 50)
        sp = group != "none" and bool(dims) and self.rarely(2)
        layer = {
            "kind": "embedding", "size": size, "multiple": self.unit * self.pick(1, 4) if size % self.unit else 1,
            "features": features, "padding_idx": self.draw(st.integers(0, size - 1)) if self.rarely(3) else None,
            "group": group, "sp": sp, "sequence_dim": self.pick(*dims) if sp else 0, "tied": None,
        }  # fmt: skip
        return self._parameters(layer, ["weight"])

    def experts(self, t):
        """A router's choice comes from outside: any, with a gradient for its weights."""
        place, group = t.place, self.group() if t.place == WHOLE else t.place[1]
        dims = self.sequence_dims(t)
        sp = place[0] == "tokens" or (group == "none" and bool(dims) and self.rarely(3))
        # two gated layers on wide values leave the range of a gradient norm in fp32
        by_expert, gated = self.rarely(2), self.values != "wide" and not self.rarely(2)
        count = self.unit * self.pick(1, 2) if by_expert else self.pick(1, 3, 4, 5, 8)
        layer = {
            "kind": "experts", "experts": count, "chosen": min(count, self.pick(1, 2, 3)), "in": t.features,
            "inner": self.size(), "group": group, "by_expert": by_expert, "gated": gated, "bias": self.rarely(1),
            "interleaved": gated and self.rarely(2), "transposed": self.rarely(2),
            "activation": self.pick("silu", "gelu_tanh", *["relu"] * (self.dtype == "float32")), "sp": sp,
            "sequence_dim": place[2] if place[0] == "tokens" else self.pick(*dims) if sp else 0,
        }  # fmt: skip
        up = "gate_up_proj" if gated else "up_proj"
        names = [up, "down_proj"] + [f"{up}_bias", "down_proj_bias"] * layer["bias"]
        return self._parameters(layer, names)

    # operations

    def start(self):
        """A value from outside."""
        if self.rarely(2):
            number = self.embedding(self.size())
            self.add(op="embedding", layer=number, tokens=list(self.tokens))
            return
        place, layout = WHOLE, self.pick("plain", "plain", "transposed", "sliced", "offset", "expanded")
        features = self.size()
        if self.rarely(5):
            group, layout = self.group(), "plain"
            place = ("features", group, 1) if group != "none" else WHOLE
            if (dims := self.sequence_dims(Type(self.tokens, features))) and group != "none" and self.rarely(1):
                place = ("tokens", group, self.pick(*dims))
        grad = not self.rarely(5)
        self.add(
            op="input", tokens=list(self.tokens), features=features, layout=layout, place=list(place), grad=grad
        )  # fmt: skip

    def step(self):
        """One more operation, on the last value or an earlier one."""
        usable = [i for i, t in enumerate(self.types) if t.features is not None]
        x = usable[-1] if not self.rarely(2) else self.pick(*usable)
        t = self.types[x]
        old = [i for i, layer in enumerate(self.layers) if accepts(layer, t, self.unit)]
        if old and self.rarely(2):
            return self.call(self.pick(*old), x)
        moves = {
            "whole": ["column", "row", "none", "norm", "normed", "scatter", "shift", "gain", "experts"],
            "features": ["row", "row", "row", "norm of heads", "attention"],
            "tokens": ["column", "none", "norm", "normed", "gather", "experts"],
        }[t.place[0]]
        moves = [*moves, "act", "act", "add", "multiply", "glu", "restride", "permute", "flatten", "attention"]
        if t.place[0] != "tokens":
            moves += ["cross_entropy"]
        getattr(self, "do_" + self.pick(*moves).replace(" ", "_"))(x, t)

    def call(self, number, x):
        layer = self.layers[number]
        self.add(
            op="call", layer=number, x=x, checkpoint=self.may("checkpoint", 9) and not layer.get("fuse"),
            prefetch=layer["kind"] == "linear" and layer["mode"] == "row" and self.rarely(5),
        )  # fmt: skip

    def shifted(self, x, t):
        """Perhaps `x` plus a parameter, whose gradient is torch's own sum of what the next layer hands back."""
        return self.add(op=self.pick("shift", "gain"), x=x) if t.place == WHOLE and self.rarely(1) else x

    def do_column(self, x, t):
        x = self.shifted(x, t)
        self.call(self.linear(t, "column"), x)

    def do_row(self, x, t):
        if t.place[0] == "features" or t.features % self.unit == 0:
            x = self.shifted(x, t)
            self.call(self.linear(t, "row"), x)

    def do_none(self, x, t):
        self.call(self.linear(t, None), x)

    def do_normed(self, x, t):
        self.call(self.linear(t, self.pick("column", None), normed=True), x)

    def do_experts(self, x, t):
        x = self.shifted(x, t)
        self.call(self.experts(t), x)

    def do_norm(self, x, t):
        self.call(self.norm(t), x)

    def do_norm_of_heads(self, x, t):
        if t.place[2] == 1:
            heads = self.unit * self.pick(1, 2)
            if t.features % heads == 0 and t.features > heads:
                self.call(self.norm(t, heads), x)

    def do_scatter(self, x, t):
        if dims := self.sequence_dims(t):
            self.add(op="scatter", x=x, group=self.group(), dim=self.pick(*dims))

    def do_gather(self, x, t):
        self.add(op="gather", x=x, group=t.place[1], dim=t.place[2])

    def do_shift(self, x, t):
        self.add(op="shift", x=x)

    def do_gain(self, x, t):
        self.add(op="gain", x=x)

    def do_act(self, x, t):
        self.add(op="act", x=x, name=self.pick(*self.activations()))

    def do_add(self, x, t, op="add"):
        others = [i for i, other in enumerate(self.types) if other == t and i != x]
        self.add(op=op, x=x, y=self.pick(*others) if others else x)

    def do_multiply(self, x, t):
        if self.values == "normal":  # wide values would leave fp16's range
            self.do_add(x, t, "multiply")

    def do_glu(self, x, t):
        if (t.place == WHOLE and t.features % (2 * self.unit) == 0) or (t.place[0] == "features" and t.place[2] == 2):
            self.add(op="glu", x=x, name=self.pick(*self.activations()))

    def do_restride(self, x, t):
        self.add(op="restride", x=x)

    def do_permute(self, x, t):
        if len(t.tokens) == 2:
            self.add(op="permute", x=x)

    def do_flatten(self, x, t):
        if len(t.tokens) > 1 and t.place[0] != "tokens":
            self.add(op="flatten", x=x)

    def do_attention(self, x, t):
        """Of what a fused projection made, or of what three projections make of a whole value."""
        if len(t.tokens) > 2 or t.place[0] == "tokens" or math.prod(t.tokens) == 0:
            return
        if self.values in ("nonfinite", "wide"):  # refused; scores of 1e5, whose softmax fp32 has few digits of
            return
        options = {"causal": self.rarely(1), "window": None, "softcap": None}
        if options["causal"] and self.rarely(3):
            options["window"] = self.pick(2, 5)
        if self.rarely(3):
            options["softcap"] = 20.0
        fused = t.place[0] == "features" and t.place[2] == 3
        if fused or (t.place == WHOLE and t.features % (3 * self.unit) == 0 and self.rarely(1)):
            heads, features = self.unit, t.features // 3
            self.add(op="attention", x=x, y=None, z=None, heads=heads, kv=heads, head_dim=features // heads,
                     fused=True, **options)  # fmt: skip
        elif t.place == WHOLE:
            group, head_dim, kv = self.group(), self.pick(4, 8, 5, 16), self.unit
            heads = kv * self.pick(1, 2)
            fixed = dict(stride=1, group=group, gather_output=False, late_stride=False)
            numbers = []
            for name, size in (("q", heads), ("k", kv), ("v", kv)):
                # the gradient of a bias of the keys is a sum that cancels, of which no digit is right
                bias = {"bias": False} if name == "k" else {}
                number = self.linear(t, "column", out=size * head_dim, **fixed, **bias)
                self.call(number, x)
                numbers.append(len(self.types) - 1)
            q, k, v = numbers
            self.add(op="attention", x=q, y=k, z=v, heads=heads, kv=kv, head_dim=head_dim, fused=False, **options)

    def do_cross_entropy(self, x, t):
        """Of logits: these, or what an output layer that is tied to the embedding makes of a whole value."""
        tables = [
            i for i, layer in enumerate(self.layers)
            if layer["kind"] == "embedding" and layer["features"] == t.features and t.place == WHOLE
        ]  # fmt: skip
        size = None
        if tables and self.rarely(1):
            table = self.layers[self.pick(*tables)]
            padded = -(-table["size"] // table["multiple"]) * table["multiple"]
            number = self.linear(
                t, "column", out=padded, stride=1, group=table["group"], gather_output=False, late_stride=False,
                via="init", fuse=False, return_bias=False,
            )  # fmt: skip
            layer = self.layers[number]
            layer |= {"tied": self.layers.index(table), "replace": None, "copied": False}
            table["replace"], table["copied"] = None, False
            self.call(number, x)
            x, size = len(self.types) - 1, table["size"]
            t = self.types[x]
        if t.place[0] == "features" and t.place[2] != 1:
            return
        size = size or t.features - self.pick(0, 1, 2)
        if size < 1:
            return
        self.add(
            op="cross_entropy", x=x, size=size, group=t.place[1], reduction=self.pick("mean", "sum", "none"),
            label_smoothing=self.pick(0.0, 0.1), z_loss=self.pick(0.0, 0.01), ignore_index=self.pick(-100, 0),
            ignores=self.rarely(2),
        )  # fmt: skip

    def finish(self):
        last = len(self.types) - 1
        return {
            "seed": self.draw(st.integers(0, 99)),
            "dtype": self.dtype, "values": self.values, "degrees": list(self.degrees), "layers": self.layers,
            "ops": self.ops, "dropped": [last] if len(self.types) > 3 and self.rarely(15) else [],
            "cotangent": self.pick("random", "sum", "restrided"),
            "micro_batches": self.pick(1, 2), "steps": 2,
            "optimizer": self.pick("sgd", "adamw", "momentum") if self.dtype == "float32" else "sgd",
            "max_norm": self.pick(1.0, 1e-3, 1e6), "norm_type": self.pick(2.0, 2.0, 2.0, math.inf),
            "twice": self.may("a parameter twice", 9),
            "keep": self.pick(0, 0, 2), "ahead": not self.rarely(3), "check": self.rarely(5),
        }  # fmt: skip


@st.composite
def programs(draw, without=(), most=12, degrees=None):
    """Programs of up to `most` operations after the first input, for these degrees or drawn ones."""
    builder = _Builder(draw, frozenset(without), degrees)
    builder.start()
    if builder.rarely(3):
        builder.start()
    for _ in range(draw(st.integers(1, most))):
        builder.step()
    return builder.finish()


# --- ranks that drift apart -----------------------------------------------------------------------------------------

DRIFTS = ("order", "data", "plain norm")


@st.composite
def drifting(draw, kind):
    """Programs in which one rank does something else than the others, which every rank must be told.

    "order": it calls two layers of one shape in another order. "data": it has another input, so that the gradients of
    whole parameters differ. "plain norm": torch's own norm, which sees a rank's own tokens only, on every rank.
    """
    without = frozenset(["mixed groups", "zero tokens", "replaced parameters", "checkpoint"])
    builder = _Builder(draw, without, (draw(st.sampled_from([2, 3])),))
    builder.values, builder.dtype, builder.tokens = "normal", "float32", (2 * builder.unit, 3)
    features = builder.size()
    builder.add(
        op="input", tokens=list(builder.tokens), features=features, layout="plain", place=list(WHOLE), grad=True
    )
    for _ in range(draw(st.integers(0, 3))):
        builder.step()
    drift = {"kind": kind, "rank": draw(st.integers(0, builder.unit - 1))}
    fixed = dict(frozen=[], fuse=False, tied=None, replace=None, copied=False, late_stride=False)
    t = builder.types[0]
    if kind == "order":
        mode = draw(st.sampled_from(["column", "row", "column gathered"]))
        first = builder.linear(t, mode.split()[0], group="world", out=features, **fixed)
        builder.layers[first] |= fixed | {"gather_output": "gathered" in mode}
        builder.layers.append({**builder.layers[first]})
        drift["layers"] = [first, first + 1]
        for number in drift["layers"]:
            builder.call(number, 0)
            builder.ops[-1]["prefetch"] = False
    elif kind == "data":
        x = builder.add(op="gain", x=0)  # whole, and its gradient goes by the data
        builder.add(op="add", x=x, y=x)
        x = builder.linear(t, "column", group="world", **fixed)
        builder.layers[x] |= fixed | {"norm": None, "bias": True}
        builder.call(x, len(builder.types) - 1)
        y = builder.linear(builder.types[-1], "row", **fixed)
        builder.layers[y] |= fixed | {"bias": True}
        builder.call(y, len(builder.types) - 1)
    else:
        x = builder.add(op="scatter", x=0, group="world", dim=0)
        builder.add(op="plain norm", x=x)
    program = builder.finish()
    fixed = {"dropped": [], "max_norm": 1.0, "norm_type": 2.0, "twice": False, "cotangent": "random"}
    return {**program, **fixed, "drift": drift}
