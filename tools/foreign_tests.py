"""Test files of a library, run twice: with the library, and with our replacement in its place.

    python -m tools.foreign_tests orbax DIRECTORY FILE...
    python -m tools.foreign_tests safetensors DIRECTORY FILE...
    python -m tools.foreign_tests torch DIRECTORY FILE...

``DIRECTORY`` is an unpacked source archive of the library; the files are relative to it. The output is a table: for
each file the number of tests that pass with the library, and how many of these pass with the replacement. The names of
the others follow, with their errors. Packages that only the tests need, such as expecttest for those of torch, can be
in PYTHONPATH.

No file of the archive is copied into the repository. Orbax's tests import helpers that its wheel does not have, so they
run in a temporary copy of the installed package with the missing files of the archive.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from xml.etree import ElementTree

_VARIABLE: Final = "CKPTCORE_REPLACED_LIBRARY"
_IS_ORBAX: Final = "CKPTCORE_TESTS_OF_ORBAX"
_ORBAX: Final = "orbax.checkpoint.experimental.v1"
_OURS: Final = "ckptcore_integrations"

REPLACED: Final[Mapping[str, Mapping[str, str]]] = {
    "orbax": {
        f"{_ORBAX}._src.saving.saving": f"{_OURS}.orbax_v1.saving",
        f"{_ORBAX}._src.loading.loading": f"{_OURS}.orbax_v1.loading",
        f"{_ORBAX}._src.metadata.loading": f"{_OURS}.orbax_v1.loading",
        f"{_ORBAX}._src.partial.saving": f"{_OURS}.orbax_v1.partial",
        f"{_ORBAX}._src.training.checkpointer": f"{_OURS}.orbax_v1.training",
        _ORBAX: f"{_OURS}.orbax_v1",
    },
    "safetensors": {
        "safetensors.torch": f"{_OURS}.safetensors.torch",
        "safetensors.numpy": f"{_OURS}.safetensors.numpy",
        "safetensors.flax": f"{_OURS}.safetensors.flax",
        "safetensors": f"{_OURS}.safetensors",
    },
    "torch": {"torch.distributed.checkpoint": f"{_OURS}.torch_dcp"},
}
"""The modules of each library that are replaced, and ours."""


def replace_modules(library: str) -> None:
    """Put our modules in place of those of a library, for all later imports in this process.

    A package keeps its other names and its submodules. Any other module is replaced as a whole, so that tests which
    patch its functions patch those that are called.
    """
    pairs = [(importlib.import_module(a), importlib.import_module(b)) for a, b in REPLACED[library].items()]
    for theirs, ours in pairs:
        if hasattr(theirs, "__path__"):
            _keep_original(theirs)
            vars(theirs).update({name: getattr(ours, name) for name in ours.__all__})
            continue
        for name, value in vars(theirs).items():
            vars(ours).setdefault(name, value)
        sys.modules[theirs.__name__] = ours
        package, _, name = theirs.__name__.rpartition(".")
        setattr(sys.modules[package], name, ours)
    if library == "torch":
        vars(pairs[0][0]).update(FileSystemWriter=_writer, FileSystemReader=pairs[0][1].Reader)


def _keep_original(package: ModuleType) -> None:
    """Give our modules a copy of a package, because they call functions of the library that are replaced in it."""
    original = ModuleType(package.__name__)
    vars(original).update(vars(package))
    for module in [module for name, module in sys.modules.items() if name.startswith(f"{_OURS}.")]:
        for name in [name for name, value in vars(module).items() if value is package]:
            setattr(module, name, original)


def _writer(path: str, *_: Any, overwrite: bool = True, **__: Any) -> Any:
    """Return our `Writer`, without the options of torch's."""
    from ckptcore_integrations.torch_dcp import Writer

    return Writer(path, overwrite=overwrite)


def pytest_configure() -> None:
    """Do what Orbax's own runner of tests does, if its tests are run."""
    if os.environ.get(_IS_ORBAX):
        import jax
        from absl import flags

        flags.FLAGS(["tests"])
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=1, process_id=0)


def _prepare(library: str, archive: Path, scratch: Path) -> Path:
    """Return the directory in which the tests run. Fill the scratch directory, which all Python processes import."""
    # Child processes of the tests need the replacement as well, and do not load the plugins of pytest.
    (scratch / "sitecustomize.py").write_text(
        f"import os\nif os.environ.get({_VARIABLE!r}):\n    from tools.foreign_tests import replace_modules\n\n"
        f"    replace_modules(os.environ[{_VARIABLE!r}])\n"
    )
    if library != "orbax":
        return archive
    installed = Path(importlib.import_module("orbax.checkpoint").__file__ or "").parent.parent
    package = scratch / "orbax"
    shutil.copytree(installed, package)
    for path in (archive / "orbax").rglob("*"):
        copied = package / path.relative_to(archive / "orbax")
        if path.is_file() and not copied.exists():
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied)
    return scratch


def _outcomes(file: str, directory: Path, scratch: Path, library: str, *, replaced: bool) -> dict[str, str]:
    """Run a test file. Return the first line of the error of each test by name; empty if it passed."""
    xml = scratch / "outcomes.xml"
    xml.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(scratch), str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        ),
        "TEST_TMPDIR": tempfile.mkdtemp(dir=scratch),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        _VARIABLE: library if replaced else "",
        _IS_ORBAX: "1" if library == "orbax" else "",
    }
    options = ["-q", "-p", "tools.foreign_tests", "-p", "no:cacheprovider", f"--junitxml={xml}", "-c", os.devnull]
    if library == "orbax":
        options.append("--import-mode=importlib")  # its tests are in the package
    command = [sys.executable, "-m", "pytest", *options, f"--rootdir={directory}"]
    finished = subprocess.run(
        [*command, file], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    if not xml.exists():
        raise SystemExit(f"{file}: pytest wrote no results\n{finished.stdout[-3000:]}{finished.stderr[-3000:]}")
    outcomes = {}
    for case in ElementTree.parse(xml).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        if case.find("skipped") is None:
            failed = [child for child in case if child.tag in ("failure", "error")]
            outcomes[name] = failed[0].get("message", "").partition("\n")[0] or "failed" if failed else ""
    return outcomes


def main(arguments: Sequence[str]) -> int:
    """Print the table. Return 0."""
    library, archive, *files = arguments
    rows, failures = [], []
    with tempfile.TemporaryDirectory() as scratch:
        directory = _prepare(library, Path(archive).resolve(), Path(scratch))
        run = functools.partial(_outcomes, directory=directory, scratch=Path(scratch), library=library)
        for file in files:
            alone = run(file, replaced=False)
            passing = {name for name, error in alone.items() if not error}
            ours = run(file, replaced=True)
            wrong = {name: ours.get(name, "not run") for name in sorted(passing) if ours.get(name, "not run")}
            rows.append(f"| `{file}` | {len(alone)} | {len(passing)} | {len(passing) - len(wrong)} |")
            failures += [f"{file}: {name}: {error}" for name, error in wrong.items()]
            print(rows[-1], flush=True)
    print("\n| file | tests | pass with the library | pass with the replacement |\n|---|---|---|---|", *rows, sep="\n")
    print("", *failures, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
