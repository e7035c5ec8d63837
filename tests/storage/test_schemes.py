"""Schemes of URLs: a plugin opens the schemes that it lists, and another plugin may open all other schemes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import ckptcore
from ckptcore import Context, hookimpl
from ckptcore.builtin.memory import MemoryStorages
from ckptcore.context import PluginOptions
from ckptcore.errors import InvalidLocationError, PluginConflictError, UnknownPluginError
from ckptcore.plugins import installed_plugins
from ckptcore.protocols import LeafHandler, StorageBackend, StorageOpener, StorageOptions


class Owner:
    """A plugin that lists one scheme."""

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {"owned": self.open}

    def open(self, url: str, options: StorageOptions) -> StorageBackend:
        raise NotImplementedError


class Fallback:
    """A plugin for schemes that begin with ``any``, ``owned`` or ``memory``. It records the schemes of all requests."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.memory = MemoryStorages()

    @hookimpl
    def ckpt_storage_for(self, scheme: str) -> StorageOpener | None:
        self.asked.append(scheme)
        return self.open if scheme.startswith(("any", "owned", "memory")) else None

    def open(self, url: str, options: StorageOptions) -> StorageBackend:
        return self.memory.open(f"memory://{url.replace('://', '-')}", options)


def test_a_fallback_opens_a_scheme_that_no_plugin_lists() -> None:
    fallback = Fallback()
    context = Context(plugins=PluginOptions(extra=[fallback]))
    ckptcore.save("any+thing://store/step_1", {"w": np.arange(3)}, context=context)
    assert ckptcore.load("any+thing://store/step_1", context=context)["w"].tolist() == [0, 1, 2]
    assert set(fallback.asked) == {"any+thing"}


@pytest.mark.parametrize("scheme", ["owned", "memory", "file"])
def test_a_scheme_that_a_plugin_lists_never_gets_to_the_fallback(scheme: str) -> None:
    fallback, owner = Fallback(), Owner()
    plugins = installed_plugins().with_plugins([fallback, owner], {})
    opener = plugins.storage(scheme)
    assert opener != fallback.open
    assert fallback.asked == []
    if scheme == "owned":
        assert opener == owner.open


def test_two_fallbacks_for_a_scheme_are_a_conflict() -> None:
    plugins = installed_plugins().with_plugins([Fallback(), Fallback()], {})
    with pytest.raises(PluginConflictError, match=r"any:// .* uninstall one"):
        plugins.storage("any")


def test_the_error_for_an_unknown_scheme_lists_the_installed_schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = installed_plugins().with_plugins([Fallback()], {})
    with pytest.raises(UnknownPluginError, match=r"no-such-scheme:// .*Installed: .*file://.*memory://"):
        plugins.storage("no-such-scheme")
    monkeypatch.setattr("ckptcore.distributions.find_spec", lambda package: None)
    with pytest.raises(UnknownPluginError, match=r"file://.*memory://.*ckptcore\[fsspec\]"):
        plugins.storage("no-such-scheme")


@pytest.mark.parametrize("location", [Path("s3://bucket/run"), "s3:/bucket/run", Path("file:///tmp/run"), "GS:/bucket"])
def test_url_that_lost_slash_is_refused(location: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pathlib` removes a slash from URLs. Otherwise such a program would save to its local disk."""
    monkeypatch.chdir(tmp_path)
    for use in (lambda: ckptcore.save(location, {"w": 1}), lambda: ckptcore.Checkpointer(location)):
        with pytest.raises(InvalidLocationError, match=r"give '(s3|file|GS)://.* as a str"):
            use()
    assert not list(tmp_path.iterdir())


def test_names_with_a_colon_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for location in (Path("run:1/step_1"), "C:/step_1", tmp_path / "s3:" / "bucket"):
        ckptcore.save(location, {"w": 1})
        assert ckptcore.load(location) == {"w": 1}


def test_additional_plugins_keep_the_wrapper_of_leaf_handlers() -> None:
    wrapped: list[LeafHandler] = []

    def wrap(handler: LeafHandler) -> LeafHandler:
        wrapped.append(handler)
        return handler

    plugins = installed_plugins().wrapping(wrap).with_plugins([Fallback()], {})
    assert plugins.dispatch(1.5).leaf is wrapped[0]
