"""Storages of a scheme: the plugin that names it, or one that opens all other schemes."""

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
    """Names one scheme."""

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {"owned": self.open}

    def open(self, url: str, options: StorageOptions) -> StorageBackend:
        raise NotImplementedError


class Fallback:
    """Opens what begins with ``any``, and would open ``owned`` and ``memory`` too; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.memory = MemoryStorages()

    @hookimpl
    def ckpt_storage_for(self, scheme: str) -> StorageOpener | None:
        self.asked.append(scheme)
        return self.open if scheme.startswith(("any", "owned", "memory")) else None

    def open(self, url: str, options: StorageOptions) -> StorageBackend:
        return self.memory.open(f"memory://{url.replace('://', '-')}", options)


def test_a_scheme_that_no_plugin_names_is_opened() -> None:
    fallback = Fallback()
    context = Context(plugins=PluginOptions(extra=[fallback]))
    ckptcore.save("any+thing://store/step_1", {"w": np.arange(3)}, context=context)
    assert ckptcore.load("any+thing://store/step_1", context=context)["w"].tolist() == [0, 1, 2]
    assert set(fallback.asked) == {"any+thing"}


@pytest.mark.parametrize("scheme", ["owned", "memory", "file"])
def test_a_scheme_that_a_plugin_names_is_its_own(scheme: str) -> None:
    fallback, owner = Fallback(), Owner()
    plugins = installed_plugins().with_plugins([fallback, owner], {})
    found = plugins.storage(scheme)
    assert found != fallback.open
    assert fallback.asked == []
    if scheme == "owned":
        assert found == owner.open


def test_two_answers_are_a_conflict() -> None:
    plugins = installed_plugins().with_plugins([Fallback(), Fallback()], {})
    with pytest.raises(PluginConflictError, match=r"any:// .* uninstall one"):
        plugins.storage("any")


def test_an_unknown_scheme_is_an_error_with_the_installed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = installed_plugins().with_plugins([Fallback()], {})
    with pytest.raises(UnknownPluginError, match=r"no-such-scheme:// .*Installed: .*file://.*memory://"):
        plugins.storage("no-such-scheme")
    monkeypatch.setattr("ckptcore.distributions.find_spec", lambda package: None)
    with pytest.raises(UnknownPluginError, match=r"file://.*memory://.*ckptcore\[fsspec\]"):
        plugins.storage("no-such-scheme")


@pytest.mark.parametrize("location", [Path("s3://bucket/run"), "s3:/bucket/run", Path("file:///tmp/run"), "GS:/bucket"])
def test_a_url_that_lost_a_slash_is_no_directory(
    location: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that keeps its URLs as paths would save to the disk of its machine, which is gone when the job ends."""
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
