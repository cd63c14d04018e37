"""Views: atoms on both sides, windows, shapes, text, JSON, and what the constructor refuses."""

import json

import pytest

from reshard.errors import PlanError
from reshard.types.view import Atom, View, Window

QKV = View((Atom("three", 3), Atom("h", 4), Atom("d", 2)), ((0, 1, 2),), ((1,), (0, 2)))


def test_shapes_and_text():
    assert (QKV.source_shape, QKV.target_shape) == ((24,), (4, 6))
    assert str(QKV) == "(three h d) -> h (three d)"
    q = View((Atom("three", 1, Window(2, 3)), Atom("h", 4)), ((0, 1),), ((1,),))
    assert (q.source_shape, q.target_shape) == ((12,), (4,))
    assert str(q) == "(three h) -> h, three=2 of the source's 3"
    assert str(View((), ((),), ())) == "1 ->"


def test_json():
    for view in (QKV, View((Atom("h", 2, None, Window(1, 4)),), ((0,),), ((0,),)), View((), (), ())):
        assert View.from_dict(json.loads(json.dumps(view.to_dict()))) == view


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"atoms": 3, "source": [], "target": []},
        {"atoms": [["a", 2, None]], "source": [[0]], "target": [[0]]},
        {"atoms": [["a", 2, None, None]], "source": [[1]], "target": [[0]]},
        {"atoms": [["a", 2, None, None]], "source": [[0, 0]], "target": [[0]]},
        {"atoms": [["a", True, None, None]], "source": [[0]], "target": [[0]]},
        {"atoms": [["a", 2, [2, 3], None]], "source": [[0]], "target": [[0]]},
        {"atoms": [["a", 2, [1], None]], "source": [[0]], "target": [[0]]},
        {"atoms": [["a", 2, None, None]], "source": [[0]], "target": []},
        {"atoms": [["a", 1 << 62, None, None], ["b", 4, None, None]], "source": [[0, 1]], "target": [[0], [1]]},
    ],
)
def test_what_is_not_a_view_is_refused(data):
    with pytest.raises(PlanError):
        View.from_dict(data)


@pytest.mark.parametrize(
    "parts", [(None, (), ()), ((), 3, ()), ((), (0,), ()), ((), ((0,),), ()), ((Atom("a", 2),), (("x",),), ((0,),))]
)
def test_dims_that_name_no_atoms_are_refused(parts):
    with pytest.raises(PlanError, match="of a view"):
        View(*parts)
    with pytest.raises(PlanError, match="of a view"):
        View.identity(3)  # type: ignore[arg-type]


def test_plain():
    assert View.identity((3, 0)).plain and View((Atom("a", 2), Atom("b", 3)), ((0, 1),), ((0, 1),)).plain
    assert not QKV.plain
    assert not View((Atom("a", 2, None, Window(0, 2)),), ((0,),), ((0,),)).plain
