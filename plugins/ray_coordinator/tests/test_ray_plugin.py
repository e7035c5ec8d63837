"""The entry point and the hook of the plugin."""

from __future__ import annotations

import importlib.metadata

import ckptcore_ray
from ckptcore_ray.membership import joined_coordinator
from ckptcore_testing import PluginTests

from ckptcore import Context
from ckptcore.runtime import runtime_of


class TestPluginConforms(PluginTests):
    """Conformance tests of the plugin."""

    entry_point = "ray"


def test_the_entry_point_is_the_plugin() -> None:
    (entry_point,) = importlib.metadata.entry_points(group="ckptcore", name="ray")
    assert entry_point.load() is ckptcore_ray


def test_a_process_that_joined_no_job_forms_a_job_of_one() -> None:
    assert joined_coordinator() is None
    assert ckptcore_ray.ckpt_coordinator() is None
    assert runtime_of(Context()).job().size == 1
