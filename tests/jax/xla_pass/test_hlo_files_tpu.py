"""`reshard pass` on modules as the TPU compiler hands them over, for a topology that is not there."""

import json

import pytest

from reshard.cli import main
from reshard.hlo.proto import ModuleProto
from tests.hlo.splices import DATA

pytest.importorskip("libtpu", reason="install jax[tpu] to compile for TPUs")
pytestmark = [
    pytest.mark.slow,
]


@pytest.mark.parametrize("kind", ["pb", "hlo"])
def test_a_module_for_a_topology(kind, tmp_path, capsys):
    output = tmp_path / "better.pb"
    options = ["--devices", "8", "--platform", "tpu", "--topology", "v5p:2x2x2", "--json"]
    assert main(["pass", str(DATA / f"train_v5p.{kind}"), "-o", str(output), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert sum(chain["replaced"] for chain in report["chains"]) == 1
    better = ModuleProto.decode(output.read_bytes())
    opcodes = [one.opcode for one in better.instructions()]
    assert "all-to-all" in opcodes and better.schedule is not None and better.is_laid_out
