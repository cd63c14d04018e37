"""Errors: one root, figures in attributes, and context added to a sharding's error."""

from __future__ import annotations

import inspect

import pytest

from reshard import errors
from reshard.errors import (
    BudgetError,
    LayoutError,
    MeshError,
    NamedErrors,
    ProofError,
    ReshardError,
    about_sharding,
)

ALL = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if kind.__module__ == "reshard.errors" and kind is not NamedErrors
]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_is_a_reshard_error_and_a_value_error(kind: type[Exception]):
    assert issubclass(kind, ReshardError) and issubclass(kind, ValueError)
    assert kind.__doc__


def test_errors_that_carry_more_than_text():
    assert BudgetError("budget 3", 7).smallest == 7
    assert ProofError("wrong", {"x": 2}).counterexample == {"x": 2}
    assert str(BudgetError("budget 3", 7)) == "budget 3"


def test_named_errors_keep_their_class_and_what_they_carry():
    with pytest.raises(BudgetError, match=r"^w: too small$") as small, NamedErrors("w"):
        raise BudgetError("too small", 64)
    assert small.value.smallest == 64 and small.value.__suppress_context__
    with pytest.raises(ProofError, match=r"^second: wrong$") as wrong, NamedErrors() as at:
        for at.name in ("first", "second"):
            if at.name == "second":
                raise ProofError("wrong", {"x": 2})
    assert wrong.value.counterexample == {"x": 2}
    with pytest.raises(LayoutError, match=r"^as it is$"), NamedErrors():
        raise LayoutError("as it is")
    with pytest.raises(ZeroDivisionError), NamedErrors("w"):
        raise ZeroDivisionError


@pytest.mark.parametrize("kind", [MeshError, LayoutError])
def test_about_sharding_adds_the_text_and_the_shape(kind: type[ReshardError]):
    with pytest.raises(kind) as caught, about_sharding("P('z')", [8, 4]):
        raise kind("unknown axis 'z'")
    assert str(caught.value) == "sharding \"P('z')\" of an array of global shape (8, 4): unknown axis 'z'"
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_about_sharding_shortens_long_text():
    with pytest.raises(LayoutError) as caught, about_sharding("x" * 1000, ()):
        raise LayoutError("too long")
    assert f"'{'x' * 197}...'" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_about_sharding_leaves_other_errors_alone():
    with pytest.raises(ZeroDivisionError), about_sharding("P()", ()):
        raise ZeroDivisionError
    with about_sharding("P()", ()):
        pass


def test_a_long_message_keeps_its_beginning_and_its_end():
    message = str(LayoutError(f"layout {'x' * 9000}; write it so"))
    assert len(message) < 4100 and message.startswith("layout x") and message.endswith("x; write it so")
