"""The conformance tests of plugins fail for plugins that break the rules."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pluggy
import pytest
from ckptcore_testing import PluginTests

from ckptcore.builtin.host_leaves import HostArrayHandler
from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.hookspecs import hookimpl


class Entry:
    """A fake entry point for a plugin of this module."""

    def __init__(self, plugin: object, module: str = "ckptcore.errors") -> None:
        self.module = module
        self._plugin = plugin

    def load(self) -> object:
        return self._plugin


def suite_of(plugin: object, **attributes: object) -> Any:
    """Return the conformance tests for a plugin that is not installed."""
    methods = {"entry_point": "broken", "heavy": (), "_entry": lambda self: Entry(plugin), "_samples": lambda self: []}
    return type("Suite", (PluginTests,), {**methods, **attributes})()


class Unmarked:
    def ckpt_layouts(self) -> dict[str, object]:
        return {}


class Misspelt:
    @hookimpl
    def ckpt_layout(self) -> dict[str, object]:
        return {}


class Greedy:
    @hookimpl
    def ckpt_leaf_handler(self, leaf_type: type) -> object:
        return HostArrayHandler()


class Misnamed:
    @hookimpl
    def ckpt_layouts(self) -> dict[str, object]:
        return {"tensors": SafetensorsLayout}


class Twice:
    @hookimpl
    def ckpt_layouts(self) -> dict[str, object]:
        return {"safetensors": SafetensorsLayout}


class Shouting:
    @hookimpl
    def ckpt_storages(self) -> dict[str, object]:
        return {"S3://": print}


class Overconfident:
    @hookimpl
    def ckpt_storage_for(self, scheme: str) -> object:
        return print


class Untested:
    @hookimpl
    def ckpt_storages(self) -> dict[str, object]:
        return {"untested": print}


@pytest.mark.parametrize(
    ("plugin", "test", "error"),
    [
        (Unmarked, "test_hooks_match_their_specifications", AssertionError),
        (Misspelt, "test_hooks_match_their_specifications", pluggy.PluginValidationError),
        (Greedy, "test_the_plugin_claims_no_unrelated_type", AssertionError),
        (Greedy, "test_leaves_have_a_sample_and_priorities", AssertionError),
        (Misnamed, "test_layouts_are_registered_under_their_names", AssertionError),
        (Twice, "test_layouts_are_registered_under_their_names", AssertionError),
        (Shouting, "test_storages_have_schemes_and_samples", AssertionError),
        (Overconfident, "test_the_plugin_opens_no_unknown_scheme", AssertionError),
        (Untested, "test_storages_have_schemes_and_samples", AssertionError),
        (Overconfident, "test_storages_have_schemes_and_samples", AssertionError),
    ],
)
def test_a_broken_plugin_is_detected(plugin: type, test: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        getattr(suite_of(plugin()), test)()


def test_a_slow_import_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "heavy_plugin.py").write_text("import sqlite3\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    broken = suite_of(None, heavy=("sqlite3",), _entry=lambda self: Entry(None, "heavy_plugin"))
    with pytest.raises(AssertionError, match="sqlite3"):
        broken.test_the_entry_module_imports_no_framework()
    light = suite_of(None, heavy=("sqlite3",), _entry=lambda self: Entry(None, "ckptcore.errors"))
    light.test_the_entry_module_imports_no_framework()


def test_an_internal_import_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nosy_plugin.py").write_text("import ckptcore.saving.save\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert str(tmp_path) in sys.path
    with pytest.raises(AssertionError, match=r"nosy_plugin\.py:1 imports ckptcore\.saving\.save"):
        suite_of(None, _entry=lambda self: Entry(None, "nosy_plugin")).test_the_plugin_imports_only_public_modules()


def test_a_plugin_that_is_not_installed_is_detected() -> None:
    missing = type("Suite", (PluginTests,), {"entry_point": "nobody has this one"})()
    with pytest.raises(AssertionError, match="0 distributions"):
        missing.test_hooks_match_their_specifications()


def test_an_import_of_internals_by_a_plugin_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "nosy_plugin" / "__init__.py"
    source.parent.mkdir()
    source.write_text("from ckptcore.saving import save\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    suite = suite_of(Greedy(), _entry=lambda self: Entry(Greedy(), "nosy_plugin"))
    with pytest.raises(AssertionError, match="import only public modules of ckptcore: .*ckptcore.saving"):
        suite.test_the_plugin_imports_only_public_modules()
    source.write_text("from ckptcore import save\n", encoding="utf-8")
    suite.test_the_plugin_imports_only_public_modules()
