"""The platform of a module: of all recorded ones, whose names say it."""

import pytest

from reshard.hlo.text import compiled_platform
from tests.doctor.fragments import HLO_DATA

NAMES = {"cpu": "cpu", "v5p": "tpu", "v5p-2slices": "tpu", "v5e": "tpu", "tpu7x": "tpu"}


@pytest.mark.parametrize("path", sorted(HLO_DATA.glob("*.hlo")), ids=lambda path: path.stem)
def test_recorded_modules(path):
    assert compiled_platform(path.read_text()) == NAMES[path.stem.split("_")[1]]


def test_gpu():
    backend = 'backend_config={"operation_queue_id":"0","wait_on_operation_queues":[]}'
    assert compiled_platform(f"  %g = f32[8]{{0}} all-gather(%p), {backend}") == "gpu"
