"""Tags: one for each kind of message, and none written elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

from reshard.runtime.on_mpi import tags


def test_no_two_kinds_of_message_share_a_tag():
    numbers = [value for name, value in vars(tags).items() if name.isupper()]
    assert len(numbers) == len(set(numbers)) > 5


def test_no_other_module_has_tags_of_its_own():
    for path in Path(tags.__file__).parent.rglob("*.py"):
        if path.name != "tags.py":
            assert not re.findall(r"\b_?TAG\w* = |\b90\d\b", path.read_text()), path
