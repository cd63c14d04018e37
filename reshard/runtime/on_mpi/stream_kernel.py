"""A strided copy in machine code, which does what numpy's cannot: its stores go past the caches.

A processor reads a cache line before it writes to a part of it, a third of a copy's traffic, unless the store is
non-temporal. Python has no such store, so these are the instructions for x86-64 on Linux; elsewhere there are none.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import sys
from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np

from reshard.runtime.on_mpi.strided_copy import Array

SWITCH = "RESHARD_MPI_STREAM"
"""Environment variable: 0 leaves all copies to numpy."""

WORD = 16
"""Bytes that one instruction moves: runs, and where they start, are multiples of it."""

Kernel = Callable[[bytes], object]
"""Copies what a table of 64-bit numbers says: `run` bytes for each of `pairs`, for each of `rows`, for each of `outer`.

    outer, rows, pairs, run
    the bytes from one of `outer` to the next, in the source and in the target; the same of `rows`
    where the first run starts, in the source and in the target, for each of `pairs`: where the target is 0, the run is
    a gap, of which the cache lines are fetched and nothing is copied

What it has written is visible to other processors before whatever is written afterwards (`sfence`).
"""

_CODE = """
    f30f1efa                endbr64
    53                      push     rbx
    55                      push     rbp
    4154                    push     r12
    4c8b07                  mov      r8, [rdi]
    4531d2                  xor      r10d, r10d
    4531db                  xor      r11d, r11d
    4c8b4f08        outer:  mov      r9, [rdi+8]
    4c89d0                  mov      rax, r10
    4c89da                  mov      rdx, r11
    488b6f10        row:    mov      rbp, [rdi+16]
    488d5f40                lea      rbx, [rdi+64]
    488b33          pair:   mov      rsi, [rbx]
    4c8b6308                mov      r12, [rbx+8]
    4801c6                  add      rsi, rax
    488b4f18                mov      rcx, [rdi+24]
    4d85e4                  test     r12, r12
    0f849a000000            jz       gap
    4901d4                  add      r12, rdx
    4883e940                sub      rcx, 64
    723c                    jb       tail
    f30f6f06        line:   movdqu   xmm0, [rsi]
    f30f6f4e10              movdqu   xmm1, [rsi+16]
    f30f6f5620              movdqu   xmm2, [rsi+32]
    f30f6f5e30              movdqu   xmm3, [rsi+48]
    66410fe70424            movntdq  [r12], xmm0
    66410fe74c2410          movntdq  [r12+16], xmm1
    66410fe7542420          movntdq  [r12+32], xmm2
    66410fe75c2430          movntdq  [r12+48], xmm3
    4883c640                add      rsi, 64
    4983c440                add      r12, 64
    4883e940                sub      rcx, 64
    73c4                    jae      line
    4883c140        tail:   add      rcx, 64
    7418                    jz       next
    f30f6f06        few:    movdqu   xmm0, [rsi]
    66410fe70424            movntdq  [r12], xmm0
    4883c610                add      rsi, 16
    4983c410                add      r12, 16
    4883e910                sub      rcx, 16
    75e8                    jnz      few
    4883c310        next:   add      rbx, 16
    48ffcd                  dec      rbp
    0f8579ffffff            jnz      pair
    48034730                add      rax, [rdi+48]
    48035738                add      rdx, [rdi+56]
    49ffc9                  dec      r9
    0f8560ffffff            jnz      row
    4c035720                add      r10, [rdi+32]
    4c035f28                add      r11, [rdi+40]
    49ffc8                  dec      r8
    0f8545ffffff            jnz      outer
    0faef8                  sfence
    415c                    pop      r12
    5d                      pop      rbp
    5b                      pop      rbx
    c3                      ret
    0f1806          gap:    prefetchnta [rsi]
    4883c640                add      rsi, 64
    4883e940                sub      rcx, 64
    77f3                    ja       gap
    ebba                    jmp      next
"""

_EXECUTE = mmap.PROT_READ | mmap.PROT_EXEC


@lru_cache(maxsize=1)
def kernel() -> Kernel | None:
    """The function; None on other systems and processors, if the kernel allows no new code, or if it is turned off."""
    here = sys.platform == "linux" and platform.machine() == "x86_64" and struct.calcsize("P") == struct.calcsize("q")
    if not here or os.environ.get(SWITCH) == "0":
        return None
    code = bytes.fromhex("".join(line.split()[0] for line in _CODE.strip().splitlines()))
    try:
        memory = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.write(code)
        page = np.frombuffer(memory, np.uint8)
        start: int = page.ctypes.data
        protect = ctypes.CDLL(None).mprotect
    except (OSError, AttributeError):
        return None
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if protect(start, mmap.PAGESIZE, _EXECUTE) != 0:
        return None
    return partial(_call, ctypes.CFUNCTYPE(None, ctypes.c_char_p)(start), page)


def _call(function: Kernel, _: Array, table: bytes) -> None:
    """Calls the function, whose code is the array."""
    function(table)
