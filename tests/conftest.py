"""Settings shared by all tests.

Hypothesis runs the same examples every time; `HYPOTHESIS_PROFILE=explore` looks for new ones.
"""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
