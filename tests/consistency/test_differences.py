"""What ranks hold different values of, and how that is said."""

from tp_invariant.consistency.differences import differences, format_unnamed, format_values


def test_only_what_differs_is_found():
    found = differences([{"a": 1, "b": 8}, {"a": 1, "b": 16}, {"a": 1, "b": 8}])
    assert found == {"b": {8: [0, 2], 16: [1]}}
    assert format_values(found["b"]) == "8 on rank 0, 2; 16 on rank 1"
    assert format_unnamed(found["b"]) == "one value on rank 0, 2, another on rank 1"
    assert differences([{"a": 1}] * 3) == {}


def test_a_name_that_a_rank_does_not_have():
    assert differences([{}, {"a": 1}]) == {"a": {"nothing": [0], 1: [1]}}
