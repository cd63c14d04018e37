"""Short modules for the tests, and stack frames for their headers."""

from pathlib import Path

import reshard
from reshard import hlo

GROUPS = "channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}"
PARAMETERS = ["%p = f32[8] parameter(0)", "%q = bf16[4] parameter(1)"]
OURS = Path(reshard.__file__).resolve().parent / "jax" / "redistribute.py"
TABLES = f"""
FileNames
1 "train.py"
2 "/env/lib/python3.12/site-packages/jax/_src/numpy.py"
3 "{OURS.as_posix()}"
4 "model \\"x\\".py"

FunctionNames
1 "<module>"
2 "loss"
3 "inside"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=50 end_line=50 column=1 end_column=2}}
2 {{file_name_id=4 function_name_id=2 line=7 end_line=8 column=3 end_column=4}}
3 {{file_name_id=3 function_name_id=3 line=99 end_line=99 column=1 end_column=1}}
4 {{file_name_id=2 function_name_id=3 line=1 end_line=1 column=1 end_column=1}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}
3 {{file_location_id=3 parent_frame_id=3}}
4 {{file_location_id=4 parent_frame_id=4}}
5 {{file_location_id=4 parent_frame_id=1}}
"""
"""Frame 4 is a line of jax, called by one of this package, called by two lines of the user."""

GATHER = "all-gather(%p), replica_groups={{0,1}}, dimensions={0}"


def module(*lines, before="", header=", num_partitions=8", tables=""):
    """A module whose entry has these lines."""
    entry = "\n".join(f"  {line}" for line in lines)
    return hlo.parse(f"HloModule m{header}\n{tables}\n{before}\nENTRY %main {{\n{entry}\n}}\n")


def computation(name, *lines):
    """The text of a computation, to stand before the entry."""
    return "\n".join([f"%{name} {{", *(f"  {line}" for line in lines), "}", ""])


def only(collectives):
    """The one collective that there is."""
    (one,) = collectives
    return one


def metadata(frame, op_name="f/mul"):
    """The attribute of an instruction from a line of TABLES."""
    return f', metadata={{op_name="{op_name}" stack_frame_id={frame}}}'


def gather_source(attributes, *more, tables=TABLES, **options):
    """The origin of an all-gather with these attributes, in an entry that goes on with `more`."""
    lines = ["%p = f32[8] parameter(0)", f"%g = f32[16] {GATHER}{attributes}", *more]
    return only(hlo.collectives(module(*lines, tables=tables, **options))).source
