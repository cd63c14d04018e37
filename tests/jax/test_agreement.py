"""Processes agree before a new move: threads stand for processes here, and a dict for the store of jax."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from jax.errors import JaxRuntimeError  # pyright: ignore[reportUnknownVariableType]

from reshard.errors import AgreementError, PlanError
from reshard.jax.agreement import LIMIT, Agreement, read_time_limit
from tests.sampling import for_each


class Shelf:
    """The key-value store of `jax.distributed`, in one process: its operations and its errors."""

    def __init__(self, choose: random.Random | None = None) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()
        self.choose = choose

    def _pause(self) -> None:
        """Lets others go first, now and then."""
        if self.choose is not None and self.choose.random() < 0.3:
            time.sleep(self.choose.random() / 1000)

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self._pause()
        with self.changed:
            if key in self.values and not allow_overwrite:
                raise JaxRuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
            self.values[key] = value
            self.changed.notify_all()

    def key_value_try_get(self, key: str) -> str:
        self._pause()
        with self.changed:
            if key not in self.values:
                raise JaxRuntimeError(f"NOT_FOUND: Config key {key} not found.")
            return self.values[key]

    def key_value_delete(self, key: str) -> None:
        self._pause()
        with self.changed:
            self.values.pop(key, None)

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        self._pause()
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise JaxRuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {key}")
            return self.values[key]


Calls = list[tuple[set[int], str]]


def run(scripts: dict[int, Calls], store: Shelf, limit: float = 20, once: bool = True) -> dict[int, list[str]]:
    """Each process makes its calls one after another; what each of them came to."""

    def live(process: int) -> list[str]:
        agreement = Agreement(store, process, limit)
        outcomes: list[str] = []
        for processes, ask in scripts[process]:
            try:
                agreement.agree(processes, ask, once=once)
                outcomes.append("agreed")
            except AgreementError as error:
                outcomes.append(str(error))
        return outcomes

    with ThreadPoolExecutor(len(scripts)) as pool:
        started = {process: pool.submit(live, process) for process in scripts}
        return {process: future.result(120) for process, future in started.items()}


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reshard.jax.agreement._LOOK", 0.01)


def test_all_go_on_if_all_ask_for_the_same():
    every = {0, 1, 2}
    outcomes = run({process: [(every, "rows"), (every, "columns")] for process in every}, Shelf())
    assert all(texts == ["agreed", "agreed"] for texts in outcomes.values())


def test_other_targets_are_refused_with_one_error_on_all_and_the_next_call_works():
    every = {0, 1, 2}
    same: Calls = [(every, "rows"), (every, "rows"), (every, "blocks")]
    outcomes = run({0: same, 1: same, 2: [(every, "columns"), *same[1:]]}, Shelf())
    first = {texts[0] for texts in outcomes.values()}
    assert len(first) == 1 and "asks for rows" in first.pop()
    assert all(texts[1:] == ["agreed", "agreed"] for texts in outcomes.values())


def test_any_number_of_different_targets_is_one_error_at_once():
    every = set(range(5))
    scripts: dict[int, Calls] = {process: [(every, f"target {process}"), (every, "rows")] for process in every}
    began = time.monotonic()
    outcomes = run(scripts, Shelf(), limit=60)
    assert time.monotonic() - began < 20
    assert len({texts[0] for texts in outcomes.values()}) == 1 and "do not agree" in outcomes[0][0]
    assert all(texts[1] == "agreed" for texts in outcomes.values())


class SlowAuthors(Shelf):
    """A store in which each process takes long over every verdict but its first."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.local()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        if key.endswith("verdict"):
            self.written.before = getattr(self.written, "before", -1) + 1
            time.sleep(0.1 * bool(self.written.before))
        super().key_value_set(key, value, allow_overwrite)


def test_who_reads_a_refusal_first_is_not_taken_for_one_that_asks_for_something_else():
    """Two meetings are refused one after the other; a process of the first may be at its next call in between."""
    every = {0, 1, 2, 3}
    scripts = {process: [(every, "another" if process == 2 else "rows"), (every, "columns")] for process in every}
    outcomes = run(scripts, SlowAuthors())
    assert len({texts[0] for texts in outcomes.values()}) == 1
    assert all(texts[1] == "agreed" for texts in outcomes.values())


def test_other_devices_are_refused():
    """The processes do not even agree on who takes part."""
    outcomes = run({0: [({0, 1}, "rows")], 1: [({0, 1, 2}, "columns")], 2: [({0, 1, 2}, "columns")]}, Shelf())
    texts = {each for (each,) in outcomes.values()}
    assert texts == {
        "the processes do not agree, so nothing was moved: process 0 asks for rows; process 1 asks for columns"
    }


def test_a_process_that_waits_for_others_first_is_waited_for():
    pair, every = {1, 2}, {0, 1, 2}
    outcomes = run({0: [(every, "b")], 1: [(pair, "a"), (every, "b")], 2: [(pair, "a"), (every, "b")]}, Shelf())
    assert all(text == "agreed" for texts in outcomes.values() for text in texts)


def test_a_process_that_does_not_come_is_named_within_the_limit():
    outcomes = run({0: [({0, 1, 2}, "rows")], 1: [({0, 1, 2}, "rows")], 2: []}, Shelf(), limit=0.2)
    assert outcomes[0] == outcomes[1] and "process 2 has not asked" in outcomes[0][0]


def test_what_was_agreed_on_is_not_asked_again():
    store = Shelf()
    lone = [Agreement(store, process) for process in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        met = [pool.submit(each.agree, {0, 1}, "rows") for each in lone]
        assert [each.result() for each in met] == [None, None]
    store.key_value_try_get = store.key_value_set = store.blocking_key_value_get = _fail  # type: ignore[method-assign]
    for each in lone:
        each.agree({0, 1}, "rows")
        each.agree({each.process}, "columns")  # Nobody else takes part.
        each.agree({5, 6}, "columns")  # This process does not.


def test_what_others_have_agreed_on_is_asked():
    pair, every = {0, 1}, {0, 1, 2}
    outcomes = run(
        {0: [(pair, "rows"), (every, "rows")], 1: [(pair, "rows"), (every, "rows")], 2: [(every, "rows")]}, Shelf(), 5
    )
    assert all(text == "agreed" for texts in outcomes.values() for text in texts)


def _fail(*given: object, **named: object) -> str:
    raise AssertionError(given)


def test_the_store_does_not_grow_with_repeated_questions():
    store = Shelf()
    run({0: [({0, 1}, f"step {n}") for n in range(50)], 1: [({0, 1}, f"step {n}") for n in range(50)]}, store)
    assert len(store.values) <= 4


def test_a_store_that_fails_is_an_error_of_ours():
    store = Shelf()

    def refuse(*given: object, **named: object) -> None:
        raise JaxRuntimeError("UNAVAILABLE: failed to connect")

    store.key_value_set = refuse  # type: ignore[method-assign]
    with pytest.raises(AgreementError, match="does not answer: UNAVAILABLE"):
        Agreement(store, 0).agree({0, 1}, "rows")


@pytest.mark.parametrize("text", ["soon", "nan", "inf", "0", "-1"])
def test_a_time_limit_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RESHARD_JAX_LIMIT", text)
    with pytest.raises(PlanError, match="positive number of seconds"):
        read_time_limit()


def test_the_time_limit_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RESHARD_JAX_LIMIT", "")
    assert read_time_limit() == LIMIT
    monkeypatch.setenv("RESHARD_JAX_LIMIT", "2.5")
    assert read_time_limit() == 2.5


@for_each(range(40))
def test_random_schedules_end_alike_on_all(seed: int):
    """Each round, a random set of processes asks, sometimes for different things; those of one meeting end alike."""
    choose = random.Random(seed)
    count = choose.randint(2, 4)
    rounds: list[dict[int, tuple[set[int], str]]] = []
    for _ in range(8):
        members = set(choose.sample(range(count), choose.randint(2, count)))
        ask = f"ask {choose.randrange(3)}"
        asks = dict.fromkeys(members, ask)
        if choose.random() < 0.4:  # One asks for something else, or several, each of them for something of its own.
            for process in choose.sample(sorted(members), choose.randint(1, len(members))):
                asks[process] = choose.choice(["another", f"what {process} wants"])
        rounds.append({process: (members, each) for process, each in asks.items()})
    scripts = {process: [calls[process] for calls in rounds if process in calls] for process in range(count)}
    outcomes = run(scripts, Shelf(random.Random(seed)), limit=20, once=False)
    following = {process: iter(texts) for process, texts in outcomes.items()}
    for calls in rounds:
        texts = {next(following[process]) for process in calls}
        assert len(texts) == 1, (calls, texts)
        assert (texts == {"agreed"}) == (len({ask for _, ask in calls.values()}) == 1)
