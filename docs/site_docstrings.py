"""A griffe extension for the site: the examples in docstrings become blocks of Python, as they are not in Markdown,
and a package's function hides the module of its name, as it does in Python.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Alias, Extension, Object

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
    """Fences the examples of every object, and shows functions in place of their modules."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called by griffe for each object that it has read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
        module, package = obj.parent, obj.parent and obj.parent.parent
        if (
            module is None
            or package is None
            or package.imports.get(obj.name) != f"{package.path}.{obj.name}.{obj.name}"
        ):
            return
        # `reshard.files.load` is imported from a module of that name, through which nothing is found from now on.
        for name, home in package.imports.items():
            if home.startswith(f"{module.path}."):
                package.members[name] = Alias(name, module.members[home.rpartition(".")[2]], parent=package)
