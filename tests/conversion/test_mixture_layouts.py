"""Whole mixtures of experts trained over ranks: tensor, expert, data and sequence parallelism have one rank's bytes.

By itself a few of the cases, for two steps. `pytest tests/conversion/test_mixture_layouts.py --all-cases` runs each
of seven families in each layout and with each kind of router for five steps, the control with the mode off, and the
comparison with transformers' own training.
"""

import functools

import mixture_layouts
import torch
from mixture_layouts import EXPERTS, FAMILIES, LAYOUTS, ROUTERS, SAMPLE, TABLE, TIED
from ranks import run_ranks

from tp_invariant.testing import assert_bitwise_equal


def pytest_generate_tests(metafunc):
    whole = metafunc.config.getoption("--all-cases")
    if "layout" in metafunc.fixturenames:
        cases = TABLE if whole else SAMPLE
        if "router" not in metafunc.fixturenames:
            cases = [case[:2] for case in cases if case[2] == ROUTERS[0]]
            cases = cases if whole else cases[-1:]
        names = ("family", "layout", "router")[: len(cases[0])]
        metafunc.parametrize(names, cases, ids=[", ".join(map(str, case)) for case in cases])
    elif "family" in metafunc.fixturenames:
        metafunc.parametrize("router", ROUTERS if whole else ROUTERS[1:2])
        metafunc.parametrize("family", FAMILIES)


@functools.cache
def on_one_rank(family, layout, router, steps, mode):
    return mixture_layouts.train(None, family, layout, router, steps, mode)


def alone(family, layout, router, mode=True, steps=mixture_layouts.STEPS):
    return on_one_rank(family, layout.alone, router, steps, mode)


def test_the_layouts_are_those_that_are_promised():
    assert {(layout.tp, layout.ep > 0) for layout in LAYOUTS if layout.dp == 1} == {
        (tp, by_expert) for tp in (2, 4, 8) for by_expert in (False, True)
    }
    assert {(layout.dp, layout.ep) for layout in LAYOUTS if layout.tp == 1} == {(2, 2), (4, 2), (4, 4)}
    assert {layout.ranks for layout in LAYOUTS if layout.tp == layout.dp == 2} == {4}
    assert {layout.ranks for layout in LAYOUTS} == {2, 4, 8}
    assert {family for family, _, _ in SAMPLE} == set(FAMILIES) and set(SAMPLE) <= set(TABLE)


def test_training_has_the_bytes_of_one_rank(family, layout, router, pytestconfig):
    """Logits, losses and norms of all steps, every gradient of the first and the last, and the parameters."""
    steps = mixture_layouts.STEPS if pytestconfig.getoption("--all-cases") else 2
    want, _ = alone(family, layout, router, steps=steps)
    for rank, (got, _) in enumerate(run_ranks(mixture_layouts.train, layout.ranks, family, layout, router, steps)):
        assert {f"norm {step}" for step in range(steps)} | {"gradients 0", "parameters"} <= got.keys()
        assert sum(name.startswith("logits") for name in got) * min(layout.dp, 4) == steps * (4 if layout.dp > 1 else 1)
        assert_bitwise_equal(got, {name: want[name] for name in got}, f"{family} on rank {rank} of {layout}, {router}")


def test_with_the_mode_off_the_bytes_depend_on_the_layout(family, layout):
    want, _ = alone(family, layout, ROUTERS[0], mode=False, steps=1)
    on, _ = alone(family, layout, ROUTERS[0], steps=1)
    for got, _ in run_ranks(mixture_layouts.train, layout.ranks, family, layout, ROUTERS[0], 1, False):
        gradients = got["gradients 0"]
        assert not all(torch.equal(grad, want["gradients 0"][name]) for name, grad in gradients.items())
        assert not all(torch.equal(grad, on["gradients 0"][name]) for name, grad in gradients.items())
        for name, grad in gradients.items():
            torch.testing.assert_close(grad, on["gradients 0"][name], rtol=1e-3, atol=1e-5)


def test_values_are_those_of_transformers(family, router):
    """The first step's, as near to the model in float64 as the model in float32."""
    layout = LAYOUTS[0]
    ours, counts = alone(family, layout, router, steps=1)
    exact, theirs = (
        mixture_layouts.train_by_transformers(family, router, dtype, 1, 1) for dtype in (torch.float64, torch.float32)
    )
    if router == "ties":
        assert (counts[:, TIED[2]] == 0).all() and (counts[:, TIED[0]] > 0).all() and (counts[:, TIED[1]] > 0).all()
    elif router == "one expert":
        assert (counts[:, 0] == counts.sum(1)).all()
    assert counts.shape[1] == EXPERTS
    first = {"logits": "logits 0 0", "loss": "loss 0 0"}
    for name in [*first, *exact["gradients 0"]]:
        got, value, near = (
            found[first[name]] if name in first else found["gradients 0"][name] for found in (ours, exact, theirs)
        )
        errors = [float((x.double() - value).norm()) for x in (got, near)]
        assert errors[0] <= max(2 * errors[1], 4e-6 * float(value.norm())), (name, errors)
    if router == ROUTERS[0]:
        five_steps_are_near(family)


def five_steps_are_near(family):
    """Of four micro-batches each, as with data parallelism. Rounding may move a token to another expert in between."""
    (layout,) = (layout for layout in LAYOUTS if (layout.dp, layout.ep) == (4, 4))
    ours, _ = alone(family, layout, ROUTERS[0])
    count, steps = mixture_layouts.MICRO_BATCHES, mixture_layouts.STEPS
    exact = mixture_layouts.train_by_transformers(family, ROUTERS[0], torch.float64, count, steps)
    for name, value in exact.items():
        if name.startswith(("loss", "norm")):
            torch.testing.assert_close(ours[name].double(), value.detach().double(), rtol=1e-4, atol=0.0, msg=name)
    untrained = mixture_layouts.build(family, ROUTERS[0], torch.float64)
    start = {name: parameter.detach() for name, parameter in untrained.named_parameters()}
    moved, off = (
        sum(float((found["parameters"][name].double() - other[name]).square().sum()) for name in start) ** 0.5
        for found, other in ((exact, start), (ours, exact["parameters"]))
    )
    assert off <= 1e-3 * moved, (off, moved)
