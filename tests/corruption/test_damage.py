"""Files of a checkpoint that are truncated, changed, exchanged or missing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

import ckptcore
from ckptcore.model import BLOCK_BYTES
from tests.corruption.checkpoints import ORIGINALS, Original, make_original

pytestmark = pytest.mark.system

_SMALL: Final = [name for name in ORIGINALS if name != "several blocks"]


def _lengths(size: int) -> Iterator[int]:
    """Yield lengths for a truncated file: at its edges, in its middle, and near the ends of blocks."""
    edges = {0, 1, 7, 8, 9, 63, 64, size // 2, size - 41, size - 2, size - 1}
    for block in range(0, size, BLOCK_BYTES):
        edges |= {block - 1, block, block + 1}
    yield from sorted(length for length in edges if 0 <= length < size)


def _truncate(original: Original, lengths: Callable[[int], Iterator[int]], every: int = 1) -> int:
    """Truncate each file to each length and check the checkpoint. Return the number of checks.

    With `every`, a file gets only each `every`-th length, and the next file starts with the next length.
    """
    count = 0
    for number, (name, content) in enumerate(original.files.items()):
        path = original.location / name
        for length in itertools.islice(lengths(len(content)), number % every, None, every):
            path.write_bytes(content[:length])
            try:
                original.check()
            except BaseException as error:
                error.add_note(f"{name} was cut to {length} of {len(content)} bytes")
                raise
            count += 1
        path.write_bytes(content)
    original.check()
    return count


@pytest.mark.parametrize("name", ORIGINALS)
def test_truncated_files_are_detected(name: str, tmp_path: Path) -> None:
    original = make_original(name, tmp_path)
    # If a checkpoint has many files, each file gets a part of the lengths.
    assert _truncate(original, _lengths, every=4 if len(original.files) > 8 else 1) > 15


@pytest.mark.slow
@pytest.mark.parametrize("name", ORIGINALS)
def test_every_file_truncated_at_every_edge_is_detected(name: str, tmp_path: Path) -> None:
    assert _truncate(make_original(name, tmp_path), _lengths) > 15


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one file", "parts of the root"])
def test_files_truncated_anywhere_are_detected(name: str, full: bool, tmp_path: Path) -> None:
    cut = _truncate(make_original(name, tmp_path), lambda size: iter(range(size)), every=1 if full else 5)
    assert cut > (1000 if full else 200)


# --- random damage ----------------------------------------------------------------------------------------------------


def _flip_bits(content: bytes, choices: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(choices.choice((1, 1, 1, 2, 8))):
        changed[choices.randrange(len(changed))] ^= 1 << choices.randrange(8)
    return bytes(changed)


def _change_run(content: bytes, choices: random.Random) -> bytes:
    start = choices.randrange(len(content))
    length = choices.choice((1, 2, 8, 64, 512, 4096))
    run = content[start : start + length]
    new = choices.choice((bytes(len(run)), b"\xff" * len(run), choices.randbytes(len(run)), b" " * len(run)))
    return content[:start] + new + content[start + length :]


def _swap_blocks(content: bytes, choices: random.Random) -> bytes:
    size = choices.choice((1, 16, 512, 4096, BLOCK_BYTES))
    blocks = [content[start : start + size] for start in range(0, len(content), size)]
    first, second = choices.randrange(len(blocks)), choices.randrange(len(blocks))
    blocks[first], blocks[second] = blocks[second], blocks[first]
    return b"".join(blocks)


def _insert(content: bytes, choices: random.Random) -> bytes:
    start = choices.randrange(len(content) + 1)
    return content[:start] + choices.randbytes(choices.choice((1, 8, 100))) + content[start:]


def _cut_out(content: bytes, choices: random.Random) -> bytes:
    start = choices.randrange(len(content))
    return content[:start] + content[start + choices.choice((1, 8, 100, 5000)) :]


def _append(content: bytes, choices: random.Random) -> bytes:
    return content + choices.choice((b"\0", b"\n", b"x" * 100, content))


_CHANGES: Final[Sequence[Callable[[bytes, random.Random], bytes]]] = (
    _flip_bits, _flip_bits, _change_run, _change_run, _swap_blocks, _insert, _cut_out, _append,
)  # fmt: skip


def _damage(original: Original, choices: random.Random) -> str:
    """Damage one or two files. Return a readable description."""
    names = list(original.files)
    done = []
    for _ in range(choices.choice((1, 1, 1, 2))):
        name = choices.choice(names)
        path = original.location / name
        match choices.randrange(12):
            case 0 if name != "checkpoint.json":
                path.unlink(missing_ok=True)
                done.append(f"removed {name}")
            case 1:
                other = choices.choice(names)
                path.write_bytes(original.files[other])
                (original.location / other).write_bytes(original.files[name])
                done.append(f"swapped {name} and {other}")
            case _:
                change = choices.choice(_CHANGES) if original.files[name] else _append
                path.write_bytes(change(original.files[name], choices))
                done.append(f"{change.__name__} of {name}")
    return ", ".join(done)


def _damage_often(original: Original, count: int) -> None:
    choices = random.Random(0)
    for number in range(count):
        done = _damage(original, choices)
        try:
            original.check()
        except BaseException as error:
            error.add_note(f"damage {number}: {done}")
            raise
        original.restore()
    original.check()


@pytest.mark.parametrize("name", ORIGINALS)
def test_random_damage_is_detected(name: str, tmp_path: Path) -> None:
    _damage_often(make_original(name, tmp_path), 25)


@pytest.mark.slow
@pytest.mark.parametrize("name", ORIGINALS)
def test_many_cases_of_random_damage_are_detected(name: str, full: bool, tmp_path: Path) -> None:
    _damage_often(make_original(name, tmp_path), 2500 if full else 400)


@pytest.mark.parametrize("name", _SMALL)
def test_every_missing_file_is_detected(name: str, tmp_path: Path) -> None:
    original = make_original(name, tmp_path)
    for file in original.files:
        if file == "checkpoint.json":
            continue
        (original.location / file).unlink()
        original.check()
        original.restore()
    (original.location / "checkpoint.json").unlink()
    if not any(file.endswith(".safetensors") for file in original.files):
        # Without its root, this is a valid checkpoint of Orbax with the tree and the values.
        assert ckptcore.metadata(original.location).save_id is None
        return
    with pytest.raises(ckptcore.errors.CorruptCheckpointError, match=r"checkpoint\.json is missing"):
        ckptcore.metadata(original.location)


def test_the_error_names_the_damage(tmp_path: Path) -> None:
    original = make_original("several blocks", tmp_path)
    path = original.location / "model.safetensors"
    content = bytearray(original.files["model.safetensors"])
    content[2 * BLOCK_BYTES + 5] ^= 1
    path.write_bytes(content)
    report = ckptcore.verify(original.location)
    (problem,) = report.problems
    assert problem.key == "model.safetensors"
    assert problem.start == 2 * BLOCK_BYTES
    assert "arrays[1]" in problem.arrays
    with pytest.raises(ckptcore.errors.ChecksumError, match=r"model\.safetensors.*arrays\[1\]"):
        ckptcore.load(original.location)
