"""Named pipes, sockets, devices and directories in place of files. Every reader refuses them without waiting."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from ckptcore_integrations.added_files import check_files, digests_of, read_files
from ckptcore_integrations.safetensors.numpy import load_file
from ckptcore_tools.cli.application import application
from ckptcore_view.documents import Request, document_of
from ckptcore_view.viewed import Viewed
from click.testing import CliRunner
from safetensors import SafetensorError

import ckptcore
from ckptcore.context import default_context
from ckptcore.errors import CheckpointError, CorruptCheckpointError
from ckptcore.plain_safetensors import open_regular_file

STATE: Final = {"w": np.arange(1000.0).reshape(10, 100), "step": 5}
_SECONDS: Final = 60
"""After this time a call counts as waiting for ever."""


def _socket(path: Path) -> None:
    before = os.getcwd()
    os.chdir(path.parent)  # paths of sockets have a small maximum length
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(before)


def _linked_pipe(path: Path) -> None:
    os.mkfifo(f"{path}-pipe")
    path.symlink_to(f"{path.name}-pipe")


SPECIAL: Final[Mapping[str, Callable[[Path], object]]] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
    "linked pipe": _linked_pipe,
}


def outcome(call: Callable[[], object]) -> BaseException | None:
    """Return the error that a call raises, or None. Fail if the call does not return."""
    outcomes: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            outcomes.append(None)
        except BaseException as error:  # noqa: BLE001  # the test checks it
            outcomes.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    assert outcomes, "the call waits for ever"
    return outcomes[0]


def _index(location: str) -> None:
    with ckptcore.open(location) as checkpoint:
        _ = checkpoint["w"][2:3]


def _verify(location: str) -> None:
    if not ckptcore.verify(location).ok:
        raise CorruptCheckpointError("it has problems")


READERS: Final[Mapping[str, Callable[[str], object]]] = {
    "load": ckptcore.load,
    "open": _index,
    "metadata": ckptcore.metadata,
    "verify": _verify,
    "inspect": lambda location: _run("inspect", location),
    "view": lambda location: document_of(Viewed(location, default_context()), "statistics", Request({"leaf": "0"})),
}


def _run(*arguments: str) -> None:
    result = CliRunner().invoke(application, list(arguments))
    if result.exit_code:
        raise CorruptCheckpointError(result.output)


@pytest.mark.parametrize("scheme", ["", "fsspec+file://"])
@pytest.mark.parametrize("layout", ["safetensors", "ocdbt", "zarr3", "dcp"])
@pytest.mark.parametrize("kind", SPECIAL)
def test_no_reader_waits_for_a_special_file(kind: str, layout: str, scheme: str, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "sound", STATE, layout=layout)
    files = [path.relative_to(tmp_path / "sound") for path in (tmp_path / "sound").rglob("*") if path.is_file()]
    refused = 0
    for number, file in enumerate(files):
        damaged = tmp_path / str(number)
        shutil.copytree(tmp_path / "sound", damaged)
        (damaged / file).unlink()
        SPECIAL[kind](damaged / file)
        for name, read in READERS.items():
            error = outcome(partial(read, f"{scheme}{damaged}"))
            assert error is None or isinstance(error, CheckpointError), (name, file, error)
            refused += error is not None
    assert refused


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_special_file_does_not_load_as_a_single_file(kind: str, tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.pt", "model.bin"):
        SPECIAL[kind](tmp_path / name)
        for read in (ckptcore.load, ckptcore.metadata, ckptcore.verify):
            assert isinstance(outcome(partial(read, tmp_path / name)), CheckpointError)
    if kind != "directory":
        error = outcome(partial(load_file, tmp_path / "model.safetensors"))
        assert isinstance(error, SafetensorError | FileNotFoundError)


@pytest.mark.parametrize("kind", SPECIAL)
def test_the_files_of_integrations_are_regular(kind: str, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    ckptcore.save(directory, STATE, metadata={"files": digests_of({"state.json": b"{}"})})
    (directory / "state.json").write_bytes(b"{}")
    assert check_files(directory) == ["state.json"]
    (directory / "state.json").unlink()
    SPECIAL[kind](directory / "state.json")
    assert isinstance(outcome(lambda: check_files(directory)), CorruptCheckpointError)
    assert outcome(lambda: read_files(directory)) is None
    assert "state.json" not in read_files(directory)


@pytest.mark.parametrize("kind", SPECIAL)
def test_only_regular_files_are_opened(kind: str, tmp_path: Path) -> None:
    SPECIAL[kind](tmp_path / "file")
    assert isinstance(outcome(lambda: open_regular_file(tmp_path / "file")), OSError)
    (tmp_path / "regular").write_bytes(b"data")
    (tmp_path / "link").symlink_to("regular")
    with open_regular_file(tmp_path / "link") as file:
        assert file.read() == b"data"


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_run_with_special_files_resumes(kind: str, tmp_path: Path) -> None:
    with ckptcore.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, STATE)
        checkpointer.save(2, STATE)
    (tmp_path / "run" / "2" / "checkpoint.json").unlink()
    SPECIAL[kind](tmp_path / "run" / "2" / "checkpoint.json")
    SPECIAL[kind](tmp_path / "run" / "3")
    for arguments in (["steps"], ["ls"], ["gc", "--policy", "latest_n=1", "--dry-run"]):
        outcome(partial(_run, *arguments, str(tmp_path / "run")))

    def resume() -> Any:
        with ckptcore.Checkpointer(tmp_path / "run") as checkpointer:
            return checkpointer.load(1)

    error = outcome(resume)
    assert error is None or isinstance(error, CheckpointError)
