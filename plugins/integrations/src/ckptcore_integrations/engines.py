"""Engines: replace the weights of a server of inference by a version, and check what it serves afterwards.

A follower prepares a version while the engine serves the version before. `install` pauses the engine only while it
copies the version from the local files.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Protocol

import ckptcore
from ckptcore import Context
from ckptcore.context import JobOptions, SingleProcess
from ckptcore.errors import CheckpointError, TargetUndefinedError
from ckptcore.events import logger_named

if TYPE_CHECKING:
    from ckptcore_versions import Version

__all__ = ["Engine", "EngineError", "EngineRefusedError", "install"]

logger = logger_named("ckptcore.integrations.engines")

_ALONE: Final = Context(job=JobOptions(coordinator=SingleProcess()))

_INCOMPLETE: Final = "incomplete: "
"""Begin of the label of an engine during an install."""


class EngineError(CheckpointError, RuntimeError):
    """A request to an engine failed, or was not answered in time."""


class EngineRefusedError(EngineError):
    """A request had no effect: the engine was not reached, or refused it before it did anything."""


class Engine(Protocol):
    """A server of inference whose weights can be replaced. One thread uses it at a time.

    Every method raises `EngineError` if it fails, and `EngineRefusedError` if it certainly had no effect.

    Attributes:
        name: its address, for messages, without secrets.
        remedy: what to do if its weights may be a mixture of two versions.
    """

    name: str
    remedy: str

    def pause(self) -> None:
        """Stop generation, so that no request uses weights of two versions at once."""

    def relabel(self, label: str) -> None:
        """Change only the label."""

    def install(self, directory: str, label: str) -> None:
        """Replace all weights, and label them. The engine is paused.

        Args:
            directory: the directory of the version, with safetensors files.
            label: the label of the version.
        """

    def resume(self) -> None:
        """Continue generation."""

    def label(self) -> str:
        """Return the label of the weights that the engine has. Does not interrupt generation."""

    def checksum(self) -> str:
        """Return a checksum of the weights in the memory of the engine.

        Engines of the same kind and settings have the same checksum if their weights are equal. It cannot be compared
        with the files of a version, because engines fuse, divide and convert arrays.
        """


def install(engine: Engine, version: Version, *, label: str | None = None) -> float:
    """Install a version in an engine: check that both are there, pause, install, check the label, resume.

    Generation resumes if the weights are certainly those of one version: the new one, or the one before if the install
    failed before it changed anything. Otherwise the engine stays paused, and the error says what to do.

    During the install the engine has a label such as ``"incomplete: 7"``. So also a later install, even by another
    process, does not resume it before a whole version is installed.

    It installs the whole version each time. So it can be called again after any error, and for an engine that was
    restarted. Only one program may install versions in an engine.

    Args:
        engine: the engine. It needs the directory of the version at the same path.
        version: the version that a follower yielded.
        label: the label for the engine; None: the number of the version.

    Returns:
        The time that the engine was paused, in seconds.

    Raises:
        CheckpointError: the directory of the version cannot be read, such as after the follower removed it. The engine
            was not paused.
        EngineError: the version was not installed, and the engine serves the weights before; or it is installed, and
            the engine cannot be resumed. The message says which.
        TargetUndefinedError: the engine may have a mixture of two versions, or weights of another program. It was not
            resumed.
    """
    if label is None:
        label = str(version.number)
    with ckptcore.open(version.directory, context=_ALONE):
        before = engine.label()
    begin = time.monotonic()
    try:
        engine.pause()
        engine.relabel(f"{_INCOMPLETE}{label}")
    except EngineError as error:
        _return_to(before, engine, version, error)
        raise
    try:
        engine.install(version.directory, label)
    except EngineRefusedError as error:
        _return_to(before, engine, version, error)
        raise
    except EngineError as error:
        raise TargetUndefinedError(
            f"{engine.name}: version {version.number} was not installed, or only in part, so that its weights may be a "
            f"mixture of two versions. It was not resumed. {engine.remedy}. The cause: {error}"
        ) from error
    except BaseException as error:
        error.add_note(f"{engine.name} was interrupted while it installed version {version.number}. {engine.remedy}")
        raise
    _check_label(engine, version, label)
    try:
        engine.resume()
    except EngineError as error:
        raise EngineError(
            f"{engine.name}: version {version.number} is installed, but generation does not continue. Install it "
            f"again, or restart the engine. The cause: {error}"
        ) from error
    seconds = time.monotonic() - begin
    logger.info("%s serves version %d; it was paused for %.3f s", engine.name, version.number, seconds)
    return seconds


def _return_to(before: str, engine: Engine, version: Version, error: EngineError) -> None:
    """Continue generation with the weights before, after an install that changed nothing.

    Raises:
        TargetUndefinedError: an earlier install left a mixture.
    """
    if before.startswith(_INCOMPLETE):
        raise TargetUndefinedError(
            f"{engine.name} has the label {before!r}, so that its weights may be a mixture of two versions. Version "
            f"{version.number} was not installed, and the engine not resumed. {engine.remedy}. The cause: {error}"
        ) from error
    error.add_note(f"version {version.number} was not installed; the weights of {engine.name} did not change")
    try:
        engine.relabel(before)
        engine.resume()
    except EngineError as failure:
        error.add_note(f"{engine.name} may be paused, because it could not be resumed: {failure}")


def _check_label(engine: Engine, version: Version, label: str) -> None:
    try:
        held = engine.label()
    except EngineError as error:
        raise TargetUndefinedError(
            f"{engine.name}: version {version.number} was installed, but its label cannot be checked. It was not "
            f"resumed. {engine.remedy}. The cause: {error}"
        ) from error
    if held != label:
        raise TargetUndefinedError(
            f"{engine.name} has the label {held!r} after an install with the label {label!r}: it restarted, or another "
            f"program installs versions, too. It was not resumed. {engine.remedy}"
        )
