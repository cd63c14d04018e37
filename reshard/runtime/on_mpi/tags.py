"""The tags of this runtime's messages, all of them, so that no two kinds of message share one."""

from __future__ import annotations

FAILED = 901
"""A rank of another node reports that it cannot finish the call (`team`)."""

EXCHANGE = 902
"""Blocks of a step, or of a direct move (`wire.message_exchange`)."""

OVERWRITE = 903
"""Slots of an exchange inside a donated tile (`run_plan`)."""

DEVICE = 904
"""Blocks from GPU to GPU (`gpu.gpu_moves`)."""

PRESENCE = 905
"""A rank comes to a meeting, or leaves it (`meeting`)."""

OPENED = 906
"""Everyone has come to the meeting (`meeting`)."""

MEASURE = 907
"""A message whose time is taken (`measure`)."""
