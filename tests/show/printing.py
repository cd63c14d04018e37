"""What a function prints on a console, as text."""

import io

from rich.console import Console


def printed(show, *arguments, width=100, **options) -> str:
    plain = {"markup": False, "highlight": False, "emoji": False, "color_system": None, "force_jupyter": False}
    out = Console(file=io.StringIO(), width=width, **plain)
    show(out, *arguments, **options)
    return out.file.getvalue()
