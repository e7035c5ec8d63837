"""Calls that read the files of a target, as users and tools do."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from ckptcore_tools.copies.manifests import read_manifest
from ckptcore_view.documents import BadRequestError, Request, document_of
from ckptcore_view.documents.panels import installed_panels
from ckptcore_view.viewed import Viewed

import ckptcore
from ckptcore.commit.leases import SYSTEM_CLOCK, LeaseObserver, read_lease
from ckptcore.commit.location import open_directory
from ckptcore.context import Context, IOOptions
from ckptcore.errors import CheckpointError
from ckptcore.events import readable_events
from ckptcore.runtime import runtime_of
from ckptcore.step_names import StepNameFormat, StepNames

CONTEXT: Final = Context(durability="none", io=IOOptions(threads=1))
_RELAXED: Final = Context(io=IOOptions(verify=False, threads=1))

for _panel in installed_panels():  # before a check, which must not import modules
    _panel.load()

_BOXES: Final = 4
"""Boxes that `look` reads: enough to come to different arrays."""

Read: TypeAlias = Callable[[Path], object]


def load(location: Path) -> object:
    return ckptcore.load(location, context=CONTEXT)


def load_unverified(location: Path) -> object:
    return ckptcore.load(location, context=_RELAXED)


def load_members(location: Path) -> object:
    return ckptcore.load_checkpointables(location, context=CONTEXT)


def verify(location: Path) -> object:
    return ckptcore.verify(location, context=CONTEXT).ok


def look(location: Path) -> object:
    """Read the metadata, and parts of the arrays of one tree."""
    metadata = ckptcore.metadata(location, context=CONTEXT)
    checkpoint = ckptcore.open(location, context=_RELAXED)
    for box in itertools.islice(checkpoint.iter_boxes(), _BOXES):
        with contextlib.suppress(CheckpointError):
            checkpoint[box.path][...]
    return metadata


READS: Final[Sequence[Read]] = (look, load, load_unverified, load_members, verify)
"""The functions that a user calls with a checkpoint from elsewhere."""


def with_own_temporary_files(read: Read) -> Read:
    """Return a call whose temporary files are in the directory that it reads."""

    def call(location: Path) -> object:
        before, tempfile.tempdir = (
            tempfile.tempdir,
            str(next(parent for parent in location.parents if parent.name == "c").parent),
        )
        try:
            return read(location)
        finally:
            tempfile.tempdir = before

    call.__name__ = read.__name__
    return call


def save_update(location: Path) -> object:
    update = ckptcore.Update(location)
    return ckptcore.save(location.parent / "next", {"b": 1}, strategy=update, overwrite="non-atomic", context=CONTEXT)


def finalize(location: Path) -> object:
    partial = ckptcore.partial(location, context=CONTEXT)
    partial.finalize()
    return ckptcore.load(location, context=CONTEXT)


def save_session(location: Path) -> None:
    ckptcore.partial(location, context=CONTEXT).save({"b": np.ones(2)})


def save_over(location: Path) -> object:
    return ckptcore.save(location, {"b": 1}, overwrite="non-atomic", context=CONTEXT)


def delete(location: Path) -> object:
    return ckptcore.delete(location, context=CONTEXT)


def describe_lease(location: Path) -> object:
    store = open_directory("memory://fuzzing/run", runtime_of(CONTEXT).storages)
    store.put("lease", (location / "lease").read_bytes())
    seen = read_lease(store, "lease")
    assert seen is not None
    LeaseObserver(SYSTEM_CLOCK, 1.0).is_expired(seen)
    return seen.describe(), seen.is_released, seen.seconds(1.0) + 1.0


def read_timeline(location: Path) -> object:
    return readable_events(_document(location / "timeline"))


def read_run(location: Path) -> object:
    reader = ckptcore.CheckpointReader(location, context=CONTEXT)
    return reader.metadata, reader.steps, reader.load()


def read_step_names(location: Path) -> object:
    names = _document(location / "names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    steps = StepNames().find(names)
    for step, name in steps.items():
        assert StepNames().parse(name) == step
    for name in names:
        with contextlib.suppress(ValueError):
            formatted = StepNameFormat.of(name)
            number = formatted.parse(name)
            assert number is None or formatted.name(number) == name
    return steps


def _document(path: Path) -> Any:
    """Parse JSON, like the callers of the reader under test. Return None for invalid JSON."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None


def view(location: Path) -> object:
    """Create each document of a checkpoint."""
    viewed = Viewed(str(location), CONTEXT)
    parameters = {"leaf": "0", "index": "0:1"}
    for name in ("checkpoint", "tree", "array", "elements", "statistics"):
        with contextlib.suppress(CheckpointError, BadRequestError):
            json.dumps(document_of(viewed, name, Request(parameters)), allow_nan=False)
    return viewed


def view_with_parameters(location: Path) -> object:
    request = _document(location / "request")
    if not (isinstance(request, list) and len(request) == 2 and isinstance(request[0], str)):
        return None
    parameters = request[1]
    if not isinstance(parameters, dict) or not all(isinstance(value, str) for value in parameters.values()):
        return None
    viewed = Viewed(str(location / "viewed"), CONTEXT, other=str(location / "other"))
    return json.dumps(document_of(viewed, request[0], Request(parameters)), allow_nan=False)


def list_manifest(location: Path) -> object:
    return read_manifest(location, CONTEXT)


def copy(location: Path) -> object:
    destination = location.parent / "copied"
    try:
        return ckptcore.copy(location, destination, context=CONTEXT)
    finally:
        shutil.rmtree(destination, ignore_errors=True)


def convert(location: Path) -> object:
    destination = location.parent / "copied"
    try:
        return ckptcore.copy(location, destination, layout="safetensors", context=CONTEXT)
    finally:
        shutil.rmtree(destination, ignore_errors=True)


def load_dcp(location: Path) -> object:
    from ckptcore_integrations import torch_dcp

    target = {"w": torch.zeros(6, 8), "n": 0}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        torch_dcp.load(target, checkpoint_id=location, no_dist=True)
    return target


def load_safetensors(location: Path) -> object:
    from ckptcore_integrations.safetensors.numpy import load_file

    return load_file(location / "model.safetensors")


def slice_safetensors(location: Path) -> object:
    from ckptcore_integrations.safetensors import safe_open

    with safe_open(location / "model.safetensors", framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.offset_keys()}
        return [file.metadata(), *[stored[:1] for stored in slices.values() if stored.get_shape()]]


def find_sound(location: Path) -> object:
    # Imported at the call, because this imports the whole Trainer.
    from ckptcore_integrations.transformers import newest_sound

    return newest_sound(location)
