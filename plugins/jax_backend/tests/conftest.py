"""Sets up eight virtual CPU devices for all tests, before JAX starts its backend."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def eight_devices() -> None:
    """Fail early with a clear message if another module has started the JAX backend before this file."""
    assert len(jax.devices()) == 8, "run these tests in a process of their own: JAX was started with other devices"
