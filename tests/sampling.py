"""Parameters of long families of tests: a few run always, the rest only in a full run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import pytest


def sampled(values: Sequence[Any], *fast: Any, rest: pytest.MarkDecorator = pytest.mark.slow) -> list[Any]:
    """The values as parameters, tuples as one parameter per item; all except those in `fast` are marked `rest`."""
    assert all(value in values for value in fast), fast
    return [value if value in fast else _marked(value, rest) for value in values]


def _marked(value: Any, mark: pytest.MarkDecorator) -> Any:
    items = value if type(value) is tuple else (value,)
    return pytest.param(*items, marks=mark)


def sampled_by_name(values: Sequence[Any], *fast: str, rest: pytest.MarkDecorator = pytest.mark.slow) -> list[Any]:
    """The same for values that have a `name`, with their names as ids."""
    names = [value.name for value in values]
    assert all(name in names for name in fast), fast
    marks = {name: () if name in fast else (rest,) for name in names}
    return [pytest.param(value, id=value.name, marks=marks[value.name]) for value in values]


def few_or_all(few: int, every: int) -> list[Any]:
    """How many random cases one test looks at, as parameters: a few always, all of them in a sweep."""
    return [few, pytest.param(every, marks=pytest.mark.sweep)]


def for_each(cases: Iterable[Any]) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """One test of all cases, where each takes less than pytest takes to begin and report one of its own."""

    def repeat(test: Callable[[Any], None]) -> Callable[[], None]:
        @wraps(test)
        def run() -> None:
            for case in cases:
                try:
                    test(case)
                except BaseException as error:
                    error.add_note(f"in the case {case!r}")
                    raise

        del run.__wrapped__  # Where pytest would look for fixtures.
        return run

    return repeat
