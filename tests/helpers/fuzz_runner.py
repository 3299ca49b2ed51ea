"""Runs many programs on the pool's ranks and says of each what differs: from TP=1 byte for byte, and from float64.

The rule for float64: of every tensor of the first step (outputs, gradients, their norm, clipped gradients) the
norm-wise error is at most ALLOWED times that of the same model whose every operation is rounded once, as torch's own
layers do in that dtype, or at most FLOOR roundings of the dtype. Left out are tensors that are not finite in either,
and those of which that model has hardly a digit right (a gradient that is a sum which cancels): it errs by over NOISE.
"""

import contextlib
import dataclasses
import functools
import json
import math
import time

import torch
from fuzz_context import run_context
from fuzz_runtime import refer, run
from fuzz_source import compiled, layers_source, run_options, script, torch_source
from hypothesis import HealthCheck, Phase, given, seed, settings

import tp_invariant as tpi

ALLOWED = 4.0
FLOOR = {"float32": 32.0, "float16": 4.0, "bfloat16": 4.0}
NOISE = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.1}
SHRINK_SECONDS = 120.0  # for as long a failing program is made smaller


# --- on ranks -------------------------------------------------------------------------------------------------------


def _digests(results):
    return {name: None if tensor is None else tpi.testing.digest(tensor) for name, tensor in results.items()}


def layouts_of(program):
    """Each (cp, tp)."""
    return [tuple(layout) for layout in program.get("layouts", [(1, degree) for degree in program["degrees"]])]


def _run(group, program, mode, device="cpu", layout=(1, 1)):
    case = compiled(layers_source(program), "case")
    if "layouts" in program:
        return run_context(case, layout, program, mode, run_options(program))
    return run(group, case, mode=mode, device=device, **run_options(program))


def at_degree(tp_group, programs, mode, device, tensors=False, layout=(1, 1)):
    """Each program on this rank: {name: digest}, or with `tensors` the tensors."""
    found = []
    for program in programs:
        try:
            results = _run(tp_group, program, mode, device, layout)
        except Exception as error:
            raise type(error)(f"{error}\nin the program {json.dumps(program)}") from error
        found.append(results if tensors else _digests(results))
    return found


@dataclasses.dataclass
class Alone:
    """One process's results of a program: TP=1's digests with the mode on and off, and the errors."""

    on: dict
    off: dict
    errors: dict  # name: (ours, that of one rounding an operation)
    error: str = ""


def alone(tp_group, programs, device, with_errors=True, with_control=True):
    """Every size-th program, starting at this rank's number."""
    import torch.distributed as dist

    rank, size = dist.get_rank(tp_group), dist.get_world_size(tp_group)
    found = {}
    for index in range(rank, len(programs), size):
        program = programs[index]
        try:
            results = _run(None, program, True, device)
            errors = errors_of(program, results) if with_errors else {}
            stock = _digests(_run(None, program, False, device)) if with_control else {}
            found[index] = Alone(_digests(results), stock, errors)
        except Exception as error:
            found[index] = Alone({}, {}, {}, f"TP=1: {type(error).__name__}: {error}")
    return found


def errors_of(program, results):
    """{name: (error of `results` against float64, that of the model with one rounding an operation)}, norm-wise."""
    reference = compiled(torch_source(program), "reference")
    exact = refer(reference, **run_options(program), exact=True)
    rounded = refer(reference, **run_options(program), exact=False)
    errors = {}
    # squares in fp32, as in torch's own norm: beyond these it is 0 or inf, and clipping goes by it
    norm_fits = 1e-18 < exact["norm step 0"] < 1e18
    for name, want in exact.items():
        if name.startswith(("norm ", "clipped ")) and not norm_fits:
            continue
        got, other = results[name], rounded[name]
        if want is None or got is None:
            # a main_grad that nothing was added to is zero where autograd has no gradient at all
            one = got if want is None else want
            if one is not None and one.any():
                errors[name] = (float("inf"), 0.0)
            continue
        if got.shape != want.shape:
            errors[name] = (float("inf"), 0.0)
            continue
        scale = want.norm()
        if not (torch.isfinite(want).all() and torch.isfinite(other).all()) or not 1e-30 < scale < 1e30:
            continue
        errors[name] = tuple(float((t.double() - want).norm() / scale) for t in (got, other))
        if name.startswith("clipped "):
            # a quotient, in which the errors of the gradient and of the norm cancel by chance
            both = (errors.get(of, (0.0, 0.0))[1] for of in (name.removeprefix("clipped "), "norm step 0"))
            errors[name] = errors[name][0], max(errors[name][1], sum(both))
    return errors


# --- here -----------------------------------------------------------------------------------------------------------


def wrong(program, errors):
    """The tensors that are further from float64 than the rule allows."""
    eps = torch.finfo(getattr(torch, program["dtype"])).eps
    return [
        f"TP=1, {name}: relative error {ours:.1e} against float64, where one rounding an operation has {other:.1e}"
        for name, (ours, other) in errors.items()
        if other < NOISE[program["dtype"]] and not ours <= max(ALLOWED * other, FLOOR[program["dtype"]] * eps)
    ]


@dataclasses.dataclass
class Counts:
    """How much a run of the fuzzer compared."""

    programs: int = 0
    tensors: int = 0  # compared with TP=1, on every rank and degree
    off: int = 0  # programs whose bits differ somewhere with the mode off
    compared: int = 0  # tensors compared with float64

    def __str__(self):
        return (
            f"{self.programs} composed models, {self.tensors:,} tensors compared with TP=1's and {self.compared:,} "
            f"with float64; with the mode off {self.off} of {self.programs} models differ"
        )


def check(programs, device="cpu", counts=None):
    """The problems of each program: a list of sentences, empty if there are none."""
    counts = Counts() if counts is None else counts
    problems = [[] for _ in programs]
    ranks = functools.partial(tpi.testing.run_ranks, device=device, timeout=300.0 + 5.0 * len(programs))
    single = {}
    most = max(math.prod(layout) for p in programs for layout in layouts_of(p))
    for found in ranks(alone, most, programs, device, device == "cpu"):
        single |= found
    for index, program in enumerate(programs):
        one = single[index]
        problems[index] += [one.error] if one.error else wrong(program, one.errors)
        counts.programs += 1
        counts.compared += len(one.errors)
    off = set()
    for layout in sorted({layout for p in programs for layout in layouts_of(p)}):
        degree, where = math.prod(layout), f"TP={layout[1]}" if layout[0] == 1 else f"cp, tp = {layout}"
        at_layout = functools.partial(at_degree, layout=layout)
        here = [i for i, p in enumerate(programs) if layout in layouts_of(p) and not single[i].error]
        if not here:
            continue
        for rank, results in enumerate(ranks(at_layout, degree, [programs[i] for i in here], True, device)):
            for index, result in zip(here, results, strict=True):
                counts.tensors += len(result)
                want = single[index].on
                differ = [name for name in want if result.get(name) != want[name]]
                if differ or result.keys() != want.keys():
                    problems[index].append(
                        f"rank {rank} of {where} differs from TP=1 in {len(differ)} of {len(want)} tensors, first "
                        f"in {', '.join(differ[:3])}"
                    )
        last = [i for i in here if "layouts" in programs[i] or layout == max(layouts_of(programs[i]))]
        for index, result in zip(
            last, ranks(at_layout, degree, [programs[i] for i in last], False, device)[0], strict=True
        ):
            if result != single[index].off:
                off.add(index)
    counts.off += len(off)
    return problems


def _key(program):
    return json.dumps(program, sort_keys=True)


class _Enough(Exception):
    """As many programs have been drawn as were requested."""


def _draws(count):
    """How often hypothesis must draw to give `count` different programs, since it repeats some."""
    return 3 * count + 20


def collect(strategy, count, number):
    """The programs that hypothesis draws, each once; the same for the same seed."""
    found = {}

    @seed(number)
    @settings(_SETTINGS, max_examples=_draws(count), phases=[Phase.generate], report_multiple_bugs=False)
    @given(strategy)
    def draw(program):
        found.setdefault(_key(program), program)
        if len(found) >= count:
            raise _Enough

    with contextlib.suppress(_Enough):
        draw()
    return list(found.values())


_SETTINGS = settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))


class Found(AssertionError):
    """A program that differs: `program`, shrunk, and as `script`."""

    def __init__(self, text, program, script):
        super().__init__(text)
        self.program, self.script = program, script


def _alone(program, device, check):
    """What is wrong with one program, errors of ranks among it."""
    try:
        return check([program], device, None)[0]
    except tpi.testing.RankError as error:
        return [str(error)]


def fuzz(strategy, count, number, device="cpu", batch=25, check=check, script=script, counts=None):
    """Draws up to `count` programs and checks them; the counts of what was compared.

    Args:
        check: check(programs, device, counts) -> for each program what is wrong with it.
        script: script(program) -> its source.

    Raises:
        Found: a program that differs, shrunk.
    """
    counts = Counts() if counts is None else counts
    programs = collect(strategy, count, number)
    for start in range(0, len(programs), batch):
        some = programs[start : start + batch]
        try:
            found = check(some, device, counts)
        except tpi.testing.RankError:  # the others of the batch were lost with it
            found = [_alone(program, device, check) for program in some]
        failed = [program for program, problems in zip(some, found, strict=True) if problems]
        if failed:
            program, problems = shrunk(strategy, count, number, failed, device, check)
            text = "\n".join([*problems, f"and {len(failed) - 1} more of {len(some)} programs"])
            raise Found(text, program, script(program))
    return counts


def shrunk(strategy, count, number, failed, device, check):
    """(the smallest program that hypothesis finds from one of `failed`, its problem).

    The same programs are drawn once more; those without a problem are not run again.
    """
    known = {_key(program) for program in failed}
    last = {}
    deadline = time.monotonic() + SHRINK_SECONDS

    @seed(number)
    @settings(_SETTINGS, max_examples=_draws(count), phases=[Phase.generate, Phase.shrink], report_multiple_bugs=False)
    @given(strategy)
    def again(program):
        if (not last and _key(program) not in known) or time.monotonic() > deadline:
            return
        problems = _alone(program, device, check)
        if problems:
            last["program"], last["problems"] = program, problems
            raise AssertionError("differs")

    with contextlib.suppress(Exception):  # hypothesis' own of a test that is flaky, once the time is over
        again()
    if not last:
        return failed[0], ["differs only after the programs before it"]
    return last["program"], last["problems"]


# --- ranks that drift apart -----------------------------------------------------------------------------------------


def drift_on_rank(tp_group, program):
    """The error of this rank, as text; None if it trains on without one."""
    try:
        _run(tp_group, program, True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def drift_outcome(program):
    """The problem of a program whose ranks make different calls; None if every rank gets an error."""
    try:
        errors = tpi.testing.run_ranks(drift_on_rank, program["degrees"][0], program, device="cpu", timeout=120.0)
    except tpi.testing.RankError as error:
        return f"no error on some ranks, which wait: {str(error)[:200]}"
    silent = [rank for rank, error in enumerate(errors) if error is None]
    return f"no error on ranks {silent}" if silent else None
