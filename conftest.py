"""What every test of the repository needs before anything is imported."""

from __future__ import annotations

import gc
import os
import secrets
from collections.abc import Iterator

import pytest
from hypothesis import settings

# JAX reads these when it first makes a backend: 8 virtual devices, so that sharded arrays exist without an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
# Nothing in the tests may reach for a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# gcsfs reads this when it is imported, and else asks servers for what none of the tests has, without an end.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

# Ray sends no statistics of its use. The token of its clusters is in the environment, or Ray would write one into the home directory.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

# "ci" tries the same examples in every run; "explore" looks for new ones (HYPOTHESIS_PROFILE=explore).
settings.register_profile("ci", derandomize=True, database=None, deadline=None, print_blob=True)
settings.register_profile("explore", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep what is imported and collected out of every later garbage collection.

    Each process that runs tests imports every framework and holds every test: millions of objects that never go away,
    which each `gc.collect` of a test would look at again. With them set aside a full collection takes a millisecond
    instead of half a second, and the whole run a fraction of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        _keep()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _keep_what_came() -> Iterator[None]:
    """The same for what the tests of a file import, and for what libraries remember of them."""
    yield
    _keep()


def _keep() -> None:
    gc.collect()
    gc.freeze()
