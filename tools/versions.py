"""Test the distributions with other versions of Python and packages: ``python -m tools.versions oldest|newest|short``.

- ``oldest``: Python 3.11 and the lowest versions that the distributions accept, those of `constraints-oldest.txt`; then
  replacements and adapters with those of `constraints-oldest-adapters.txt`.
- ``newest``: Python 3.12, 3.13 and 3.14 and the newest versions of the package index, adapters on 3.12.
- ``short``: the core, NumPy and JAX, with the lowest versions and on Python 3.12. Part of `.ci/run`.

An interpreter is taken from an environment variable such as PYTHON312, from PATH, or from pyenv. Without it a run is
skipped with a message. Environments are kept in `.venv-versions`, and updated if a requirement changes; those with the
newest versions are updated in each run.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[1]

OLDEST: Final = "constraints-oldest.txt"
"""The lowest versions. A test compares them with the requirements of the distributions."""

OLDEST_ADAPTERS: Final = "constraints-oldest-adapters.txt"
"""The lowest versions for replacements, adapters and single controllers, which need newer ones than the rest."""

_PINNED: Final = "constraints.txt"

_RUNNERS: Final = ("pytest-xdist", "setuptools")
"""Further packages of every environment."""

KEEP_FILES: Final = ("-o", "tmp_path_retention_policy=all", "-o", "tmp_path_retention_count=0")
"""Remove the files of tests at the end of a run. An old pytest gives another test the name of a directory that it has
removed, and our tests name storages in memory after their directories."""


class Part(NamedTuple):
    """Distributions that are tested together.

    Attributes:
        distributions: names of our distributions, with extras.
        packages: packages that only the tests need.
        tests: files and directories of tests.
    """

    distributions: Sequence[str]
    packages: Sequence[str]
    tests: Sequence[str]


class Run(NamedTuple):
    """Tests of one part in one environment.

    Attributes:
        python: the version of Python, such as "3.12".
        constraints: a file of constraints; empty for the newest versions.
        part: what is installed and tested.
    """

    python: str
    constraints: str
    part: Part


def projects() -> Mapping[str, Mapping[str, Any]]:
    """Return the ``project`` tables of all distributions by name, that of the core first."""
    files = [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]
    tables = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files]
    return {table["name"]: table for table in tables}


def _extras(distribution: str) -> set[str]:
    """Return the extras of one of our distributions."""
    return {*projects()[distribution]["optional-dependencies"]}


def _group(name: str) -> Sequence[str]:
    """Return the packages of a dependency group."""
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    return list(tables[name])


_CORE: Final = Part(
    ["ckptcore-testing", "ckptcore-collective", "ckptcore-jax", "ckptcore-dcp", "ckptcore-orbax"],
    ["safetensors", "tqdm"],
    [
        "tests/model",
        "tests/planning",
        "tests/loading/test_load.py",
        "tests/saving/test_save.py",
        "tests/saving/test_save_async.py",
        "tests/saving/test_after_failures.py",
        "tests/io/test_memory.py",
        "tests/io/test_reader.py",
        "tests/io/test_checksums.py",
        "tests/io/test_progress.py",
        "plugins/jax_backend/tests/test_jax_abstracts.py",
        "plugins/jax_backend/tests/test_jax_leaves.py",
        "plugins/jax_backend/tests/test_jax_plans.py",
        "plugins/jax_backend/tests/test_jax_shardings.py",
    ],
)
_WITH_ORBAX: Final = [
    "plugins/jax_backend/tests/test_equinox_matrix.py",
    "plugins/jax_backend/tests/test_jax_containers.py",
    "plugins/jax_backend/tests/test_jax_libraries_matrix.py",
    "plugins/jax_backend/tests/test_jax_settings.py",
    "plugins/jax_backend/tests/test_nnx_matrix.py",
    "plugins/jax_backend/tests/test_nnx_modules.py",
    "plugins/jax_backend/tests/test_optax_matrix.py",
    "plugins/jax_backend/tests/test_train_state_matrix.py",
    "plugins/layout_orbax/tests/test_conversions.py",
    "plugins/layout_orbax/tests/test_copies.py",
    "plugins/layout_orbax/tests/test_handlers.py",
    "plugins/layout_orbax/tests/test_jobs.py",
    "plugins/layout_orbax/tests/test_names.py",
    "plugins/layout_orbax/tests/test_orbax_containers.py",
    "plugins/layout_orbax/tests/test_orbax_files.py",
    "plugins/layout_orbax/tests/test_orbax_loads_ours.py",
    "plugins/layout_orbax/tests/test_orbax_matching.py",
    "plugins/layout_orbax/tests/test_orbax_trees.py",
    "plugins/layout_orbax/tests/test_ours_loads_orbax.py",
    "plugins/layout_orbax/tests/test_runs.py",
    "plugins/layout_orbax/tests/test_unreadable_arrays.py",
    "plugins/layout_orbax/tests/test_weaknesses_of_orbax.py",
    "tests/policies/test_orbax.py",
]
"""Tests that call version 1 of Orbax, which needs newer versions than `ckptcore-orbax`, or NNX of Flax 0.12."""

_OF_ADAPTERS: Final = ROOT / "plugins" / "integrations" / "tests"

UNTESTED_EXTRAS: Final = ("deepspeed", "torch-checkpointing", "torchtitan", "trl", "verl", "vllm")
"""Extras of `ckptcore-integrations` that are tested with constraints.txt only: DeepSpeed compiles an operator,
TorchTitan contradicts other libraries (`make test-integrations` tests these two), torch_checkpointing has one version,
and vLLM, TRL and verl need many others (`make test-vllm`, `make test-engines`)."""

_COLOCATED: Final = [
    "plugins/jax_backend/tests/test_colocated_executor.py",
    "plugins/jax_backend/tests/test_colocated_saves.py",
]
"""Tests of single controllers: the extra `colocated`."""

_FRAMEWORKS: Final = Part(
    [
        "ckptcore-azure[test]",
        "ckptcore-collective",
        "ckptcore-dcp",
        "ckptcore-formats[hdf5]",
        "ckptcore-fsspec[test]",
        "ckptcore-gcs[test]",
        "ckptcore-incremental",
        "ckptcore-jax[test]",
        "ckptcore-orbax",
        "ckptcore-ray",
        "ckptcore-recovery[erasure]",
        "ckptcore-s3[test]",
        "ckptcore-testing",
        "ckptcore-tiers",
        "ckptcore-tools[opentelemetry]",
        "ckptcore-torch",
        "ckptcore-transforms",
        "ckptcore-versions[blake3]",
        "ckptcore-view",
    ],
    ["markdown-it-py", "opentelemetry-sdk", "orbax-checkpoint", "safetensors", "tqdm"],
    [
        *[
            str(directory.relative_to(ROOT))
            for directory in sorted(ROOT.glob("plugins/*/tests"))
            if "integrations" not in str(directory)
        ],
        *_CORE.tests[:2],
        "tests/io",
        "tests/golden",
        "tests/open_checkpoints",
        "tests/policies",
        "tests/saving/test_save.py",
        "tests/saving/test_save_async.py",
        "tests/step_names",
        "tests/tiers",
        # These tests need a browser and tools of this repository, which have one version.
        "--ignore=plugins/view/tests/page",
        # These tests need other libraries of constraints.txt, whose newest versions need newer packages: TorchAO has
        # wheels for only one version of PyTorch; Zarr, SciPy and Transformers need NumPy 2; NumPyro, Penzai and Haiku
        # need a newer JAX; torch_checkpointing and the tests of meshes need a newer PyTorch.
        "--ignore=plugins/formats/tests/test_conversions.py",
        "--ignore=plugins/formats/tests/test_numpy_files.py",
        "--ignore=plugins/formats/tests/test_pickle_files.py",
        "--ignore=plugins/formats/tests/test_rank_files.py",
        "--ignore=plugins/formats/tests/test_torch_checkpointing.py",
        "--ignore=plugins/jax_backend/tests/test_jax_keys.py",
        "--ignore=plugins/jax_backend/tests/test_jax_registered_subclasses.py",
        "--ignore=plugins/jax_backend/tests/test_static_content.py",
        "--ignore=plugins/layout_orbax/tests/test_zarr_groups.py",
        "--ignore=plugins/torch_backend/tests/test_torchao.py",
        "--ignore=plugins/tools/tests/consolidation/test_hugging_face.py",
        "--ignore=plugins/transforms/tests/test_dequantizing.py",
        "--ignore=plugins/transforms/tests/test_dequantizing_parts.py",
        "--ignore=plugins/transforms/tests/test_quantised_jobs.py",
        "--ignore=plugins/transforms/tests/test_quantized.py",
        # These tests need extras with newer requirements: `_ADAPTERS` has them.
        *[f"--ignore={test}" for test in _WITH_ORBAX],
        *[f"--ignore={test}" for test in _COLOCATED],
    ],
)
_ADAPTERS: Final = Part(
    [
        "ckptcore-formats[hdf5]",
        "ckptcore-fsspec",
        "ckptcore-jax[colocated]",
        f"ckptcore-integrations[{','.join(sorted(_extras('ckptcore-integrations') - {*UNTESTED_EXTRAS, 'test'}))}]",
        "ckptcore-testing",
    ],
    _group("trainers"),
    [
        "--trainers",
        "plugins/integrations/tests",
        "--ignore=plugins/integrations/tests/trainers/test_deepspeed.py",
        "--ignore=plugins/integrations/tests/trainers/test_torchtitan.py",
        "--ignore=plugins/integrations/tests/trainers/test_versions.py",  # that those of constraints.txt are installed
        "--ignore=plugins/integrations/tests/engines",
        "--ignore=plugins/integrations/tests/vllm",
        "--ignore=plugins/integrations/tests/test_torch_checkpointing.py",
        *_WITH_ORBAX,
        *_COLOCATED,
    ],
)


def runs_of(kind: str) -> Sequence[Run]:
    """Return the runs of ``oldest``, ``newest`` or ``short``."""
    if kind == "oldest":
        return [Run("3.11", OLDEST, _FRAMEWORKS), Run("3.11", OLDEST_ADAPTERS, _ADAPTERS)]
    if kind == "newest":
        newest = [Run(python, "", _FRAMEWORKS) for python in ("3.12", "3.13", "3.14")]
        return [*newest, Run("3.12", "", _ADAPTERS)]
    return [Run("3.11", OLDEST, _CORE), Run("3.12", _PINNED, _CORE)]


def requirements(distributions: Iterable[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return what distributions of ours need: all of ours by name, themselves included, and requirements on others."""
    ours = projects()
    waiting = [Requirement(text) for text in ("ckptcore", *distributions)]
    seen: set[tuple[str, str]] = set()
    others: dict[str, None] = {}
    while waiting:
        requirement = waiting.pop()
        table = ours.get(canonicalize_name(requirement.name))
        if table is None:
            others[str(requirement)] = None
            continue
        for extra in ("", *requirement.extras):
            if (table["name"], extra) not in seen:
                seen.add((table["name"], extra))
                needed = table.get("optional-dependencies", {})[extra] if extra else table["dependencies"]
                waiting += [Requirement(text) for text in needed]
    return sorted({name for name, _ in seen}), sorted(others)


def find_interpreter(python: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the interpreter of a version of Python, or None."""
    given = environment.get(f"PYTHON{python.replace('.', '')}")
    if given:
        return given
    if sys.version_info[:2] == tuple(map(int, python.split("."))):
        return sys.executable
    program = shutil.which(f"python{python}", path=environment.get("PATH"))
    if program and subprocess.run([program, "--version"], capture_output=True, check=False).returncode == 0:
        return program  # a shim of pyenv exists, and fails, even if its version is not selected
    pyenv = Path(environment.get("PYENV_ROOT") or Path.home() / ".pyenv")
    installed = sorted(pyenv.glob(f"versions/{python}.*/bin/python"))
    return str(installed[-1]) if installed else None


def _prepare(run: Run, interpreter: str) -> Path:
    """Make the environment of a run, unless it exists with the same requirements. Return its interpreter."""
    directory = ROOT / ".venv-versions" / f"{run.python}-{Path(run.constraints or 'newest').stem}"
    ours, others = requirements(run.part.distributions)
    wanted = [*others, *run.part.packages, *_RUNNERS]
    pins = (ROOT / run.constraints).read_text(encoding="utf-8") if run.constraints else ""
    stamp = directory / f"{hashlib.sha256(repr((interpreter, wanted, pins)).encode()).hexdigest()}.stamp"
    python = directory / "bin" / "python"
    if not stamp.exists() or not run.constraints:  # newer versions may have been released
        for old in directory.glob("*.stamp"):
            old.unlink()
        if not python.exists():
            subprocess.run([interpreter, "-m", "venv", "--without-pip", str(directory)], check=True)
        install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile"]
        constrained = ["--constraint", str(ROOT / run.constraints)] if run.constraints else ["--upgrade"]
        subprocess.run([*install, *constrained, *wanted], check=True)
        _link_ours(ours, next((directory / "lib").glob("python*/site-packages")))
        stamp.touch()
    return python


def _link_ours(names: Iterable[str], packages: Path) -> None:
    """Copy the files of our distributions, editable installs of this environment: to build them again takes longer."""
    for name in names:
        for file in importlib.metadata.distribution(name).files or ():
            target = packages / file
            if target.parent.parent in (packages, packages.parent) and target.suffix != ".pyc":
                target.parent.mkdir(exist_ok=True)
                shutil.copy(file.locate(), target)


def _describe(python: Path) -> Iterator[str]:
    """Yield the names and versions of all distributions in an environment."""
    program = "from importlib.metadata import distributions; "
    program += "print(*sorted({f'{item.name}=={item.version}' for item in distributions()}))"
    yield from subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.split()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests, and return the exit status: 0 if all runs passed, also if one was skipped.

    Args:
        arguments: the arguments; those after ``--`` are for pytest.
    """
    given = [*(sys.argv[1:] if arguments is None else arguments), "--"]
    own, for_pytest = given[: given.index("--")], given[given.index("--") + 1 : -1]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=["oldest", "newest", "short"])
    parser.add_argument("--workers", default="2", help="processes that run the tests")
    parser.add_argument("--pythons", help="versions of Python, such as 3.12,3.14; all by default")
    options = parser.parse_args(own)
    failed = []
    for run in runs_of(options.kind):
        if options.pythons and run.python not in options.pythons.split(","):
            continue
        interpreter = find_interpreter(run.python)
        if interpreter is None:
            variable = f"PYTHON{run.python.replace('.', '')}"
            print(f"skipped: Python {run.python} is not installed; set {variable} to its interpreter")
            continue
        python = _prepare(run, interpreter)
        print(f"Python {run.python}, {run.constraints or 'newest versions'}:", *_describe(python), flush=True)
        kept = KEEP_FILES if run.constraints in (OLDEST, OLDEST_ADAPTERS) else ()
        command = [str(python), "-m", "pytest", "-n", options.workers, *kept, *run.part.tests, *for_pytest]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(f"{run.python} ({run.constraints or 'newest'})")
    if failed:
        print(f"failed: {options.kind} versions on Python {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
