"""What pyproject.toml cannot say: a C extension that may fail to build, and the README with addresses for PyPI."""

import re
from pathlib import Path

from setuptools import Extension, setup

REPOSITORY = "https://github.com/reshard/reshard/blob/main/"
PICTURES = "https://raw.githubusercontent.com/reshard/reshard/main/"


def readme_for_pypi() -> str:
    """The README with each relative link as an address: PyPI shows it alone."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\((?!https?:|#)([^)]+\.svg)\)", rf"]({PICTURES}\1)", text)
    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({REPOSITORY}\1)", text)


# Optional: without a compiler, the package installs all the same, and numpy makes the copies. It keeps to the stable
# ABI, so that one wheel of a platform is for every Python from 3.12 on.
STREAM = Extension(
    "reshard.runtime.on_mpi.copies._stream",
    ["reshard/runtime/on_mpi/copies/_stream.c"],
    optional=True,
    py_limited_api=True,
    define_macros=[("Py_LIMITED_API", "0x030C0000")],
)

if __name__ == "__main__":
    setup(
        long_description=readme_for_pypi(),
        long_description_content_type="text/markdown",
        ext_modules=[STREAM],
        options={"bdist_wheel": {"py_limited_api": "cp312"}},
    )
