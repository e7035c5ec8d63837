"""`import ckptcore` imports few modules, even if every plugin is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest

import ckptcore

pytestmark = pytest.mark.system

HEAVY = (
    "boto3", "botocore", "click", "equinox", "flax", "fsspec", "hypothesis", "jax", "jaxlib", "keras", "obstore",
    "opentelemetry", "optax", "orbax",
    "pandas", "pytest", "ray", "rich", "safetensors", "scipy", "tensorflow", "tensorstore", "torch",
    "tqdm", "transformers", "urllib3",
)  # fmt: skip
"""Packages that no program gets for importing ckptcore."""

MOST_MODULES = 105
"""Limit of modules that a first save or load imports in addition to NumPy, ml_dtypes, pluggy and xxhash."""

PROBE = """
import json, sys
for name in {before!r}:
    __import__(name)
before = set(sys.modules)
for name in {names!r}:
    __import__(name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def modules_loaded_by(*names: str, before: tuple[str, ...] = (), path: Path | None = None) -> set[str]:
    """Return the modules that an import of `names` adds in a new process that has imported `before`."""
    code = PROBE.format(names=names, before=before)
    if path is not None:
        code = f"import sys; sys.path.insert(0, {str(path)!r})\n{code}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(result.stdout))


def heavy(modules: set[str]) -> set[str]:
    """Return the modules that belong to a package in `HEAVY`."""
    return {module for module in modules if module.partition(".")[0] in HEAVY}


def test_importing_ckptcore_imports_no_framework() -> None:
    assert heavy(modules_loaded_by("ckptcore")) == set()


@pytest.mark.parametrize("entry", sorted(entry_points(group="ckptcore")), ids=lambda entry: str(entry.name))
def test_entry_module_of_a_plugin_imports_no_framework(entry: object) -> None:
    module = str(getattr(entry, "module", ""))
    assert module
    assert heavy(modules_loaded_by("ckptcore", module)) == set()


def test_collecting_the_plugins_imports_no_framework(tmp_path: Path) -> None:
    """A save and a load of plain values ask every installed plugin about their types."""
    (tmp_path / "uses_every_hook.py").write_text(
        "import ckptcore\n"
        "ckptcore.save('memory://import-cost/state', {'step': 3, 'name': 'run', 'rates': [0.5, 0.25]})\n"
        "assert ckptcore.load('memory://import-cost/state')['step'] == 3\n",
        encoding="utf-8",
    )
    assert heavy(modules_loaded_by("uses_every_hook", path=tmp_path)) == set()


def test_the_probe_detects_a_framework(tmp_path: Path) -> None:
    """Show that the tests above detect a package that imports a framework."""
    (tmp_path / "innocent.py").write_text("import innocent_part\n", encoding="utf-8")
    (tmp_path / "innocent_part.py").write_text("import torch.nn\n", encoding="utf-8")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("", encoding="utf-8")
    (tmp_path / "torch" / "nn.py").write_text("", encoding="utf-8")
    assert heavy(modules_loaded_by("innocent", path=tmp_path)) == {"torch", "torch.nn"}


def test_importing_ckptcore_loads_no_unused_module() -> None:
    loaded = modules_loaded_by("ckptcore", before=("logging", "typing"))
    assert loaded == {"ckptcore"}


def test_saving_and_loading_load_few_modules() -> None:
    loaded = modules_loaded_by(
        "ckptcore.api.saves", "ckptcore.api.loads", before=("numpy", "ml_dtypes", "pluggy", "xxhash")
    )
    assert any(module.startswith("ckptcore.") for module in loaded)
    assert len(loaded) <= MOST_MODULES, sorted(loaded)


SLOW = ("asyncio", "email", "hashlib", "importlib.metadata", "ml_dtypes", "numpy.typing", "shutil", "tempfile")
"""Modules that take as long to import as a small save, and that only some saves and loads need."""


def test_a_plain_save_and_load_import_no_slow_module(tmp_path: Path) -> None:
    location = str(tmp_path / "c")
    code = f"import ckptcore, numpy\nckptcore.save({location!r}, {{'w': numpy.ones(3)}})\nckptcore.load({location!r})\n"
    (tmp_path / "saves.py").write_text(code, encoding="utf-8")
    loaded = modules_loaded_by("saves", before=("numpy",), path=tmp_path)
    assert "ckptcore.loading.load" in loaded
    assert not loaded.intersection(SLOW)


def test_a_plain_load_imports_only_its_reader(tmp_path: Path) -> None:
    location = tmp_path / "c"
    ckptcore.save(location, {"w": np.ones(3)})
    (tmp_path / "loads.py").write_text(f"import ckptcore\nckptcore.load({str(location)!r})\n", encoding="utf-8")
    loaded = {module for module in modules_loaded_by("loads", path=tmp_path) if module.startswith("ckptcore.loading.")}
    assert "ckptcore.loading.load" in loaded
    others = ("joint", "in_place", "selections", "composites")
    assert not [module for module in loaded if module.split(".")[2] in others]


def test_every_name_is_available_without_another_import() -> None:
    names = [*ckptcore._HOMES, *ckptcore._MODULES]
    code = f"import ckptcore\nfor name in {names!r}:\n    assert getattr(ckptcore, name) is not None, name"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ckptcore.nothing  # type: ignore[attr-defined]  # noqa: B018


THREADS_PROBE = """
import sys, tempfile, threading
import numpy
import ckptcore

imported = []

class Finder:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is not threading.main_thread():
            imported.append(name)

sys.meta_path.insert(0, Finder())
with tempfile.TemporaryDirectory() as directory:
    ACTION
assert not imported, imported
"""


def expect_imports_on_the_calling_thread(action: str) -> None:
    """Fail if another thread imports. If a process forks meanwhile, its child waits forever for the import lock."""
    subprocess.run([sys.executable, "-c", THREADS_PROBE.replace("ACTION", action)], check=True, timeout=120)


def test_a_first_asynchronous_save_imports_on_the_thread_of_the_caller() -> None:
    expect_imports_on_the_calling_thread('ckptcore.save_async(directory + "/state", {"w": numpy.ones(3)}).result()')


@pytest.mark.parametrize("arguments", ["", "{'w': numpy.ones(3)}", "select=ckptcore.select.names('w')"])
def test_a_first_asynchronous_load_imports_on_the_thread_of_the_caller(tmp_path: Path, arguments: str) -> None:
    ckptcore.save(tmp_path / "state", {"w": np.ones(3)})
    load = f"ckptcore.load_async({str(tmp_path / 'state')!r}, {arguments}).result()"
    # Import `resource` before, because any thread may import it to read limits.
    expect_imports_on_the_calling_thread(f"import resource; {load}")
