"""All errors that reshard raises. Each message names what was given, what is wrong with it, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Self

MOST_QUOTED = 200
"""The most characters of what was given that a message quotes."""

_MOST_ELEMENTS = 8  # Of an array with more, messages say dtype and shape.

MOST_MESSAGE = 4000
"""The most characters of a message: of a longer one, beginning and end are kept."""


class ReshardError(ValueError):
    """The base class of all errors of this package.

    >>> import reshard as rs
    >>> try:
    ...     rs.Mesh(x=0)
    ... except rs.errors.ReshardError as error:
    ...     print(error)
    axis 'x' has size 0: a size is a whole number of at least 1
    """

    def __init__(self, *given: object) -> None:
        # A message quotes names that may be of any length; its end says what to do.
        half = MOST_MESSAGE // 2
        parts = (
            f"{part[:half]} ... {part[-half:]}" if isinstance(part, str) and len(part) > MOST_MESSAGE else part
            for part in given
        )
        super().__init__(*parts)


class CallError(ReshardError, TypeError):
    """A call with an argument that the function does not have, or without one that it needs.

    The message shows the signature; give the arguments that it names.
    """


class MeshError(ReshardError):
    """An invalid mesh, axis or sub-axis, or two meshes that do not fit together.

    Compare the mesh with the axes that the layouts use; sizes are whole numbers of at least 1.
    """


class LayoutError(ReshardError):
    """A layout that breaks one of the invariants of `docs/reference/language.md`.

    The message names the dim and the rule; `docs/reference/language.md` has an example of each.
    """


class NotationError(ReshardError):
    """Text in one of the notations (that of reshard, JAX, Shardy, HLO) that does not parse.

    The message quotes the place; `docs/reference/cheat-sheet.md` has every notation.
    """


class StepError(ReshardError):
    """A step that the typing rule of its kind refuses.

    `rs.plan` makes steps that follow the rules; compare your own with those of its plan.
    """


class PlanError(ReshardError):
    """A request that is not a redistribution, or steps that do not lead from the source to the target.

    Source and target have one shape and dtype, unless `rs.Move` has a view, or `cast=True`.
    """


class NetworkError(ReshardError):
    """An incomplete network description, or one with values out of range.

    Take a preset, or give every axis of the mesh a `Link`; `reshard calibrate` measures one.
    """


class ProgramError(ReshardError):
    """A StableHLO program that does not parse or that the compiler pass cannot transform.

    Give a function that `jax.jit` takes, or the whole text of a module; the message says which place of it is wrong.
    """


class SpliceError(ReshardError):
    """A compiled module into which a fragment cannot be spliced; it is left as it was.

    Nothing is lost: the program runs as XLA compiled it.
    """


class StrictError(ReshardError):
    """In strict mode: a compiled module that still rebuilds an array or exceeds its budget.

    `reshard doctor` names the line; move there with `reshard.jax.redistribute`, or give more budget.
    """


class TileError(ReshardError):
    """Tiles given to a runtime that do not fit the source layout.

    Compare shapes and dtypes with `layout.tile_shape`; `layout.tiles(array)` cuts an array into right ones.
    """


class FileError(ReshardError):
    """A file that is not what it says, or is not there: names file, tensor and byte, what was found and expected.

    Look at the named file and byte; `rs.files.check` compares all of it with its checksums.
    """


class ChecksumError(FileError):
    """Bytes of a file that are not those that were saved.

    Fetch the file again, or load an older step.
    """


class MissingTensorError(FileError):
    """Tensors that a file does not have, or that no target takes.

    Compare the names with `rs.files.open(path)`; a table of `rs.names` maps names to names.
    """


class AgreementError(ReshardError):
    """Ranks called one collective operation with different requests; raised on all of them.

    Nothing has moved. The message says what differs; make the same call on all ranks.
    """


class VersionError(AgreementError):
    """An update that does not start from what is held: it was applied already, or one before it is missing.

    Apply the updates from the version that the message names, in their order, or move all of the array.
    """


class RankError(ReshardError):
    """A rank failed or did not answer in time while data were moving; raised on all other ranks.

    The message quotes what failed on the other rank. Sources are unchanged unless donated; all ranks go on from one
    place.
    """


class ProofError(ReshardError):
    """A plan's program is wrong. The numpy runtime confirmed `counterexample`, which says where.

    Mend the transfers if you made them. If `rs.plan` did, do not run the plan, and report the counterexample.
    """

    def __init__(self, message: str, counterexample: object) -> None:
        super().__init__(message)
        self.counterexample = counterexample


class UndecidedError(ReshardError):
    """A claim of a proof could be neither proved nor refuted; the message says which, and why.

    Nothing was found to be wrong. Prove fewer or smaller arrays at a time.
    """


class BudgetError(ReshardError):
    """No plan meets the memory budget; `smallest` is the smallest budget that one meets, in bytes.

    Give `smallest` or more, or donate the source.
    """

    def __init__(self, message: str, smallest: int) -> None:
        super().__init__(message)
        self.smallest = smallest


class NamedErrors:
    """A context whose errors name what is being looked at: `name`, which may change meanwhile; nothing while it is "".

    >>> with NamedErrors("w"):
    ...     raise BudgetError("too small", 64)
    Traceback (most recent call last):
    reshard.errors.BudgetError: w: too small
    """

    def __init__(self, name: str = "") -> None:
        self.name = name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if self.name and isinstance(error, ReshardError):
            # Without its class's own arguments, which are attributes: a budget, a counterexample.
            named = type(error).__new__(type(error))
            ReshardError.__init__(named, f"{self.name}: {error}")
            named.__dict__.update(error.__dict__)
            raise named from None


@contextmanager
def about_sharding(source: str, shape: Sequence[int]) -> Generator[None]:
    """A context that adds a sharding's text and the global shape to errors raised inside it."""
    try:
        yield
    except ReshardError as error:
        about = f"sharding {quoted(source)} of an array of global shape {quoted(tuple(shape))}"
        raise type(error)(f"{about}: {error}") from None


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known name that is most like it, or nothing.

    >>> did_you_mean("dta", ["data", "model"]), did_you_mean("tpu-v5", ["tpu-v4", "tpu-v5p"]), did_you_mean("z", ["x"])
    ("; did you mean 'data'?", "; did you mean 'tpu-v5p'?", '')
    """
    from difflib import get_close_matches

    like = get_close_matches(shortened(given), list(known), 1) if isinstance(given, str) else []
    return f"; did you mean {like[0]!r}?" if like else ""


def name_arguments[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """The function, which says what its arguments are where a call gives others, as a `CallError`.

    >>> @name_arguments
    ... def plan(source, target=None, *, budget=None): ...
    >>> for given in ({"source": "a", "bugdet": 3}, {}):
    ...     try:
    ...         plan(**given)
    ...     except CallError as error:
    ...         print(error)
    plan() has no argument 'bugdet'; did you mean 'budget'? It is plan(source, target, *, budget)
    plan() missing 1 required positional argument: 'source'; it is plan(source, target, *, budget)
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            # What a call gives is bound before the function has a frame: an error with one is of something else.
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            message = str(error).replace(".__init__", "")
        from inspect import Signature, signature

        known, empty = signature(function).parameters, Signature.empty
        own = [
            each.replace(annotation=empty, default=empty) for each in known.values() if each.name not in ("self", "cls")
        ]
        wrong = next((each for each in kwargs if each not in known), None)
        name, it = function.__qualname__.removesuffix(".__init__"), "; it"
        if wrong is not None:
            # What layouts say is like the names of other arguments.
            like = "; layouts say it: as_layout(it, mesh, shape, dtype)" if wrong in ("shape", "dtype") else ""
            like = like or did_you_mean(wrong, known)
            message, it = f"{name}() has no argument {wrong!r}{like}", " It" if like else "; it"
        raise CallError(f"{message}{it} is {name}{Signature(own)}")

    return call


def shortened(text: str, most: int = MOST_QUOTED) -> str:
    """The text in at most `most` characters, its end replaced by dots.

    >>> shortened("replicated", 8)
    'repli...'
    """
    return text if len(text) <= most else text[: most - 3] + "..."


def join_first(texts: Sequence[str], most: int = 8, between: str = ", ") -> str:
    """The first of many texts in a row, and how many more there are.

    >>> join_first(["x", "y", "z"], 1), join_first(["x", "y"])
    ('x and 2 more', 'x, y')
    """
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


def quoted(value: object) -> str:
    """What was given, as messages quote it: its repr in at most `MOST_QUOTED` characters, whatever it is.

    >>> quoted("x=4"), len(quoted("x" * 1000)), quoted(10**5000)
    ("'x=4'", 202, 'an int of 16610 bits')
    """
    if isinstance(value, int) and value.bit_length() > 4 * MOST_QUOTED:
        return f"an int of {value.bit_length()} bits"  # Python refuses to write numbers of more than 4300 digits.
    if isinstance(value, str):
        return shortened(repr(shortened(value)), MOST_QUOTED + 2)
    given: Any = value
    start: Any = given[:MOST_QUOTED] if isinstance(value, bytes | list | tuple) else given
    try:
        if hasattr(given, "__array__") and given.size > _MOST_ELEMENTS:
            return f"an array of {given.dtype}{[*given.shape]}"
        return shortened(" ".join(repr(start).split()))  # That of an array has lines.
    except Exception:  # The repr is the caller's code.
        return f"a {start.__class__.__name__}"


def quote_first(values: Sequence[object]) -> str:
    """The first of many values as messages quote them, and how many more there are."""
    return join_first([*map(quoted, values)])
