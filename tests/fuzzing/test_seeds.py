"""Seeds of the fuzzer, and inputs that once did harm. None does harm now. `make fuzz` finds new inputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptcore.errors import CorruptCheckpointError
from tests.fuzzing.checks import CORPUS, Checker, HarmError, Observer
from tests.fuzzing.places import Place, place
from tests.fuzzing.reads import Read
from tests.fuzzing.targets import TARGETS, Target


@pytest.fixture(scope="session")
def observer() -> Observer:
    return Observer()


def test_each_directory_of_seeds_has_a_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_do_no_harm(name: str, tmp_path: Path, observer: Observer) -> None:
    _replay(Checker(TARGETS[name], tmp_path, observer), name, is_thorough=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_seeds_do_no_harm_to_any_call(name: str, tmp_path: Path, observer: Observer) -> None:
    _replay(Checker(TARGETS[name], tmp_path, observer), name, is_thorough=True)


def _replay(checker: Checker, name: str, *, is_thorough: bool) -> None:
    # Intact files must be readable. Otherwise the readers would refuse every input for its checksum or length.
    assert all(checker.succeeded)
    for seed in sorted((CORPUS / name).iterdir()):
        check = checker.check if is_thorough or seed.name.startswith("crash-") else checker.check_quickly
        try:
            check(seed.read_bytes())
        except BaseException as error:
            error.add_note(f"the input was {seed}")
            raise


# --- the checks themselves --------------------------------------------------------------------------------------------


def _refuse(location: Path) -> None:
    raise CorruptCheckpointError("damaged")


def _fail(location: Path) -> None:
    raise ValueError("not expected")


def _leave(location: Path) -> None:
    with pytest.raises(FileNotFoundError):
        (location / "../../../secret").read_bytes()


def _evaluate(location: Path) -> None:
    eval("1 + 1")


def _allocate(location: Path) -> None:
    bytes(20 << 20)


def _import(location: Path) -> None:
    with pytest.raises(ImportError):
        __import__((location / "f").read_text())


def _checker(read: Read, directory: Path, observer: Observer) -> Checker:
    def places() -> list[Place]:
        return [place({"f": b"no_such_module"}, "f")]

    return Checker(Target(places, (read,)), directory, observer)


def test_an_expected_error_is_no_harm(tmp_path: Path, observer: Observer) -> None:
    checker = _checker(_refuse, tmp_path, observer)
    checker.check(b"\0x")
    assert checker.succeeded == [0]


@pytest.mark.parametrize("read", [_leave, _evaluate, _allocate, _import])
def test_harm_is_detected(read: Read, tmp_path: Path, observer: Observer) -> None:
    with pytest.raises(HarmError):
        _checker(read, tmp_path, observer).check(b"\0no_such_module")


def test_an_unexpected_error_is_detected(tmp_path: Path, observer: Observer) -> None:
    with pytest.raises(ValueError, match="not expected"):
        _checker(_fail, tmp_path, observer)


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 1 << 20
