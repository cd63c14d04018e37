"""Arguments that many tests of the command share."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MESH = ("--mesh", "x=4,y=2")
SOURCE, TARGET = "f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]"
ARRAY = ("--shape", "16,16,16", "--dtype", "f32")
