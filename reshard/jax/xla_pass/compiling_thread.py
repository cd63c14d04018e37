"""Compilations that the pass starts while XLA is compiling, each in a thread of its own.

XLA calls the pass with their modules, too, in the thread that compiles them. So each thread carries a mark, by which
the pass knows what such a module is for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Mark = TypeVar("Mark")
Result = TypeVar("Result")


class CompilingThread(Generic[Mark]):
    """Threads that compile for one purpose, and say so by a mark.

    >>> threads = CompilingThread[str]("example")
    >>> threads.run("a mark", lambda: threads.mark), threads.mark
    ('a mark', None)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._local = threading.local()

    @property
    def mark(self) -> Mark | None:
        """The mark of the thread that asks; None if it is another one."""
        return getattr(self._local, "mark", None)

    def run(self, mark: Mark, work: Callable[[], Result]) -> Result:
        """Runs in a new thread, where neither the caller's jax contexts nor its meshes hold; raises what it raises."""
        results: list[Result] = []
        errors: list[Exception] = []

        def marked() -> None:
            self._local.mark = mark
            try:
                results.append(work())
            except Exception as error:  # XLA's errors have no class of their own.
                errors.append(error)

        thread = threading.Thread(target=marked, name=self._name)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]
