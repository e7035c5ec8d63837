"""Remedies in errors about plugins and distributions. Each test follows the text of a remedy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from ckptcore_testing import ThreadJob
from ckptcore_testing.cases import refused
from ckptcore_testing.plugins import hide_distributions
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore import Context, hookimpl, plugins
from ckptcore.context import IOOptions, JobOptions, PluginOptions, SingleProcess
from ckptcore.distributions import DISTRIBUTIONS
from ckptcore.errors import (
    MissingDistributionError,
    PluginConflictError,
    PluginError,
)
from ckptcore.installed import EntryPoint, entry_points
from ckptcore.protocols import CheckpointableHandler, Priority
from tests.errors.refusals import ONE
from tests.loading.incomplete_layout import Incomplete


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Hide the other distributions. Return a function that installs one, by registering its plugin."""
    installed: set[str] = set()
    manager = hide_distributions(monkeypatch, {}, installed)

    def install(text: str) -> None:
        extra = text.partition("pip install 'ckptcore[")[2].partition("]'")[0]
        installed.update(distribution.package for distribution in DISTRIBUTIONS if distribution.extra == extra)
        for entry_point in entry_points("ckptcore"):
            if entry_point.distribution.partition(" ")[0] == f"ckptcore-{extra}":
                manager.register(entry_point.load(), entry_point.name)

    return install


def _with_markers(context: Context) -> Context:
    return replace(context, io=IOOptions(without_conditions="marker"))


@pytest.mark.parametrize(
    "call",
    [
        lambda path, context: ckptcore.save(path / "d", {"w": torch.ones(3)}, context=context),
        lambda path, context: ckptcore.save(path / "d", {"w": ONE}, layout="dcp", context=context),
        lambda path, context: ckptcore.load(path / "c", framework="torch", context=context),
        lambda path, context: ckptcore.save(
            "fsspec+memory://remedies/c",
            {"w": ONE},
            context=replace(context, io=IOOptions(without_conditions="marker")),
        ),
        lambda path, context: ckptcore.load(path / "c.pt", context=context),
    ],
    ids=["type", "layout", "framework", "scheme", "file"],
)
def test_the_named_distribution_solves_the_problem(
    call: Callable[..., Any], installs: Callable[[str], None], tmp_path: Path
) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONE}, context=Context())  # the default Context would keep the patched plugins
    torch.save({"w": torch.ones(3)}, tmp_path / "c.pt")
    installs(refused(lambda: call(tmp_path, Context()), "install"))
    loaded = call(tmp_path, Context())
    if loaded is None:  # the call was a save
        loaded = ckptcore.load(
            tmp_path / "d" if (tmp_path / "d").exists() else "fsspec+memory://remedies/c", context=Context()
        )
    assert np.asarray(loaded["w"]).shape == (3,)


def test_two_plugins_with_one_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only the first plugin in `sys.path` is used. An error about a layout of the other explains why it is missing."""
    module = ModuleType("plugin_with_a_layout")
    module.ckpt_layouts = hookimpl(lambda: {"mine": ckptcore.SafetensorsLayout})  # type: ignore[attr-defined]  # a hook of the plugin
    monkeypatch.setitem(sys.modules, "plugin_with_a_layout", module)
    monkeypatch.setitem(sys.modules, "plugin_without", ModuleType("plugin_without"))
    first, second = EntryPoint("x", "plugin_without", "one 1.0"), EntryPoint("x", "plugin_with_a_layout", "two 2.0")
    installed = [first, second]
    monkeypatch.setattr(plugins, "entry_points", lambda group: installed)
    monkeypatch.setattr("ckptcore.runtime.installed_plugins", plugins.installed_plugins.__wrapped__)

    def save() -> None:
        ckptcore.save(tmp_path / "c", {"w": ONE}, layout="mine", context=Context())

    refused(save, "these failed to load: x (PluginConflictError: one 1.0 also has a plugin named 'x'; uninstall one)")
    installed.remove(first)
    save()
    assert same_value(ckptcore.load(tmp_path / "c", context=Context()), {"w": ONE})


class Stated:
    """An object with a state."""

    def __init__(self, state: int = 0) -> None:
        self.state = state


class StatedHandler(CheckpointableHandler):
    """The handler of `Stated`."""

    priority = Priority.EXACT

    def flatten(self, value: Stated) -> object:
        """Return the state."""
        return [value.state]

    def unflatten(self, like: Stated, state: object) -> object:
        """Return the state."""
        return state

    def restore(self, target: Stated, state: Any) -> None:
        """Set the state."""
        (target.state,) = state


class Claims:
    """A plugin that claims a type."""

    @hookimpl
    def ckpt_checkpointable_handler(self, value_type: type) -> object:
        """Return the handler of `Stated`."""
        return StatedHandler() if value_type is Stated else None


def test_two_plugins_that_claim_a_type(tmp_path: Path) -> None:
    both = PluginOptions(extra=[Claims(), Claims()])
    advice = "choose one with Context(plugins=PluginOptions(handlers={type: handler})), or uninstall one of them"

    def save(options: PluginOptions) -> None:
        ckptcore.save(tmp_path / "c", {"x": Stated(3)}, overwrite=True, context=Context(plugins=options))

    refused(lambda: save(both), "Stated with priority", advice, error=PluginConflictError)
    for options in (replace(both, handlers={Stated: StatedHandler()}), replace(both, extra=[Claims()])):
        save(options)
        target = {"x": Stated()}
        ckptcore.load_into(tmp_path / "c", target, context=Context(plugins=options))
        assert target["x"].state == 3


class Job:
    """A plugin that reports a job."""

    def __init__(self) -> None:
        self.coordinator = ThreadJob(2).coordinator(0)

    @hookimpl
    def ckpt_coordinator(self) -> object:
        """Return the coordinator of a job of two processes."""
        return self.coordinator


def test_two_plugins_that_report_a_job(tmp_path: Path) -> None:
    plugins_ = PluginOptions(extra=[Job(), Job()])
    text = refused(
        lambda: ckptcore.save(tmp_path / "c", {"w": ONE}, context=Context(plugins=plugins_)),
        "choose one with Context(job=JobOptions(coordinator=...))",
        error=PluginConflictError,
    )
    code = text.partition("choose one with ")[2].replace("...", "SingleProcess()").replace("(job", "(plugins=both, job")
    names = {"Context": Context, "JobOptions": JobOptions, "SingleProcess": SingleProcess, "both": plugins_}
    ckptcore.save(tmp_path / "c", {"w": ONE}, context=eval(code, names))
    assert same_value(ckptcore.load(tmp_path / "c"), {"w": ONE})


def test_a_layout_whose_library_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    context = Context(plugins=PluginOptions(extra=[Incomplete()]))
    save = partial(ckptcore.save, tmp_path / "c", {"w": ONE}, layout="incomplete", context=context)
    refused(save, "No module named", "install the libraries that it requires", error=PluginError)
    library = ModuleType("a_library_that_is_missing")
    library.layout = ckptcore.SafetensorsLayout  # type: ignore[attr-defined]  # the plugin calls it
    monkeypatch.setitem(sys.modules, "a_library_that_is_missing", library)
    save()
    assert same_value(ckptcore.load(tmp_path / "c"), {"w": ONE})


def test_a_distribution_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONE})
    with monkeypatch.context() as patch:
        for name in ("ckptcore_tools", "ckptcore_tools.copies"):
            patch.setitem(sys.modules, name, None)
        text = refused(
            lambda: ckptcore.copy(tmp_path / "c", tmp_path / "d"), "ckptcore.copy needs", error=MissingDistributionError
        )
    assert text.endswith("is not installed: run pip install 'ckptcore[tools]'")
    ckptcore.copy(tmp_path / "c", tmp_path / "d")
    assert same_value(ckptcore.load(tmp_path / "d"), {"w": ONE})
