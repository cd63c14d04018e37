"""How a target spells a plan: groups, pairs and boxes as plain data, then each target's own terms."""

from reshard.lower.program import Program as Program
from reshard.lower.program import lower as lower
