"""The checkpoint engine for verl, with verl, and the signatures of `fake_verl`."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
from verl.checkpoint_engine import base
from verl.utils.import_utils import import_external_libs

from plugins.integrations.tests import fake_verl
from plugins.integrations.tests.verl_cases import VerlCases


class TestRealVerl(VerlCases):
    """With verl."""

    @pytest.fixture
    def registry(self) -> Any:
        import_external_libs("ckptcore_integrations.verl")  # as with `custom_backend_module`
        return base.CheckpointEngineRegistry


def names(function: Any) -> list[tuple[str, Any, Any]]:
    return [(name, given.kind, given.default) for name, given in inspect.signature(function).parameters.items()]


@pytest.mark.parametrize("kind", ["CheckpointEngine", "CheckpointEngineWithCache"])
def test_the_fake_classes_have_the_abstract_methods_of_verl(kind: str) -> None:
    fake, real = getattr(fake_verl, kind), getattr(base, kind)
    assert fake.__abstractmethods__ == real.__abstractmethods__
    assert fake.wire_format == real.wire_format
    for name in fake.__abstractmethods__:
        assert names(getattr(fake, name)) == names(getattr(real, name)), name


def test_the_fake_registry_has_the_signatures_of_verl() -> None:
    for name in ("register", "new"):
        fake, real = getattr(fake_verl.CheckpointEngineRegistry, name), getattr(base.CheckpointEngineRegistry, name)
        assert names(fake) == names(real), name


def test_verl_passes_the_arguments_that_the_engine_takes() -> None:
    """As `CheckpointEngineWorker` and the actor worker of verl create an engine."""
    engine = importlib.import_module("ckptcore_integrations.verl").VersionCheckpointEngine
    inspect.signature(engine).bind(bucket_size=1, location="a", cache="b")
    inspect.signature(engine).bind(is_master=True, bucket_size=1, location="a", cache="b")
