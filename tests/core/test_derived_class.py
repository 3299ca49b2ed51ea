"""Classes derived from a module's own: names, copies, pickles, torch.save, signatures, and one class for equal ones."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from tp_invariant.core.derived_class import derived_class


class Own(nn.Linear):
    """A user's class."""

    def forward(self, x, scale=1.0):
        return super().forward(x) * scale


class WithState(Own):
    def __getstate__(self):
        return {**self.__dict__, "pickled": True}


class CopiesItself(Own):
    def __deepcopy__(self, memo):
        twin = CopiesItself(self.in_features, self.out_features)
        twin.load_state_dict(self.state_dict())
        twin.copied = True
        return twin


class Doubled(nn.Module):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) * 2


class Shifted(nn.Module):
    @staticmethod
    def class_attributes(by):
        return {"by": by}

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) + self.by


def derived(kind=Own):
    torch.manual_seed(0)
    module = kind(4, 4)
    module.__class__ = derived_class(type(module), Doubled)
    module.__class__ = derived_class(type(module), Shifted, 3)
    return module


def saved(module, tmp_path):
    torch.save(module, tmp_path / "module.pt")
    return torch.load(tmp_path / "module.pt", weights_only=False)


@pytest.mark.parametrize("kind", [Own, WithState, CopiesItself])
def test_copies_and_pickles(kind, tmp_path):
    module, x = derived(kind), torch.ones(2, 4)
    expected = nn.functional.linear(x, module.weight, module.bias) * 5.0 * 2 + 3
    for twin in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module)), saved(module, tmp_path)):
        assert type(twin) is type(module) and isinstance(twin, kind)
        assert torch.equal(twin(x, scale=5.0), expected)
        assert twin is module or twin.weight is not module.weight
    assert getattr(copy.deepcopy(module), "copied", False) == (kind is CopiesItself)
    assert getattr(copy.deepcopy(module), "pickled", False) == (kind is WithState)
    assert type(copy.deepcopy(nn.Sequential(module, module))[1]) is type(module)


def test_the_class_has_the_name_and_the_signature_of_the_former_one():
    module = derived()
    kind = type(module)
    assert (kind.__name__, kind.__qualname__, kind.__module__, kind.__doc__) == ("Own", "Own", __name__, Own.__doc__)
    assert inspect.signature(module.forward) == inspect.signature(Own(4, 4).forward)
    assert type(derived()) is kind, "one class for all"
    assert derived_class(Own, Shifted, 1) is not derived_class(Own, Shifted, 2)


def test_a_module_that_is_parametrized():
    before, after = Own(4, 4), derived()
    nn.utils.parametrizations.weight_norm(before)
    before.__class__ = derived_class(type(before), Doubled)
    nn.utils.parametrizations.weight_norm(after)
    for module in (before, after):
        twin = copy.deepcopy(module)
        assert type(twin) is type(module) and torch.equal(twin(torch.ones(2, 4)), module(torch.ones(2, 4)))
        with pytest.raises(RuntimeError, match="Serialization of parametrized modules"):
            pickle.dumps(module)


def test_torch_compile():
    modules = [derived(), derived()]
    compiled = [torch.compile(module, backend="eager", fullgraph=True) for module in modules]
    for module, fast in zip(modules, compiled, strict=True):
        assert torch.equal(fast(torch.ones(2, 4)), module(torch.ones(2, 4)))
