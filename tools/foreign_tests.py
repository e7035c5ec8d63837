"""Run test files of a library twice: with the library, and with our replacement in its place.

    python -m tools.foreign_tests orbax DIRECTORY FILE...
    python -m tools.foreign_tests safetensors DIRECTORY FILE...
    python -m tools.foreign_tests torch DIRECTORY FILE...
    python -m tools.foreign_tests

``DIRECTORY`` has the sources of the library, unpacked or checked out; the files are relative to it. The results of the
files are stored next to the design note ``replaced-libraries.md``, and its tables are written from them. Without
arguments, only the tables are written. Calls of functions of ckptcore by the replacement are counted, because a test
without such calls proves nothing. Packages that only the tests need, such as expecttest for those of torch, can be in
PYTHONPATH.

Results of another version of the library are dropped. No file of the archive is copied into the repository. Orbax's
tests import helpers that its wheel does not have, so they run in a temporary copy of the installed package with the
missing files of the archive. Files ``*_test_base.py`` define classes of tests inside other classes; subclasses of them
are run. Tests of torch run in a temporary copy that names CPUs and gloo where the archive names GPUs and NCCL.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple
from xml.etree import ElementTree

import pytest

from tools.foreign_replacement import CALLS, REPLACED_LIBRARY, TESTED_LIBRARY
from tools.foreign_results import NOTE, FileResult, LibraryResults, Results, fill_tables, read_results, write_results

_DISTRIBUTIONS: Final = {"orbax": "orbax-checkpoint", "safetensors": "safetensors", "torch": "torch"}

_START: Final = f"""import os

if os.environ.get({TESTED_LIBRARY!r}):
    try:
        from tools.foreign_replacement import start_process

        start_process()
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
"""
"""Source of the module `sitecustomize` of each process of the tests. It ends the process at an error: Python ignores
errors of this module, so the tests would run without the replacement."""

_FOR_CPUS: Final[Mapping[str, str]] = {
    r"\.cuda\((?:[^()]|\([^()]*\))*\)": "",
    r"torch\.cuda\.device_count\(\)": "4",
    r"cpu:gloo,cuda:nccl": "gloo",
    r"(?<=[\"'/])cuda(?::(?:\d+|\{[^}]*\}))?(?=[\"'])": "cpu",
    r"model_type=ModelType\.FSDP": "model_type=ModelType.DDP",  # FSDP requires an accelerator
    r" *@requires_nccl\(\)\n": "",
    r"@with_comms\(init_rpc=False\)": '@with_comms(init_rpc=False, backend="gloo")',
}
"""Regular expressions in test files of torch, and their replacements."""


_EARLIER_CALLS: Final = pytest.StashKey[int]()


def pytest_configure() -> None:
    """Prepare the process as Orbax's own test runner does, if tests of Orbax are run."""
    if os.environ.get(TESTED_LIBRARY) == "orbax":
        import jax
        from absl import flags

        flags.FLAGS(["tests"])
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=1, process_id=0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Remember how many calls earlier tests have made."""
    item.stash[_EARLIER_CALLS] = _calls()
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Report how many calls a test has made."""
    yield
    item.user_properties.append(("calls", _calls() - item.stash[_EARLIER_CALLS]))


def _calls() -> int:
    return Path(os.environ[CALLS]).stat().st_size


class _Outcome(NamedTuple):
    """The outcome of a test: the first line of its error, empty if it passed, and its number of calls of ckptcore."""

    error: str
    calls: int


def _prepare(library: str, archive: Path, scratch: Path) -> Path:
    """Fill the scratch directory, from which all Python processes import. Return the directory to run the tests in."""
    # Child processes of the tests need the replacement as well, and do not load the plugins of pytest.
    (scratch / "sitecustomize.py").write_text(_START)
    if library == "torch":
        shutil.copytree(archive / "test" / "distributed", scratch / "test" / "distributed")
        for path in (scratch / "test").rglob("*.py"):
            path.write_text(_for_cpus(path.read_text(encoding="utf-8")), encoding="utf-8")
        return scratch
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


def _for_cpus(source: str) -> str:
    """Return a test file of torch that uses CPUs and gloo instead of GPUs and NCCL."""
    for pattern, replacement in _FOR_CPUS.items():
        source = re.sub(pattern, replacement, source)
    return source


def _runnable(file: str, directory: Path) -> str:
    """Return the file to run: the file itself, or subclasses of the classes of tests in it."""
    if not file.endswith("_test_base.py"):
        return file
    module = file.removesuffix(".py").replace("/", ".")
    outer = re.findall(r"^class (\w+):(?:\n|.)*?^  class Test\(", (directory / file).read_text(), re.MULTILINE)
    name = f"{module.rpartition('.')[2]}_subclasses.py"
    classes = [f"class {outer_class}Test({module}.{outer_class}.Test):\n    pass\n" for outer_class in outer]
    (directory / name).write_text("\n\n".join([f"import {module}", *classes]))
    return name


def _outcomes(file: str, directory: Path, scratch: Path, library: str, *, replaced: bool) -> dict[str, _Outcome]:
    """Run a test file. Return the outcome of each test by name."""
    xml, calls = scratch / "outcomes.xml", scratch / "calls"
    xml.unlink(missing_ok=True)
    calls.write_bytes(b"")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(scratch), str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        ),
        "TEST_TMPDIR": tempfile.mkdtemp(dir=scratch),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "TORCHDYNAMO_DISABLE": "1",  # compilation takes minutes, and does not concern checkpoints
        REPLACED_LIBRARY: library if replaced else "",
        TESTED_LIBRARY: library,
        CALLS: str(calls),
    }
    options = ["-q", "-p", "tools.foreign_tests", "-p", "no:cacheprovider", f"--junitxml={xml}", "-c", os.devnull]
    if library == "orbax":
        options.append("--import-mode=importlib")  # its tests are in the package
    command = [sys.executable, "-m", "pytest", *options, f"--rootdir={directory}", _runnable(file, directory)]
    finished = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    if not xml.exists():
        raise SystemExit(f"{file}: pytest wrote no results\n{finished.stdout[-3000:]}{finished.stderr[-3000:]}")
    outcomes = {}
    for case in ElementTree.parse(xml).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        if case.find("skipped") is None:
            failed = [child for child in case if child.tag in ("failure", "error")]
            error = failed[0].get("message", "").partition("\n")[0] or "failed" if failed else ""
            made = case.find("properties/property[@name='calls']")
            outcomes[name] = _Outcome(error, 0 if made is None else int(made.get("value", "0")))
    return outcomes


def run_file(file: str, archive: Path, library: str) -> FileResult:
    """Run a test file of an archive with the library, and with the replacement."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        run = functools.partial(_outcomes, file, _prepare(library, archive, scratch), scratch, library)
        alone, ours = run(replaced=False), run(replaced=True)
    passing = sorted([name for name, outcome in alone.items() if not outcome.error])
    missing = _Outcome("not run", 0)
    failed = {name: error for name in passing if (error := ours.get(name, missing).error)}
    calls = [outcome.calls for outcome in ours.values()]
    return FileResult(
        sha256=hashlib.sha256((archive / file).read_bytes()).hexdigest(),
        tests=len(alone),
        alone=len(passing),
        replaced=len(passing) - len(failed),
        reaching=sum(map(bool, calls)),
        calls=sum(calls),
        failed=failed,
    )


def with_result(results: Results, library: str, file: str, result: FileResult) -> Results:
    """Return the results and the result of a file. Results of another version of the library are dropped."""
    version = importlib.metadata.version(_DISTRIBUTIONS[library])
    known = results[library].files if library in results and results[library].version == version else {}
    return {**results, library: LibraryResults(version, {**known, file: result})}


def main(arguments: Sequence[str]) -> int:
    """Run test files if there are any, store their results, and write the tables. Return 0."""
    if arguments:
        library, unpacked, *files = arguments
        archive = Path(unpacked).resolve()
        for file in files:
            result = run_file(file, archive, library)
            print(file, result, flush=True)
            write_results(with_result(read_results(), library, file, result))
    NOTE.write_text(fill_tables(NOTE.read_text(encoding="utf-8"), read_results()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
