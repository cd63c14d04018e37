"""Element types: their names in every notation, and their sizes."""

from __future__ import annotations

import pytest

from reshard.errors import LayoutError
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

MESH = Mesh(x=4, y=2)
ALL_DTYPES = sorted({dtypes.canonical(name) for name in dtypes._ALIASES})


BITS = {
    **{name: int(name.lstrip("uint")) for name in ("int2", "uint4", "int4", "int8", "uint16", "int64")},
    **{"bool": 8, "float4_e2m1fn": 4, "float8_e4m3fn": 8, "float8_e5m2": 8, "float8_e8m0fnu": 8, "float16": 16},
    **{"bfloat16": 16, "float64": 64, "complex64": 64, "complex128": 128},
}


@pytest.mark.parametrize(("name", "size"), BITS.items())
def test_bytes_of_dtypes(name: str, size: int):
    layout = Layout.tiled(MESH, (4, 9), name, [[MESH.sub_axis("x")], []])
    assert layout.dtype == name
    assert layout.tile_bytes == -(-9 * size // 8)
    assert [layout.nbytes(n) for n in (0, 1, 8)] == [0, -(-size // 8), size]


def test_int4_is_packed():
    assert [Layout.parse(f"s4[{n}]", MESH).tile_bytes for n in (0, 1, 2, 3, 9)] == [0, 1, 1, 2, 5]


@pytest.mark.parametrize("name", ALL_DTYPES)
def test_dtype_names_are_numpy_s(name: str):
    np = pytest.importorskip("numpy")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    assert dtype.name == name
    assert dtypes.canonical(dtype) == dtypes.canonical(dtype.type) == dtypes.canonical(dtypes.short(name)) == name
    assert dtype.itemsize == max(1, dtypes.bits(name) // 8)


@pytest.mark.parametrize("code", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"])
def test_numpys_codes_with_a_byte_order(code: str):
    np = pytest.importorskip("numpy")
    for order in "<>=":
        assert dtypes.canonical(order + code) == np.dtype(code).name == dtypes.canonical(np.dtype(order + code))


@pytest.mark.parametrize("code", ["f2", "f4", "f8", "c8", "c16"])
def test_numpys_codes_alone_are_refused_by_name(code: str):
    """HLO's f8e4m3 has 8 bits, numpy's f8 has 8 bytes."""
    np = pytest.importorskip("numpy")
    for read in (lambda: dtypes.canonical(code), lambda: Layout.parse(f"{code}[16]", MESH)):
        with pytest.raises(LayoutError, match=f"numpy's code for {np.dtype(code).name} \\('<{code}'\\)") as refused:
            read()
        in_bits = [dtypes.short(name) for name in ALL_DTYPES if name.startswith(f"float{code[1:]}_") and code[0] == "f"]
        assert all(name in str(refused.value) for name in in_bits)
        assert ("HLO's" in str(refused.value)) == bool(in_bits) == (code in ("f4", "f8"))


@pytest.mark.parametrize("code", ["<f16", ">c32", "=f1", "<bf16", "<float32", ">", "<M8[s]", "|i4"])
def test_other_codes_are_unknown(code: str):
    with pytest.raises(LayoutError, match="unknown dtype"):
        dtypes.canonical(code)


def test_dtype_spellings():
    same = {Layout.parse(f"{name}[{{x}}4]", MESH) for name in ("f32", "float32")}
    assert len(same) == 1
    assert str(Layout.parse("bool[4]", MESH)) == str(Layout.parse("pred[4]", MESH)) == "pred[4]"
    assert Layout.parse("i4[4]", MESH) == Layout.parse("s4[4]", MESH) == Layout.parse("int4[4]", MESH)
    with pytest.raises(LayoutError, match=r"unknown dtype 'float31'.*float32"):
        Layout.parse("float31[4]", MESH)


@pytest.mark.parametrize(
    ("given", "name"), [(float, "float64"), (int, "int64"), (complex, "complex128"), (bool, "bool")]
)
def test_python_s_own_types(given: type, name: str):
    assert dtypes.canonical(given) == name


@pytest.mark.parametrize("given", ["", "f33", "FLOAT32", None, 3, object()])
def test_unknown_names(given: object):
    with pytest.raises(LayoutError, match=r"unknown dtype.*use a numpy name"):
        dtypes.canonical(given)


class TorchDtype:
    """As torch.float32, which has no name but its repr."""

    def __repr__(self) -> str:
        return "torch.float32"


def test_a_dtype_of_torch_is_read_by_its_repr():
    assert dtypes.canonical(TorchDtype()) == "float32"


@pytest.mark.parametrize(("given", "meant"), [("F32", "f32"), (" bf16", "bf16"), ("flaot32", "float32")])
def test_a_misspelt_name_gets_the_likely_one(given: str, meant: str):
    with pytest.raises(LayoutError, match=f"did you mean '{meant}'"):
        dtypes.canonical(given)
