"""Find the checkpoints in a directory of steps that have other names, or raise an error that describes them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NoReturn

from ckptcore.distributions import install_hint
from ckptcore.errors import InvalidLocationError
from ckptcore.protocols import StorageBackend
from ckptcore.step_names import StepNameFormat, numbered

_TRIED: Final = 20
"""Maximum number of names with one prefix, and of directories without a checkpoint, that are inspected."""

_PREFIXES_TRIED: Final = 50

_READABLE: Final = (".bin", ".ckpt", ".distcp", ".msgpack", ".pt", ".pth", ".safetensors")
_UNREADABLE: Final = (".h5", ".hdf5", ".keras")
"""Suffixes of files with weights. A layout may read files with a suffix of `_READABLE`. Files with a suffix of
`_UNREADABLE` need other software."""

_CERTAIN: Final = (".ckpt", ".keras", ".weights.h5")
"""Suffixes that only checkpoints have. The rest of the name does not matter."""

_PART: Final = re.compile(r"rank|-[0-9]+-of-[0-9]+|_[0-9]+_[0-9]+\.distcp")
"""Matches names of files that are parts of one checkpoint."""

_MEASURED: Final = re.compile(r"([0-9]\.|[0-9]e[-+]?|[_=][-+])[0-9]+\Z")
"""Matches names that end in a fraction or a signed number, such as a loss. A step needs a whole number."""

_TEMPORARY: Final = re.compile(r"(?<![a-z])tmp(?![a-z])")
"""Matches names of unfinished checkpoints."""

_IGNORED: Final = "To begin a new run here nevertheless, pass step_names=StepNames(read=()), or use an empty directory"


def find_other_steps(
    display: str,
    store: StorageBackend,
    names: Sequence[str],
    unread: Sequence[str],
    holds: Callable[[str], bool | None],
) -> Mapping[int, str]:
    """Return the steps of a directory under another prefix, if only one prefix has checkpoints; empty if none has.

    Args:
        display: the directory, for errors.
        store: the storage, opened at the directory.
        names: entries without the name of a step. Names of directories end in ``/``.
        unread: entries with the name of a step, newest first. None of them is a checkpoint.
        holds: returns True if an entry is a checkpoint that a layout reads, None if it is unfinished or cannot be read.

    Raises:
        InvalidLocationError: the checkpoints have several prefixes, their names have no whole number, or no layout
            reads them as a whole.
    """
    plain = [name.removesuffix("/") for name in names if not _TEMPORARY.search(name)]
    measured = [name for name in plain if _MEASURED.search(name)]
    groups = numbered({name for name in plain if not name.endswith(_UNREADABLE)}.difference(measured))
    readable = [
        newest
        for group in itertools.islice(groups.values(), _PREFIXES_TRIED)
        if (newest := _newest(group, holds)) is not None
    ]
    if len(readable) == 1:
        return next(group for group in groups.values() if readable[0] in group.values())
    if readable:
        ways = " or ".join([f"StepNames.of({name!r})" for name in readable])
        raise InvalidLocationError(
            f"{display} has checkpoints under several kinds of names ({', '.join(readable)}), and it is not known "
            f"which are the steps of the run: pass step_names={ways}. {_IGNORED}"
        )
    for name in measured[:_TRIED]:
        if holds(name):
            _refuse(display, name, _by_location(display, name))
    _refuse_files(display, [*unread, *plain], holds)
    directories = [name for group in groups.values() for name in [*group.values()][::-1] if f"{name}/" in names]
    for name in [*unread, *directories][:_TRIED]:
        if holds(name) is not False or (part := _part(store, name)) is None:
            continue
        # Look again: a save or deletion of this step may have begun or ended meanwhile.
        if holds(name) is False and _part(store, name) == part:
            inner = part.removeprefix(f"{name}/").split("/")[:-1]
            for depth in range(1, len(inner) + 1):
                checkpoint = "/".join([name, *inner[:depth]])
                if holds(checkpoint):
                    raise InvalidLocationError(
                        f"{display} has no step itself, but {name} has checkpoints, such as {checkpoint}: give the "
                        f"directory of that run, {display.rstrip('/')}/{checkpoint.rpartition('/')[0]}. {_IGNORED}"
                    )
            hint = install_hint(files=[part])
            way = f"install support for it with {hint}" if hint else "load it with the software that wrote it"
            raise InvalidLocationError(
                f"{display} has no step that an installed layout reads, but {name} has files of a checkpoint, such as "
                f"{part}: {way}, or load its files one by one. {_IGNORED}"
            )
    return {}


def _newest(group: Mapping[int, str], holds: Callable[[str], bool | None]) -> str | None:
    """Return the newest of some names that is a checkpoint."""
    return next((name for name in [*group.values()][: -_TRIED - 1 : -1] if holds(name)), None)


def _refuse_files(display: str, names: Sequence[str], holds: Callable[[str], bool | None]) -> None:
    """Refuse checkpoints that are files with weights.

    Tries names with a number first, newest first, then names with a suffix of `_CERTAIN`.
    """
    weights = [name for name in names if name.endswith((*_READABLE, *_UNREADABLE)) and not _PART.search(name)]
    formats = {name: step_format for name in weights if (step_format := _format(name)) is not None}
    counted = sorted(formats, key=lambda name: (formats[name].parse(name) or 0, name), reverse=True)
    others = sorted([name for name in weights if name.endswith(_CERTAIN) and name not in formats], reverse=True)
    for name in [*counted, *others]:
        if holds(name):
            if name not in formats:
                _refuse(display, name, _by_location(display, name))
            any_width = replace(formats[name], width=None)
            _refuse(display, name, f"to read such names as steps, pass step_names=StepNames(read=[{any_width}])")
        hint = install_hint(files=[name])
        if hint or name.endswith(_UNREADABLE):
            way = f"install support for it with {hint}" if hint else "load it with the software that wrote it"
            _refuse(display, name, f"no installed layout reads it: {way}")


def _by_location(display: str, name: str) -> str:
    return f"its name has no whole number, which a step needs; load it with ckptcore.load({f'{display}/{name}'!r})"


def _refuse(display: str, name: str, why: str) -> NoReturn:
    raise InvalidLocationError(f"{display} has no step, but the checkpoint {name}: {why}. {_IGNORED}")


def _format(name: str) -> StepNameFormat | None:
    try:
        return StepNameFormat.of(name)
    except ValueError:
        return None


def _part(store: StorageBackend, name: str) -> str | None:
    """Return a file, in a directory or its subdirectories, with weights or of a layout that is not installed."""
    for inside in itertools.islice(_below(store, name), _TRIED):
        for file in store.list_names(inside):
            if file.endswith((*_READABLE, *_UNREADABLE)) or install_hint(files=[file]):
                return f"{inside}/{file}"
    return None


def _below(store: StorageBackend, directory: str) -> Iterator[str]:
    yield directory
    for name in store.list_names(directory):
        if name.endswith("/"):
            yield f"{directory}/{name[:-1]}"
