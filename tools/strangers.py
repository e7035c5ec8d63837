"""Load the files of other software, and compare the result with that of the libraries that own the formats.

    python -m tools.strangers DIRECTORY

Each file and directory below DIRECTORY is described (`metadata`), verified, loaded, copied to the layout ``dcp`` and
loaded again, and read by the library that owns its format, if that is installed (see `tools.owners`). Its line begins
with one of these words:

    equal        the load and the copy equal the owner's reading, bit for bit
    read         the load and its copy are equal; no owner's library reads it here without running code
    refused      an error says what the file is, and what to do
    different    the copy or the owner's reading differs from the load
    unnamed      an exception of another kind, or an error that does not say what the file is

The exit status is 1 if a line says "different" or "unnamed". Files in the directory of a checkpoint are data of that
checkpoint; only those with a suffix of checkpoint files are also tried alone.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

import ckptcore
from ckptcore.errors import CheckpointError, CheckpointNotFoundError
from ckptcore.results import CheckpointMetadata
from tools.owners import NotReadError, read_as_owner

Leaves: TypeAlias = Mapping[tuple[str, ...], Any]
"""Arrays and values by the texts of their keys."""

Result: TypeAlias = Literal["equal", "read", "refused", "different", "unnamed"]

_SUFFIXES: Final = frozenset(
    [".bin", ".ckpt", ".gz", ".h5", ".hdf5", ".joblib", ".keras", ".msgpack", ".npy", ".npz", ".pickle", ".pkl", ".pt"]
    + [".pt2", ".pth", ".safetensors", ".tar", ".zip"]
)
_UNNAMED: Final = re.compile(r"check the path|it begins with b|: it has [^:]*\. Read it with the software")
"""Texts of errors that do not say what an existing file is."""
_SHOWN: Final = 160


class Line(NamedTuple):
    """The result for one file or directory.

    Attributes:
        path: relative to the directory.
        result: see the module.
        writer: the software that wrote it, as ckptcore reports; empty if ckptcore cannot load it.
        detail: the error or the difference. Without one: the state that `verify` reports, and the owner's library or
            the reason why none reads it.
    """

    path: str
    result: Result
    writer: str
    detail: str

    def __str__(self) -> str:
        """Return one line of text."""
        return f"{self.result:<10} {self.path}  {self.writer}  {' '.join(self.detail.split())[:_SHOWN]}".rstrip()


def locations(directory: Path) -> Iterator[Path]:
    """Yield the files and directories to try: a directory before its content."""
    for entry in sorted(directory.iterdir()):
        if entry.name.startswith(".") or entry.name == "__pycache__" or entry.is_symlink():
            continue
        yield entry
        if entry.is_dir():
            inside = list(locations(entry))
            if any((entry / name).exists() for name in ("zarr.json", ".zarray", ".zgroup")):
                continue  # files of an array
            if not _is_checkpoint(entry):
                yield from inside
            else:
                yield from [path for path in inside if path.is_file() and path.suffix in _SUFFIXES]


def _is_checkpoint(directory: Path) -> bool:
    try:
        ckptcore.metadata(directory)
    except CheckpointNotFoundError:
        return False
    except Exception:  # noqa: BLE001  # `examine` reports the error
        return True
    return True


def examine(path: Path, shown: str) -> Line:
    """Try one file or directory."""
    try:
        metadata = ckptcore.metadata(path)
        loaded = _load(path, metadata.is_composite)
    except Exception as error:  # noqa: BLE001  # what it raises is the result
        return Line(shown, _refusal(error), "", f"{type(error).__name__}: {error}")
    ours, where = flatten(loaded), "load"
    try:
        where = "verify"
        report = ckptcore.verify(path)
        if not report.ok:
            return Line(shown, "refused", metadata.writer, f"verify: {report.problems[0].message}")
        where = "copy"
        with tempfile.TemporaryDirectory() as directory:
            ckptcore.copy(path, f"{directory}/copy", layout="dcp", leave_out=["*"])
            copied = flatten(_load(Path(directory) / "copy", metadata.is_composite))
    except Exception as error:  # noqa: BLE001  # what it raises is the result
        result = _refusal(error)
        return Line(shown, result, metadata.writer, f"{where}: {type(error).__name__}: {error}")
    if problem := difference(ours, copied):
        return Line(shown, "different", metadata.writer, f"copy: {problem}")
    try:
        owner, read = read_as_owner(path, metadata)
    except NotReadError as reason:
        return Line(shown, "read", metadata.writer, f"{report.state}; {reason}")
    if metadata.is_composite:  # the owner may read only some of the objects
        ours = {path: value for path, value in ours.items() if path[0] in read}
    if problem := difference(ours, flatten(read), _tied(metadata)):
        return Line(shown, "different", metadata.writer, f"{owner}: {problem}")
    return Line(shown, "equal", metadata.writer, f"{report.state}; {len(ours)} leaves as {owner}")


def _tied(metadata: CheckpointMetadata) -> frozenset[tuple[str, ...]]:
    """Return the paths of tied arrays, of which the owner may know only the first."""
    trees = [] if metadata.is_composite else [metadata.tree]
    return frozenset(tuple(map(str, tree.paths[leaf])) for tree in trees for leaf in tree.aliases)


def _load(path: Path, is_composite: bool) -> Any:
    return dict(ckptcore.load_checkpointables(path)) if is_composite else ckptcore.load(path)


def _refusal(error: Exception) -> Result:
    named = isinstance(error, CheckpointError) and not _UNNAMED.search(str(error))
    return "refused" if named else "unnamed"


def flatten(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return the arrays and values of a tree of any library by their keys. The kinds of containers do not matter."""
    flat: dict[tuple[str, ...], Any] = {}
    left: list[tuple[tuple[str, ...], Any]] = [(path, value)]
    while left:
        where, each = left.pop()
        parts = _parts(each)
        if parts is None:
            flat[where] = each
        elif not parts:
            flat[where] = "<empty>"
        else:
            left.extend([((*where, str(key)), part) for key, part in parts])
    return flat


def _parts(value: Any) -> Sequence[tuple[Any, Any]] | None:
    """Return the keys and parts of a container; None for a leaf."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str | int | tuple) for key in value):
            return list(enumerate(value.items()))  # as ckptcore stores keys that no path can have
        return list(value.items())
    if isinstance(value, set | frozenset):
        return list(enumerate(sorted(value, key=repr)))
    if isinstance(value, np.ndarray) and value.dtype == object:
        return list(enumerate(value.tolist()))
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if type(value).__name__ == "Namespace":
        return list(vars(value).items())
    return None


def difference(first: Leaves, second: Leaves, tied: Collection[tuple[str, ...]] = ()) -> str:
    """Return the first difference of two trees as text; empty if there is none. The second may lack tied arrays."""
    first = {path: value for path, value in first.items() if path in second or path not in tied}
    if len(first) == len(second) == 1:  # a single array has a name in some libraries only
        first = dict(zip(second, first.values(), strict=True))
    if missing := sorted(first.keys() ^ second.keys()):
        side = "only in the load" if missing[0] in first else "not in the load"
        return f"{'/'.join(missing[0])} is {side} ({len(missing)} differ)"
    for path, value in first.items():
        if reason := _differ(value, second[path]):
            return f"{'/'.join(path)}: {reason}"
    return ""


def _differ(left: Any, right: Any) -> str:
    arrays = [_array(value) for value in (left, right)]
    first, second = arrays
    if first is not None and second is not None:
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            if first.ndim == second.ndim == 0 and first == second:
                return ""  # a number, and an array of one element
            return f"{first.dtype}{list(first.shape)} and {second.dtype}{list(second.shape)}"
        return "" if first.tobytes() == second.tobytes() else "the bytes differ"
    if type(left) is type(right) or (first is None) == (second is None):
        return "" if str(left) == str(right) or left == right else f"{str(left)[:40]} and {str(right)[:40]}"
    return f"{type(left).__name__} and {type(right).__name__}"


def _array(value: Any) -> np.ndarray[Any, Any] | None:
    """Return an array or number of any library as an array of NumPy; None for other values."""
    if isinstance(value, bool | int | float | complex | np.generic | np.ndarray):
        array: np.ndarray[Any, Any] = np.asarray(value)
        return None if array.dtype == object else array.astype(array.dtype.newbyteorder("="), copy=False)
    if type(value).__module__.startswith("torch") and hasattr(value, "detach"):
        import ml_dtypes
        import torch

        plain = value.detach().cpu().contiguous()
        name = str(plain.dtype).removeprefix("torch.")
        if hasattr(ml_dtypes, name):
            raw = plain.view(getattr(torch, f"uint{8 * plain.element_size()}")).numpy()
            return np.asarray(raw.view(getattr(ml_dtypes, name)))
        return np.asarray(plain.numpy())
    if "key<" in str(getattr(value, "dtype", "")):
        import jax

        value = jax.random.key_data(value)
    return np.asarray(value) if hasattr(value, "__array__") else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.strangers", description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", help="show only lines with this result", metavar="RESULT")
    options = parser.parse_args(arguments)
    counts: collections.Counter[str] = collections.Counter()
    for path in [options.directory, *locations(options.directory)]:
        if path == options.directory and not _is_checkpoint(path):
            continue
        if path.is_dir() and not _is_checkpoint(path) and any(child.is_dir() for child in path.iterdir()):
            continue  # a folder
        line = examine(path, os.path.relpath(path, options.directory))
        counts[line.result] += 1
        if options.only in (None, line.result):
            print(line, flush=True)
    print()
    for result in ("equal", "read", "refused", "different", "unnamed"):
        print(f"{result:<10} {counts[result]:>6,}")
    return 1 if counts["different"] or counts["unnamed"] else 0


if __name__ == "__main__":
    sys.exit(main())
