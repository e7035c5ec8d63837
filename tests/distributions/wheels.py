"""Environments with wheels of some of our distributions, installed without a network."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.release import Wheel


class Environment:
    """A virtual environment with some of our distributions and their requirements.

    Our distributions are installed from wheels. Other distributions are links to the installation that runs the tests,
    because the test has no network. Each one is linked separately, because a path to all of them would hide a missing
    requirement.

    Args:
        directory: the directory of the environment.
        wheels: all wheels.
        requirements: the requirements to install, with extras.
    """

    def __init__(self, directory: Path, wheels: Mapping[str, Wheel], requirements: Iterable[str]) -> None:
        venv.create(directory, with_pip=False, symlinks=True)
        self._python = directory / "bin" / "python"
        (self._packages,) = (directory / "lib").glob("python*/site-packages")
        ours, others = _closure([Requirement(text) for text in requirements], wheels)
        command = [sys.executable, "-m", "pip", "--python", str(self._python), "install", "--quiet"]
        _run(command, ["--no-index", "--no-deps", "--no-compile", *[str(wheels[name].path) for name in ours]])
        for name in others:
            self._link(name)

    def _link(self, name: str) -> None:
        installed = distribution(name)
        tops = {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            link = self._packages / top
            if not link.exists():
                link.symlink_to(Path(str(installed.locate_file(top))).resolve())

    def run(self, *arguments: str) -> str:
        """Run Python in the environment, isolated from that of the tests. Return its output.

        Raises:
            AssertionError: the program failed.
        """
        return _run([str(self._python), "-I", *arguments], [])


def _closure(wanted: Sequence[Requirement], wheels: Mapping[str, Wheel]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the names of our and of other distributions that are directly or indirectly required."""
    seen: set[tuple[str, str]] = set()
    waiting = [(requirement, "") for requirement in wanted]
    required: dict[str, None] = {}
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for inner in ("", *requirement.extras):
            if (name, inner) not in seen:
                seen.add((name, inner))
                required[name] = None
                waiting += [(needed, inner) for needed in _requires(name, wheels)]
    return [name for name in required if name in wheels], [name for name in required if name not in wheels]


def _requires(name: str, wheels: Mapping[str, Wheel]) -> Sequence[Requirement]:
    if name in wheels:
        return wheels[name].requires
    try:
        return [Requirement(text) for text in distribution(name).requires or ()]
    except PackageNotFoundError as error:
        raise AssertionError(f"{name} is required and not installed") from error


def _run(command: Sequence[str], arguments: Sequence[str]) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([*command, *arguments], check=False, capture_output=True, text=True, env=kept, timeout=540)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
