"""A program as the source of the functions that run it, and a failing one as a script that needs no test suite."""

import inspect
import json

import fuzz_runtime
from fuzz_programs import WHOLE, outputs, types


def _call(name, *args, **options):
    return f"{name}({', '.join([*map(str, args), *(f'{k}={v!r}' for k, v in options.items())])})"


# --- the model of this library's layers -----------------------------------------------------------------------------


def _group(name):
    return f"r.group({name!r})"


def expert_parameters(layer):
    """(name, full shape, the dim that is sharded, its stride, fan) of each parameter."""
    count, out, inner = layer["experts"], layer["in"], layer["inner"]
    up, rows = ("gate_up_proj", 2 * inner) if layer["gated"] else ("up_proj", inner)
    stride = 2 if layer["gated"] and not layer["interleaved"] else 1
    up_shape, down_shape = ((count, rows, out), 1), ((count, out, inner), 2)
    if layer["transposed"]:
        up_shape, down_shape = ((count, out, rows), 2), ((count, inner, out), 1)
    found = [(up, *up_shape, stride, out), ("down_proj", *down_shape, 1, inner)]
    if layer["bias"]:
        found += [(f"{up}_bias", (count, rows), 1, stride, 1), ("down_proj_bias", (count, out), None, 1, 1)]
    if layer["by_expert"]:
        found = [(name, shape, 0, 1, fan) for name, shape, _, _, fan in found]
    return found


def _layer_lines(number, layer, layers):
    """Builds layer `number` and gives its parameters their values."""
    name, kind, group = f"l{number}", layer["kind"], layer["group"]
    fixed = dict(dtype="r.dtype", device="r.device")
    specs = []  # key, shape, dim, fan, center
    strides = {} if kind != "linear" else dict.fromkeys(("weight", "bias"), layer["stride"])
    if kind == "linear":
        shape = [layer["out"], layer["in"]]
        dims = {"column": (0, 0), "row": (1, None), None: (None, None)}[layer["mode"]]
        specs.append(("weight", tuple(shape), dims[0], layer["in"], 0.0))
        if layer["bias"]:
            specs.append(("bias", (layer["out"],), dims[1], 1, 0.0))
        options = dict(
            parallel_mode=layer["mode"], sequence_parallel=layer["sp"], sequence_dim=layer["sequence_dim"],
            partition_stride=1 if layer["late_stride"] else layer["stride"], gather_output=layer["gather_output"],
            input_is_parallel=layer["input_is_parallel"], return_bias=layer["return_bias"],
            owner_map=layer["owner_map"], fuse_wgrad_accumulation=layer["fuse"],
        )  # fmt: skip
        defaults = dict(
            sequence_parallel=False, sequence_dim=0, partition_stride=1, gather_output=False, input_is_parallel=True,
            return_bias=False, owner_map="auto", fuse_wgrad_accumulation=False,
        )  # fmt: skip
        options = {k: v for k, v in options.items() if k not in defaults or defaults[k] != v}
        if layer["norm"]:
            center = -1.0 if layer["zero_centered"] else 0.0
            specs.append(("layer_norm_weight", (layer["in"],), None, 1, center + 1.0))
            if layer["norm"] == "LayerNorm":
                specs.append(("layer_norm_bias", (layer["in"],), None, 1, 0.0))
            options |= dict(
                normalization=layer["norm"], zero_centered_gamma=layer["zero_centered"],
                return_layernorm_output=layer["return_norm"],
                return_layernorm_output_gathered=layer["return_norm_gathered"],
            )  # fmt: skip
        text = _call("", **options)[1:-1]
        if layer["via"] == "from_linear":
            full = f"r.linear({name!r}, {layer['in']}, {layer['out']}, {layer['bias']})"
            lines = [f"{name} = tpi.Linear.from_linear({full}, tp_group={_group(group)}, {text})"]
        else:
            cls = "tpi.LayerNormLinear" if layer["norm"] else "tpi.Linear"
            sizes = f"{layer['in']}, {layer['out']}, bias={layer['bias']}"
            rest = f"dtype={fixed['dtype']}, device={fixed['device']}"
            lines = [f"{name} = {cls}({sizes}, tp_group={_group(group)}, {text}, {rest})"]
        if layer["late_stride"]:
            lines.append(f"{name}.weight.partition_stride = {layer['stride']}")
    elif kind == "norm":
        specs.append(("weight", (layer["features"],), None, 1, 0.0 if layer["zero_centered"] else 1.0))
        if layer["bias"]:
            specs.append(("bias", (layer["features"],), None, 1, 0.0))
        options = dict(normalization=layer["normalization"], bias=layer["bias"])
        if layer["zero_centered"]:
            options |= dict(zero_centered_gamma=True)
        if layer["sp"]:
            options |= dict(sequence_parallel=True, sequence_dim=layer["sequence_dim"])
        if layer["heads"]:
            options |= dict(heads=layer["heads"], heads_dim=1 if layer["transposed"] else layer["token_dims"])
        text = _call("", **options)[1:-1]
        lines = [
            f"{name} = tpi.ParallelNorm({layer['features']}, tp_group={_group(group)}, {text}, "
            f"dtype={fixed['dtype']}, device={fixed['device']})"
        ]
    elif kind == "experts":
        for key, shape, dim, stride, fan in expert_parameters(layer):
            specs.append((key, shape, dim, fan, 0.0))
            strides[key] = stride
        options = {k: layer[k] for k in ("bias", "gated", "activation", "interleaved", "transposed")}
        if layer["sp"]:
            options |= dict(sequence_parallel=True, sequence_dim=layer["sequence_dim"])
        stored = f"expert_parallel_group=r.stored_over({group!r}), " if layer["by_expert"] else ""
        lines = [
            f"{name} = tpi.Experts({layer['experts']}, {layer['in']}, {layer['inner']}, tp_group={_group(group)}, "
            f"{stored}{_call('', **options)[1:-1]}, dtype={fixed['dtype']}, device={fixed['device']})"
        ]
    else:
        rows = -(-layer["size"] // layer["multiple"]) * layer["multiple"]
        specs.append(("weight", (rows, layer["features"]), 0, 1, 0.0))
        options = dict(
            padding_idx=layer["padding_idx"], pad_vocab_to_multiple_of=layer["multiple"],
            sequence_parallel=layer["sp"], sequence_dim=layer["sequence_dim"],
        )  # fmt: skip
        lines = [
            f"{name} = tpi.VocabParallelEmbedding({layer['size']}, {layer['features']}, tp_group={_group(group)}, "
            f"{_call('', **options)[1:-1]}, dtype={fixed['dtype']}, device={fixed['device']})"
        ]
    for key, shape, dim, fan, center in specs:
        options = {}
        if dim is not None and group != "none":
            options |= dict(over=group, dim=dim, stride=strides.get(key, 1))
        if fan != 1:
            options["fan"] = fan
        if center:
            options["center"] = center
        if key in layer["frozen"]:
            options["frozen"] = True
        if kind == "embedding" and layer["size"] != shape[0]:
            options["rows"] = layer["size"]
        if key == "weight" and layer.get("fuse"):
            options["main_grad"] = True
        if layer["replace"]:
            options["replace"] = layer["replace"]
        if layer.get("via") == "from_linear":
            options["fill"] = False
        if key == "weight" and layer.get("tied") is not None:
            lines.append(f"{name}.weight = l{layer['tied']}.weight")
            options = dict(like=f"l{layer['tied']}.weight", frozen="weight" in layers[layer["tied"]]["frozen"])
        if key == "bias" and layer.get("tied") is not None:
            options.pop("replace", None)
        # a copy is made of a layer that has its values, and before any attribute is set on its parameters
        lines.append(_call("r.parameter", name, repr(key), repr(f"{name}.{key}"), shape, **options))
    if layer["copied"]:
        first = next(i for i, line in enumerate(lines) if line.startswith("r.parameter"))
        lines.insert(first, f"{name} = r.copied({name})")
    return lines


def _op_lines(op, new, t, made, program):
    """The lines of one operation that makes values new, new + 1, ..; t: the types of what it takes."""
    v, kind = f"v{new}", op["op"]
    x = f"v{op['x']}" if "x" in op else ""
    if kind == "input":
        options = {}
        if made[0].place[0] == "features":
            options = dict(over=made[0].place[1], dim=len(made[0].tokens), stride=made[0].place[2])
        elif made[0].place[0] == "tokens":
            options = dict(over=made[0].place[1], dim=made[0].place[2])
        return [_call(f"{v} = r.input", repr(v), made[0].tokens, op["features"], layout=op["layout"], grad=op["grad"],
                      **options)]  # fmt: skip
    if kind == "embedding":
        size = program["layers"][op["layer"]]["size"]
        return [f"{v} = l{op['layer']}(r.ids({v!r}, {made[0].tokens}, {size}))"]
    if kind == "call":
        layer, name = program["layers"][op["layer"]], f"l{op['layer']}"
        lines = [f"{name}.prefetch_weight()"] if op["prefetch"] else []
        if layer["kind"] == "experts":
            place = dict(over=layer["group"], dim=layer["sequence_dim"]) if layer["sp"] else {}
            chosen = _call("r.chosen", repr(f"choice of {v}"), t.tokens, layer["experts"], layer["chosen"], **place)
            x = f"{x}, *{chosen}"
        call = f"r.checkpoint({name}, {x})" if op["checkpoint"] else f"{name}({x})"
        if layer["kind"] == "norm" and layer["heads"]:
            return [*lines, f"{v} = r.heads({name}, {x}, {layer['features']}, {layer['transposed']})"]
        names = [v] + ["bias"] * bool(layer.get("return_bias")) + [f"v{new + 1}"] * bool(layer.get("return_norm"))
        lines.append(f"{', '.join(names)} = {call}")
        return [*lines, f"{v} = r.add_bias({v}, bias)"] if layer.get("return_bias") else lines
    if kind == "act":
        return [f"{v} = r.act({op['name']!r}, {x})"]
    if kind == "glu":
        return [f"gate, up = {x}.chunk(2, -1)", f"{v} = r.act({op['name']!r}, gate) * up"]
    if kind in ("add", "multiply"):
        return [f"{v} = {x} {'+' if kind == 'add' else '*'} v{op['y']}"]
    if kind in ("shift", "gain"):
        return [f"{v} = {x} {'+' if kind == 'shift' else '*'} p{new}"]
    if kind == "restride":
        return [f"{v} = restrided({x})"]
    if kind == "permute":
        return [f"{v} = {x}.transpose(0, 1)"]
    if kind == "flatten":
        return [f"{v} = {x}.flatten(0, -2)"]
    if kind in ("scatter", "gather"):
        return [f"{v} = {kind}_sequence({x}, {_group(op['group'])}, {op['dim']})"]
    if kind == "attention":
        qkv = f"*{x}.chunk(3, -1)" if op["fused"] else f"{x}, v{op['y']}, v{op['z']}"
        options = {k: op[k] for k in ("causal", "window", "softcap") if op[k] is not None}
        return [_call(f"{v} = r.attention", qkv, op["heads"], op["head_dim"], repr(t.place[1]), **options)]
    if kind == "cross_entropy":
        options = dict(vocab_size=op["size"], label_smoothing=op["label_smoothing"], ignore_index=op["ignore_index"],
                       reduction=op["reduction"], z_loss=op["z_loss"])  # fmt: skip
        ids = _target(v, t, op)
        text = _call("", **options)[1:-1]
        return [f"{v} = tpi.vocab_parallel_cross_entropy({x}, r.{ids}, tp_group={_group(op['group'])}, {text})"]
    if kind == "plain norm":
        return [f"{v} = n{new}({x})"]
    raise ValueError(f"unknown operation {kind!r}")


def _target(v, t, op):
    ignored = f", {op['ignore_index']}" if op["ignores"] else ""
    return f"ids('target of {v}', {t.tokens}, {op['size']}{ignored})"


def _place(t):
    if t.place[0] == "features":
        return dict(over=t.place[1], dim=len(t.tokens), stride=t.place[2])
    return dict(over=t.place[1], dim=t.place[2]) if t.place[0] == "tokens" else {}


def _walk(program):
    """(operation, number of its first value, type of its x, types that it makes) for each operation."""
    from fuzz_programs import types_after

    found = []
    for op in program["ops"]:
        made = types_after(op, found, program["layers"])
        yield op, len(found), found[op["x"]] if "x" in op else None, made
        found += made


def layers_source(program):
    """`def case(r)`: builds and trains the model of this library's layers on a fuzz_runtime.Run."""
    setup, forward = [], []
    layers = program["layers"]
    for number, layer in enumerate(layers):
        setup += _layer_lines(number, layer, layers)
    for op, new, t, made in _walk(program):
        if op["op"] in ("shift", "gain"):
            setup.append(f"p{new} = r.plain('p{new}', {t.features}, {0.0 if op['op'] == 'shift' else 1.0})")
        if op["op"] == "plain norm":
            setup.append(f"n{new} = r.plain_norm('n{new}', {t.features})")
        forward += _op_lines(op, new, t, made, program)
    drift = program.get("drift")
    if drift:
        setup.append(f"on_this_rank = r.rank_and_size('world') == ({drift['rank']}, r.rank_and_size('world')[1])")
        if drift["kind"] == "order":
            first, second = (f"l{n}" for n in drift["layers"])
            setup.append(f"{first}, {second} = ({second}, {first}) if on_this_rank else ({first}, {second})")
        if drift["kind"] == "data":
            forward.insert(0, "r.at += ' of another rank' * on_this_rank")
    found = types(program)
    for i in outputs(program):
        options = {} if found[i].place == WHOLE else _place(found[i])
        forward.append(_call("r.output", repr(f"v{i}"), f"v{i}", **options, cotangent=program["cotangent"]))
    train = {key: program[key] for key in ("steps", "micro_batches", "optimizer", "max_norm", "norm_type", "twice")}
    if drift:
        train["clip_over"] = "world"
    return "\n".join(
        [
            "def case(r):",
            *(f"    {line}" for line in setup),
            "",
            "    def forward():",
            *(f"        {line}" for line in forward),
            "",
            f"    with settings(keep={program['keep']}, ahead={program['ahead']}, check={program['check']}):",
            f"        {_train(train)}",
            "",
        ]
    )


def _train(options):
    return _call("r.train", "forward", **options).replace("=inf", "=math.inf")


# --- the model of torch's functions ---------------------------------------------------------------------------------


def torch_source(program):
    """`def reference(o)`: the unsharded model on a fuzz_runtime.Reference."""
    setup, forward = [], []
    for number, layer in enumerate(program["layers"]):
        setup += _torch_layer_lines(number, layer, program["layers"])
    for op, new, t, made in _walk(program):
        if op["op"] in ("shift", "gain"):
            setup.append(f"p{new} = o.plain('p{new}', {t.features}, {0.0 if op['op'] == 'shift' else 1.0})")
        forward += _torch_op_lines(op, new, t, made, program)
    forward += [_call("o.output", repr(f"v{i}"), f"v{i}", cotangent=program["cotangent"]) for i in outputs(program)]
    train = {key: program[key] for key in ("micro_batches", "max_norm", "norm_type")}
    return "\n".join(
        [
            "def reference(o):",
            *(f"    {line}" for line in setup),
            "",
            "    def forward():",
            *(f"        {line}" for line in forward),
            "",
            f"    {_train(train).replace('r.train', 'o.train')}",
            "",
        ]
    )


def _torch_layer_lines(number, layer, layers):
    lines = []

    def parameter(key, shape, fan=1, center=0.0, rows=None):
        options = dict(fan=fan, center=center, frozen=key in layer["frozen"])
        if rows is not None:
            options["rows"] = rows
        if key == "weight" and layer.get("tied") is not None:
            options["like"] = f"l{layer['tied']}.weight"
        lines.append(_call(f"l{number}_{key} = o.parameter", repr(f"l{number}.{key}"), shape, **options))

    if layer["kind"] == "linear":
        parameter("weight", (layer["out"], layer["in"]), layer["in"])
        if layer["bias"]:
            parameter("bias", (layer["out"],))
        if layer["norm"]:
            parameter("layer_norm_weight", (layer["in"],), center=0.0 if layer["zero_centered"] else 1.0)
            if layer["norm"] == "LayerNorm":
                parameter("layer_norm_bias", (layer["in"],))
    elif layer["kind"] == "norm":
        parameter("weight", (layer["features"],), center=0.0 if layer["zero_centered"] else 1.0)
        if layer["bias"]:
            parameter("bias", (layer["features"],))
    elif layer["kind"] == "experts":
        for key, shape, _, _, fan in expert_parameters(layer):
            parameter(key, shape, fan)
    else:
        rows = -(-layer["size"] // layer["multiple"]) * layer["multiple"]
        parameter("weight", (rows, layer["features"]), rows=layer["size"] if rows != layer["size"] else None)
    return lines


def _torch_op_lines(op, new, t, made, program):
    v, kind = f"v{new}", op["op"]
    x = f"v{op['x']}" if "x" in op else ""
    if kind == "input":
        return [_call(f"{v} = o.input", repr(v), made[0].tokens, op["features"], layout=op["layout"], grad=op["grad"])]
    if kind == "embedding":
        layer = program["layers"][op["layer"]]
        ids = f"o.ids({v!r}, {made[0].tokens}, {layer['size']})"
        return [f"{v} = o.embedding({ids}, l{op['layer']}_weight, {layer['padding_idx']})"]
    if kind == "call":
        layer, name = program["layers"][op["layer"]], f"l{op['layer']}"
        if layer["kind"] == "experts":
            chosen = _call("o.chosen", repr(f"choice of {v}"), t.tokens, layer["experts"], layer["chosen"])
            parameters = [f"{name}_{key}" for key, *_ in expert_parameters(layer)]
            options = {k: layer[k] for k in ("gated", "interleaved", "transposed", "activation")}
            return [_call(f"{v} = o.experts", x, f"*{chosen}", *parameters, **options)]
        bias = f"{name}_bias" if layer["bias"] else "None"
        if layer["kind"] == "norm":
            rms = layer["normalization"] == "RMSNorm"
            rest = f"{name}_weight, {bias}, 1e-6, {rms}, {layer['zero_centered']}"
            return [
                f"{v} = o.heads({x}, {layer['features']}, {rest})" if layer["heads"] else f"{v} = o.norm({x}, {rest})"
            ]
        lines = []
        if layer["norm"]:
            rms, z = layer["norm"] == "RMSNorm", layer["zero_centered"]
            beta = "None" if rms else f"{name}_layer_norm_bias"
            lines.append(f"normed = o.norm({x}, {name}_layer_norm_weight, {beta}, 1e-5, {rms}, {z})")
            x = "normed"
        if layer["return_bias"] and layer["bias"]:
            lines.append(f"{v} = o.call({x}, {name}_weight) + {bias}")
        else:
            lines.append(f"{v} = o.call({x}, {name}_weight, {bias})")
        return [*lines, f"v{new + 1} = normed"] if layer.get("return_norm") else lines
    if kind == "act":
        return [f"{v} = o.act({op['name']!r}, {x})"]
    if kind == "glu":
        return [f"gate, up = {x}.chunk(2, -1)", f"{v} = o.act({op['name']!r}, gate) * up"]
    if kind == "attention":
        qkv = f"*{x}.chunk(3, -1)" if op["fused"] else f"{x}, v{op['y']}, v{op['z']}"
        options = {k: op[k] for k in ("causal", "window", "softcap")}
        return [_call(f"{v} = o.attention", qkv, op["head_dim"], **options)]
    if kind == "cross_entropy":
        options = {k: op[k] for k in ("size", "label_smoothing", "ignore_index", "reduction", "z_loss")}
        return [_call(f"{v} = o.cross_entropy", x, f"o.{_target(v, t, op)}", **options)]
    if kind in ("scatter", "gather"):
        return [f"{v} = {x}"]
    return _op_lines(op, new, t, made, program)


# --- running, and writing down ---------------------------------------------------------------------------------------


def compiled(source, name):
    """The function `name` that `source` defines, among the runtime's names."""
    from tp_invariant.functional.regions import gather_sequence, scatter_sequence

    names = {**vars(fuzz_runtime), "gather_sequence": gather_sequence, "scatter_sequence": scatter_sequence}
    exec(compile(source, f"<{name} of a program>", "exec"), names)
    return names[name]


def run_options(program):
    return {key: program[key] for key in ("seed", "dtype", "values")}


_SHOW_ERRORS = """\
    exact = refer(reference, {options}, exact=True)
    for name, tensor in one.items():
        if exact.get(name) is not None and tensor is not None:
            off = (tensor.double() - exact[name]).norm() / exact[name].norm()
            print(f"TP=1, {{name}}: relative error {{off:.1e}}")
"""


def script(program, mode=True, why=""):
    """A program of its own that shows what the fuzzer saw: plain Python, of which the ranks are processes."""
    degrees = program["degrees"]
    options = ", ".join(f"{k}={v!r}" for k, v in run_options(program).items())
    return "\n".join(
        [
            f'"""{why}"""' if why else "",
            "",
            inspect.getsource(fuzz_runtime).split('"""', 2)[2].lstrip(),
            "import sys  # noqa: E402",
            "",
            "from tp_invariant.functional.regions import gather_sequence, scatter_sequence  # noqa: E402",
            "",
            f"PROGRAM = {json.dumps(json.dumps(program))}  # for fuzz_source.script",
            "",
            "",
            layers_source(program),
            "",
            torch_source(program) if not program.get("drift") else "",
            "",
            "def on_rank(tp_group):",
            f"    return run(tp_group, case, mode={mode}, {options})",
            "",
            "",
            'if __name__ == "__main__":',
            f"    one = run(None, case, mode={mode}, {options})",
            *([] if program.get("drift") else _SHOW_ERRORS.format(options=options).splitlines()),
            f"    for degree in () if '--one' in sys.argv else {degrees}:",
            "        for rank, found in enumerate(tpi.testing.run_ranks(on_rank, degree, device='cpu')):",
            "            for name in one:",
            "                try:",
            "                    tpi.testing.assert_bitwise_equal(found[name], one[name], name)",
            "                except AssertionError as error:",
            "                    print(f'TP={degree}, rank {rank}: {error}')",
            "",
        ]
    )
