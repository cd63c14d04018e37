"""The platform that a module was compiled for, by what only its compiler writes."""

from __future__ import annotations

import re

_MARKS = (
    ("tpu", re.compile(r"\{[\d,]*:T\(\d")),  # tiled memory layouts
    ("gpu", re.compile(r'"operation_queue_id"|"fusion_backend_config"|custom_call_target="__(?:cublas|cudnn|triton)')),
)


def platform_of(text: str) -> str:
    """`tpu` or `gpu`, by tiled layouts and by backend configurations; else `cpu`.

    >>> platform_of("ENTRY %main (p: bf16[8,128]) -> bf16[8,128] { %p = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)")
    'tpu'
    >>> platform_of("ENTRY %main (p: f32[8]) -> f32[8] { ROOT %p = f32[8]{0} parameter(0) }")
    'cpu'
    """
    return next((platform for platform, mark in _MARKS if mark.search(text)), "cpu")
