"""The report of the doctor, with the ways to print it.

findings   the places and totals, which of them are shown, and the words for each; its JSON
table      the same in a terminal
page       the same as one HTML page
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reshard.doctor.report.findings import Findings
from reshard.doctor.report.page import write_report_page
from reshard.doctor.report.table import show_report
from reshard.errors import ReshardError
from reshard.show import terminal

if TYPE_CHECKING:
    from reshard.doctor.advice import Advice


@dataclass(frozen=True)
class Report(Findings):
    """Every place where a program moves data between devices, the most wasteful first.

    `print(report)` shows a table; `to_json()` and `to_html()` are for other programs and for browsers.

    >>> from reshard.doctor import examine
    >>> report = examine('''HloModule m, num_partitions=4
    ...
    ... ENTRY %main {
    ...   %p = f32[2,8]{1,0} parameter(0)
    ...   %g = f32[8,8]{1,0} all-gather(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
    ...   ROOT %r = f32[8,8]{1,0} add(%g, %g), metadata={op_name="add" source_file="train.py" source_line=3}
    ... }''')
    >>> print(report)
    m on 4 devices
      received  192 B a device, 1 collective
      live      576 B a device at the peak: 256 B made by moves
    <BLANKLINE>
          where             XLA does     received   needed   temp   reshard would   saves
      ───────────────────────────────────────────────────────────────────────────────────
      1   near train.py:3   all_gather      192 B    192 B    0 B   the same
    <BLANKLINE>
      live at peak   array      made by      where
      ──────────────────────────────────────────────────────
             256 B   f32[8,8]   all_gather   near train.py:3
             256 B   f32[8,8]   add          train.py:3
              64 B   f32[2,8]   argument     near train.py:3
    <BLANKLINE>
    No detour here: `report.advise()`, or `--advise`, finds the constraint that costs this.
    >>> report.received_bytes, report.wasted_bytes, len(report.places), report.to_html()[:15]
    (192, 0, 1, '<!doctype html>')
    """

    adviser: Callable[..., Advice] | None = field(default=None, repr=False, compare=False)

    def advise(self, limit: int = 8, **limits: Any) -> Advice:
        """Which shardings to change, at most `limit` of them, each with what it gains, measured by compiling the
        program with it and with those before it.

        `compiles` is how many programs are compiled at most (150), and `seconds` for how long the search goes on (600).
        Raises `ReshardError` for a report of HLO, which has no shardings that could be changed.
        """
        if self.adviser is None:
            raise ReshardError(
                f"{self.program} was given as HLO, after partitioning, where no sharding can be changed: give its "
                f"StableHLO (jitted.lower(...).as_text(debug_info=True)), or the function to reshard.jax.report"
            )
        return self.adviser(limit, **limits)

    def to_html(self, advice: Advice | None = None) -> str:
        """The report as one HTML page, without other files; a small script sorts its tables."""
        return write_report_page(self, advice)

    def __str__(self) -> str:
        return terminal.print_plain(lambda out: show_report(out, self))
