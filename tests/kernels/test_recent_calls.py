"""Earlier calls that are found by one check of all their tensors: by the same layouts, and by no others."""

import pytest
import torch

from tp_invariant.kernels import recent_calls
from tp_invariant.kernels.recent_calls import RecentCalls


def new(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


@pytest.fixture
def recent():
    assert recent_calls._tells_apart(), "this torch's check works here"
    return RecentCalls()


def test_a_call_of_the_same_layouts_is_found(recent):
    x, w = new(4, 8), torch.nn.Parameter(new(16, 8))
    assert recent.find("facts", (x, w)) is None
    recent.keep("facts", (x, w), "known", recent.now)
    assert recent.find("facts", (x, w)) == "known"
    assert recent.find("facts", (new(4, 8), torch.nn.Parameter(new(16, 8)))) == "known"
    assert recent.find("other facts", (x, w)) is None
    recent.clear()
    assert recent.find("facts", (x, w)) is None


OTHERS = {
    "longer": lambda: new(5, 8),
    "wider": lambda: new(4, 16),
    "transposed": lambda: new(8, 4).t(),
    "a slice of rows": lambda: new(4, 16)[:, :8],
    "one more dim": lambda: new(1, 4, 8),
    "another dtype": lambda: new(4, 8, dtype=torch.float16),
    "of as many bytes": lambda: new(4, 8, dtype=torch.int16),
    "negated by a flag": lambda: torch._neg_view(new(4, 8)),
    "with a gradient": lambda: new(4, 8).requires_grad_(),
    "a parameter": lambda: torch.nn.Parameter(new(4, 8), requires_grad=False),
    "off 16 bytes": lambda: new(40)[1:33].view(4, 8),
    "without memory": lambda: torch.empty(4, 8, dtype=torch.bfloat16, device="meta"),
    "no tensor": lambda: [0.0],
    "none": lambda: None,
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("place", (0, 1))
def test_another_one_is_not(recent, name, place):
    first = [new(4, 8), new(4, 8)]
    recent.keep("facts", first, "known", recent.now)
    others = [new(4, 8), new(4, 8)]
    assert recent.find("facts", others) == "known", "the control"
    others[place] = OTHERS[name]()
    assert recent.find("facts", others) is None
    assert recent.find("facts", [*first, new(4, 8)]) is None and recent.find("facts", first[:1]) is None


def test_memory_that_was_freed(recent):
    x, other = new(4, 8), new(4, 8)
    recent.keep("facts", (x,), "known", recent.now)
    other.untyped_storage().resize_(0)
    assert other.data_ptr() == 0 and recent.find("facts", (other,)) is None
    recent.keep("of the freed", (other,), "known", recent.now)
    assert recent.find("of the freed", (x,)) is None


def test_modes_of_torch(recent):
    x = new(4, 8)
    recent.keep("facts", (x,), "known", recent.now)
    with torch.inference_mode():
        assert recent.find("facts", (x,)) is None and recent.find("facts", (new(4, 8),)) is None
    with torch.no_grad():
        assert recent.find("facts", (x,)) == "known"
    found = []
    torch.vmap(lambda row: (found.append(recent.find("facts", (x,))), row)[1])(new(2, 8))
    assert found == [None]


def test_one_tensor_several_times(recent):
    x, y, out = new(4, 8), new(4, 8), new(4, 8)
    recent.keep("facts", (x, x, out), "the same twice", recent.now)
    assert recent.find("facts", (y, y, out)) == "the same twice"
    assert recent.find("facts", (x, y, out)) is None
    recent.keep("facts", (x, y, out), "three", recent.now)
    assert recent.find("facts", (y, out, x)) == "three" and recent.find("facts", (x, x, y)) == "the same twice"
    wide = new(4, 16)
    assert recent.find("facts", (wide, wide, out)) is None


def test_what_was_looked_up_before_a_clear_is_not_kept(recent):
    x, now = new(4, 8), recent.now
    recent.clear()  # in another thread
    recent.keep("facts", (x,), "stale", now)
    assert recent.find("facts", (x,)) is None
    recent.keep("facts", (x,), "known", recent.now)
    assert recent.find("facts", (x,)) == "known", "the control"


def test_defaults_of_a_program_are_of_no_matter():
    recent_calls._tells_apart.cache_clear()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            assert recent_calls._tells_apart()
    finally:
        torch.set_default_dtype(torch.float32)


def test_tensors_without_sizes(recent):
    nested = torch.nested.nested_tensor([new(2, 3), new(3, 2)])
    recent.keep("facts", (new(4, 8), new(4, 8)), "known", recent.now)
    assert recent.find("facts", (new(4, 8), nested)) is None


def test_which_are_none(recent):
    x, w = new(4, 8), new(4, 8)
    recent.keep("facts", (x, None, w), "middle", recent.now)
    assert recent.find("facts", (w, None, x)) == "middle"
    assert recent.find("facts", (x, w, None)) is None and recent.find("facts", (x, w)) is None
    recent.keep("facts", (x, w), "two", recent.now)
    assert recent.find("facts", (x, w)) == "two" and recent.find("facts", (x, None, w)) == "middle"


def test_sizes_that_change_all_the_time_take_no_place_at_every_call(recent):
    for rows in range(1, 200):
        recent.keep("facts", (new(rows, 8),), rows, recent.now)
    kept = [rows for rows in range(1, 200) if recent.find("facts", (new(rows, 8),)) is not None]
    assert len(kept) == recent_calls._MOST
    assert max(kept) > recent_calls._MOST, "but some come in, in time"


@pytest.mark.parametrize("broken", ("always true", "never true", "other arguments", "missing"))
def test_a_torch_whose_check_is_another(monkeypatch, broken):
    class Guards:
        def __init__(self, *tensors, **given):
            if broken == "other arguments":
                raise TypeError("another signature")

        def check(self, *tensors):
            return broken == "always true"

    monkeypatch.setattr(recent_calls, "TensorGuards", None if broken == "missing" else Guards)
    recent_calls._tells_apart.cache_clear()
    recent, x = RecentCalls(), new(4, 8)
    recent.keep("facts", (x,), "known", recent.now)
    assert recent.find("facts", (x,)) is None
    monkeypatch.undo()
    recent_calls._tells_apart.cache_clear()
    recent.keep("facts", (x,), "known", recent.now)
    assert recent.find("facts", (x,)) == "known", "the control"
