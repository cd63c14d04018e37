"""Short modules for the tests."""

from reshard import hlo


def module(*lines, before="", header=", num_partitions=8", tables=""):
    """A module whose entry has these lines."""
    entry = "\n".join(f"  {line}" for line in lines)
    return hlo.parse(f"HloModule m{header}\n{tables}\n{before}\nENTRY %main {{\n{entry}\n}}\n")


def computation(name, *lines):
    return "\n".join([f"%{name} {{", *(f"  {line}" for line in lines), "}", ""])


def only(found):
    (one,) = found
    return one
