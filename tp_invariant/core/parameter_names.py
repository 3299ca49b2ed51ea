"""How errors name a parameter: the same wherever it is met."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def name_parameters(named: Iterable[tuple[str, Tensor]]) -> None:
    """Stores on each parameter its name in the model, for errors of functions that get parameters alone."""
    for name, parameter in named:
        parameter.name_in_model = name  # type: ignore[attr-defined]


def label_of(parameter: Tensor, number: int) -> str:
    """ "layers.0.weight (parameter 3)", or "parameter 3" where its name in the model is unknown.

    number: its first place, from 0, in the list that was handed over; of an optimizer over all its param_groups, as in
        its state_dict().
    """
    name = getattr(parameter, "name_in_model", None)
    return f"parameter {number}" if name is None else f"{name} (parameter {number})"
