"""A griffe extension for the site: the examples in docstrings become blocks of Python, as they are not in Markdown."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^ *>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


def fenced(docstring: str) -> str:
    """The text with a fence around each example.

    >>> print(fenced("Adds.\\n\\n>>> 1 + 1\\n2"))
    Adds.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    return _EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}\n```", docstring)


class FencedExamples(Extension):
    """Fences the examples of every object."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called by griffe for each object that it has read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
