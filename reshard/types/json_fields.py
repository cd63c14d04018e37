"""Fields of objects in JSON, each of the type that its reader wants: `true` is not 1, and neither is 1.0.

{"steps": [{"kind": "slice", "parts": true}]}      this is not a plan in JSON (step 1: parts is True, not a whole
                                                   number); use the output of to_json()
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeVar, cast

from reshard.errors import PlanError, quoted, shortened

T = TypeVar("T")

_REQUIRED: Any = object()
_CURE = "use the output of to_json()"
_WORDS: Mapping[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    NoneType: "null",
}


@dataclass(frozen=True)
class Fields:
    """An object in JSON: `what` the whole text is, such as "a plan", and `place` is where in it this object stands.

    `cure` is what an error tells the caller to do.

    >>> step = Fields.read('{"kind": "slice", "parts": 2}', "a step")
    >>> step.get("kind", str), step.get("parts", int), step.get("relay", bool, default=False)
    ('slice', 2, False)
    >>> step.get("parts", str)
    Traceback (most recent call last):
    reshard.errors.PlanError: this is not a step in JSON (parts is 2, not text); use the output of to_json()
    """

    data: Mapping[str, Any]
    what: str
    place: str = ""
    cure: str = _CURE

    @classmethod
    def read(cls, text: object, what: str, cure: str = _CURE) -> Fields:
        """The object that a text in JSON has; raises `PlanError` for any other text."""
        if isinstance(text, dict):
            raise _field_error(what, "it is a dict", f"{cure}, which json.dumps makes of a dict")
        try:
            data = json.loads(cast("str", text))
        except (TypeError, ValueError, RecursionError) as error:
            # ValueError: not JSON, not UTF-8, or a number too long to read. RecursionError: brackets nested too deep.
            raise _field_error(what, f"{type(error).__name__}: {shortened(str(error))}", cure) from None
        return cls.of(data, what, cure=cure)

    @classmethod
    def of(cls, data: object, what: str, place: str = "", cure: str = _CURE) -> Fields:
        """The same for data that were read before."""
        if not isinstance(data, dict):
            raise _field_error(what, f"{place or 'it'} is {quoted(data)}, not an object", cure)
        return cls(cast("dict[str, Any]", data), what, place, cure)

    def get(self, name: str, *kinds: type[T], default: T = _REQUIRED) -> T:
        """A field of one of these types exactly; `default` if it is missing."""
        value = self.data.get(name, default)
        if value is _REQUIRED:
            raise self.error(f"{name} is missing")
        if name in self.data and type(value) not in kinds:
            raise self.error(f"{name} is {quoted(value)}, not {' or '.join(_WORDS[kind] for kind in kinds)}")
        return value

    def object(self, name: str) -> Mapping[str, Any]:
        """A field that is an object itself."""
        return cast("dict[str, Any]", self.get(name, dict))

    def listed(self, name: str, kind: type[T]) -> Sequence[T]:
        """A field that is a list of one type."""
        items = cast("list[Any]", self.get(name, list))
        for number, item in enumerate(items, 1):
            if type(item) is not kind:
                raise self.error(f"item {number} of {name} is {quoted(item)}, not {_WORDS[kind]}")
        return items

    def objects(self, name: str, each: str) -> Sequence[Fields]:
        """A field that is a list of objects; `each` says what one is."""
        items = cast("list[Any]", self.get(name, list))
        places = (f"{self._inside}{each} {number}" for number in range(1, len(items) + 1))
        return [Fields.of(item, self.what, place, self.cure) for item, place in zip(items, places, strict=True)]

    def error(self, why: str) -> PlanError:
        """The error that says where this object stands, and why it cannot be read."""
        return _field_error(self.what, f"{self._inside}{why}", self.cure)

    @property
    def _inside(self) -> str:
        return f"{self.place}: " if self.place else ""


def same_json(given: object, made: object) -> bool:
    """Whether JSON says what was made, type for type; only a number with a fraction may be written without one.

    >>> same_json(1, 1), same_json(True, 1), same_json(1.0, 1), same_json(1, 1.0), same_json({"x": [True]}, {"x": [1]})
    (True, False, False, True, False)
    """
    if isinstance(made, float):
        return type(given) in (int, float) and given == made
    if type(given) is not type(made) or given != made:
        return False
    if isinstance(made, dict):
        items = cast("dict[str, object]", made)
        return all(same_json(cast("dict[str, object]", given)[name], value) for name, value in items.items())
    if isinstance(made, list):
        return all(map(same_json, cast("list[object]", given), cast("list[object]", made)))
    return True


def _field_error(what: str, why: str, cure: str) -> PlanError:
    return PlanError(f"this is not {what} in JSON ({why}); {cure}")
