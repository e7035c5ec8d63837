"""The checkpoint engine for verl, with the base classes of `fake_verl`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from plugins.integrations.tests import fake_verl
from plugins.integrations.tests.verl_cases import VerlCases


class TestVerl(VerlCases):
    """Without verl."""

    @pytest.fixture
    def registry(self) -> Iterator[Any]:
        with fake_verl.installed():
            importlib.import_module("ckptcore_integrations.verl")
            yield fake_verl.CheckpointEngineRegistry
