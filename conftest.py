"""What every test of the repository needs before anything is imported."""

from __future__ import annotations

import os

from hypothesis import settings

# JAX reads these when it first makes a backend: 8 virtual devices, so that sharded arrays exist without an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
# Nothing in the tests may reach for a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# "ci" tries the same examples in every run; "explore" looks for new ones (HYPOTHESIS_PROFILE=explore).
settings.register_profile("ci", derandomize=True, database=None, deadline=None, print_blob=True)
settings.register_profile("explore", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
