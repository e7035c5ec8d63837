"""``ckptcore plugins``."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plugins.tools.tests.cli.conftest import Run, RunJson
from plugins.tools.tests.cli.documents import problems
from plugins.tools.tests.cli.expected_documents import PluginsDocument
from tests.loading.incomplete_layout import Incomplete


def test_lists_what_the_builtin_plugin_offers(run: Run, run_json: RunJson) -> None:
    _, document = run_json(PluginsDocument, "plugins")
    assert document["version"] == importlib.metadata.version("ckptcore")
    by_name = {plugin["name"]: plugin for plugin in document["plugins"]}
    assert by_name["builtin"]["layouts"] == ["safetensors"]
    assert by_name["builtin"]["storages"] == ["file", "memory"]
    assert "ckpt_leaf_handler" in by_name["builtin"]["hooks"]
    lines = run("plugins").stdout.splitlines()
    assert "  layouts  safetensors" in lines
    assert "  storages file://, memory://" in lines


@pytest.mark.system
def test_shows_why_a_plugin_failed_to_load(tmp_path: Path) -> None:
    (tmp_path / "ckptcore_broken.py").write_text("import a_library_that_is_missing\n")
    information = tmp_path / "ckptcore_broken-1.2.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: ckptcore-broken\nVersion: 1.2\n")
    (information / "entry_points.txt").write_text("[ckptcore]\nbroken = ckptcore_broken\n")

    def plugins(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ckptcore", "plugins", *options],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )

    finished = plugins("--json")
    assert finished.returncode == 1
    document = json.loads(finished.stdout)
    assert problems(document, PluginsDocument) == []
    assert document["failed"] == [
        {
            "name": "broken",
            "distribution": "ckptcore-broken 1.2",
            "reason": "ModuleNotFoundError: No module named 'a_library_that_is_missing'",
        }
    ]
    assert "builtin" in [plugin["name"] for plugin in document["plugins"]]
    text = plugins()
    assert text.returncode == 1
    assert "failed to load: ModuleNotFoundError: No module named 'a_library_that_is_missing'" in text.stdout


def test_shows_which_layout_cannot_be_used(run_json: RunJson, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptcore import plugins

    installed = plugins.installed_plugins().with_plugins([Incomplete()], {})
    monkeypatch.setattr(plugins, "installed_plugins", lambda: installed)
    code, document = run_json(PluginsDocument, "plugins")
    assert code == 1
    (failed,) = [plugin for plugin in document["plugins"] if "failed_layouts" in plugin]
    assert failed["layouts"] == ["incomplete"]
    assert failed["failed_layouts"] == {
        "incomplete": "ModuleNotFoundError: No module named 'a_library_that_is_missing'"
    }
    text = run("plugins").stdout
    assert "  incomplete cannot be used: ModuleNotFoundError: No module named 'a_library_that_is_missing'" in text
