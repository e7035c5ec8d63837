"""Wheels as users install them: the features of the core alone, and the features that each extra adds."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ckptcore.distributions import DISTRIBUTIONS, Distribution
from tests.architecture.sources import ROOT
from tests.distributions import alone
from tests.distributions.wheels import Environment
from tests.docs.pages import code_blocks
from tools.release import Wheel, build

pytestmark = pytest.mark.slow

GOLDEN = ROOT / "tests" / "golden" / "checkpoints"
UNFINISHED = {"claim", "partial"}
"""Golden checkpoints of unfinished saves, which no load accepts."""

OF_HOSTS = {"hosts"}
"""Golden checkpoints of several hosts, each in a directory of its own. One process alone sees only parts of them."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Wheel]:
    return build(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def core(wheels: Mapping[str, Wheel], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("core") / "env", wheels, ["ckptcore"])


def _program(environment: Environment, *arguments: str) -> Any:
    return json.loads(environment.run(str(Path(alone.__file__)), *arguments))


def _of_extra(distribution: Distribution, wheels: Mapping[str, Wheel]) -> Wheel:
    """Return the wheel of a distribution, found by its import package."""
    (match,) = [wheel for wheel in wheels.values() if distribution.package in wheel.packages]
    return match


def test_the_core_alone_saves_loads_and_trains(core: Environment, tmp_path: Path) -> None:
    result = _program(core, "use", str(tmp_path))
    assert set(result["distributions"]) == {"ckptcore", "ml_dtypes", "numpy", "pluggy", "xxhash"}
    assert result["modules"] == []
    assert not Path(result["file"]).is_relative_to(ROOT)


def test_the_core_alone_loads_every_golden_checkpoint(core: Environment) -> None:
    outcomes = _program(core, "golden", str(GOLDEN))
    assert outcomes == alone.outcomes(GOLDEN)
    loaded = {
        Path(name).parts[0]
        for name, outcome in outcomes.items()
        for way in ("load", "load_checkpointables")
        if len(outcome[way]) == 64
    }
    assert loaded == {path.name for path in GOLDEN.iterdir()} - UNFINISHED
    damaged = {name: outcome for name, outcome in outcomes.items() if outcome["verify"] != "True"}
    assert {Path(name).parts[0] for name in damaged} <= UNFINISHED | OF_HOSTS


def test_errors_of_the_core_say_how_to_install_missing_features(core: Environment, tmp_path: Path) -> None:
    messages = _program(core, "missing", str(tmp_path))
    expected = {distribution.extra: distribution.hint for distribution in DISTRIBUTIONS}
    assert messages.keys() == expected.keys()
    wrong = [
        f"{asked}: {error}"
        for extra, errors in messages.items()
        for asked, error in errors.items()
        if expected[extra] not in error
    ]
    assert wrong == []
    assert list(tmp_path.iterdir()) == []


def test_the_core_alone_has_a_version_help_and_a_listing(core: Environment, wheels: Mapping[str, Wheel]) -> None:
    version = wheels["ckptcore"].path.name.split("-")[1]
    assert core.run("-c", "import ckptcore; print(ckptcore.__version__)").strip() == version
    described = core.run("-c", "import ckptcore; help(ckptcore)")
    assert "save" in described and "Checkpointer" in described
    names = json.loads(core.run("-c", "import ckptcore, json; print(json.dumps(dir(ckptcore)))"))
    assert not {"Final", "TYPE_CHECKING", "importlib", "logging"} & set(names)


def test_the_command_of_the_core_alone_says_how_to_install_the_tools(core: Environment) -> None:
    program = "import subprocess, sys; done = subprocess.run([sys.executable, '-I', '-m', 'ckptcore'], stderr=-1); "
    error = core.run("-c", program + "print(done.returncode, done.stderr.decode())")
    assert not error.startswith("0 ")
    assert "pip install 'ckptcore[tools]'" in error and "Traceback" not in error


def test_every_distribution_is_listed_or_required_by_a_listed_one(wheels: Mapping[str, Wheel]) -> None:
    core = wheels["ckptcore"]
    named = {_of_extra(distribution, wheels).name for distribution in DISTRIBUTIONS}
    required = {requirement.name for name in named for requirement in wheels[name].requires}
    assert set(wheels) - named - required == {"ckptcore"} - required
    for distribution in DISTRIBUTIONS:
        assert distribution.extra in core.extras
        needed = {
            requirement.name
            for requirement in core.requires
            if requirement.marker is not None and requirement.marker.evaluate({"extra": distribution.extra})
        }
        assert needed == {_of_extra(distribution, wheels).name}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda distribution: str(distribution.extra))
def test_an_extra_adds_its_features(distribution: Distribution, wheels: Mapping[str, Wheel], tmp_path: Path) -> None:
    environment = Environment(tmp_path / "env", wheels, [f"ckptcore[{distribution.extra}]"])
    (tmp_path / "scratch").mkdir()
    assert _program(environment, "added", distribution.extra, str(tmp_path / "scratch")) == {}


def test_the_wheels_pass_twine_check(wheels: Mapping[str, Wheel]) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *[str(wheel.path) for wheel in wheels.values()]]
    checked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.count("PASSED") == len(wheels)


def test_every_wheel_has_the_licence_and_a_description(wheels: Mapping[str, Wheel]) -> None:
    for wheel in wheels.values():
        with zipfile.ZipFile(wheel.path) as archive:
            (licence,) = [name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
            assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
            (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            assert f"\n# {wheel.name}\n" in archive.read(metadata).decode("utf-8")


def test_all_wheels_install_together(wheels: Mapping[str, Wheel], tmp_path: Path) -> None:
    environment = Environment(tmp_path / "env", wheels, ["ckptcore[all]"])
    packages = sorted({package for wheel in wheels.values() for package in wheel.packages})
    environment.run("-c", "".join(f"import {package}\n" for package in packages))
    described = environment.run("-m", "ckptcore", "plugins")
    assert "failed" not in described
    assert all(name in described for name in ("azure", "dcp", "fsspec", "gcs", "jax", "orbax", "ray", "s3", "torch"))


@pytest.mark.parametrize(("page", "runs"), [("README.md", 2), ("PACKAGE.md", 1)])
def test_the_quick_starts_work_from_wheels(page: str, runs: int, wheels: Mapping[str, Wheel], tmp_path: Path) -> None:
    """The examples run without the repository. Those of the README run twice, and resume in the second run."""
    environment = Environment(tmp_path / "env", wheels, ["ckptcore[torch]", "ckptcore[jax]"])
    blocks = code_blocks((ROOT / page).read_text(encoding="utf-8"))
    program = "\n".join(block.code for block in blocks if block.language == "python")
    (tmp_path / "work").mkdir()
    for _ in range(runs):
        environment.run("-c", f"import os\nos.chdir({str(tmp_path / 'work')!r})\n{program}")
    assert (tmp_path / "work" / "runs").is_dir()
