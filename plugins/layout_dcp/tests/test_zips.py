"""Zip directories written by torch and Python are read. Damaged and hostile ones are rejected, with little memory."""

from __future__ import annotations

import io
import random
import tracemalloc
import zipfile
from collections.abc import Callable

import pytest
import torch
from ckptcore_dcp.zip_directories import DEFLATED, STORED
from ckptcore_dcp.zips import ZipMember, read_member, read_zip, torch_members
from torch.utils.serialization import config

from ckptcore.errors import CheckpointError, ChecksumError, CorruptCheckpointError


class _Object:
    """An object in memory that is read in ranges. Records the requests."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.requests: list[tuple[int, int]] = []

    def fetch(self, start: int, stop: int) -> bytes:
        assert 0 <= start <= stop <= len(self.data)
        self.requests.append((start, stop))
        return self.data[start:stop]


def _read(data: bytes, start: int = 0, stop: int | None = None) -> dict[str, ZipMember]:
    return dict(read_zip(_Object(data).fetch, start, len(data) if stop is None else stop, key="file"))


def _saved(elements: int, count: int = 3) -> bytes:
    stream = io.BytesIO()
    torch.save({f"t{number}": torch.arange(elements) + number for number in range(count)}, stream)
    return stream.getvalue()


def _python_zip(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED, *, comment: bytes = b"") -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.comment = comment
    return stream.getvalue()


def _assert_as_zipfile(data: bytes, start: int = 0, stop: int | None = None) -> None:
    stop = len(data) if stop is None else stop
    members = _read(data, start, stop)
    with zipfile.ZipFile(io.BytesIO(data[start:stop])) as archive:
        assert list(members) == archive.namelist()
        for name, member in members.items():
            expected = archive.read(name)
            assert read_member(_Object(data).fetch, member, key="file") == expected
            if member.compression == STORED:
                assert data[member.start : member.start + member.nbytes] == expected
            if member.descriptor:
                behind = data[member.start + member.nbytes :][: member.descriptor]
                assert behind[:8] == b"PK\x07\x08" + member.crc.to_bytes(4, "little")


@pytest.mark.parametrize("elements", [0, 1, 7, 4096, 100_000])
def test_members_of_torch_files_equal_those_of_zipfile(elements: int) -> None:
    _assert_as_zipfile(_saved(elements))


@pytest.mark.parametrize("alignment", [64, 128, 4096, 65536 // 2])
def test_files_of_torch_with_other_alignments(alignment: int) -> None:
    with config.patch("save.storage_alignment", alignment):  # type: ignore[attr-defined]  # exists after its import
        _assert_as_zipfile(_saved(30_000))


def test_a_zip_between_other_bytes() -> None:
    for data in (_saved(5), _saved(100_000)):
        _assert_as_zipfile(b"x" * 1000 + data + b"y" * 77, 1000, 1000 + len(data))


def test_a_long_file_of_torch_takes_few_requests() -> None:
    data = _saved(20_000, 40)
    zipped = _Object(data)
    read_zip(zipped.fetch, 0, len(data), key="file")
    assert len(zipped.requests) <= 2
    assert sum(stop - start for start, stop in zipped.requests) < 50_000


def test_a_short_zip_takes_one_request() -> None:
    zipped = _Object(_saved(10))
    read_zip(zipped.fetch, 0, len(zipped.data), key="file")
    assert len(zipped.requests) == 1


def test_data_descriptors_of_torch_are_found() -> None:
    for elements in (10, 100_000):
        assert {member.descriptor for member in _read(_saved(elements)).values()} == {16}


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("nbytes", [0, 10, 30_000, 200_000])
def test_zips_written_by_python(compression: int, nbytes: int) -> None:
    data = _python_zip({f"folder/{n}": random.Random(n).randbytes(nbytes // 2) * 2 for n in range(4)}, compression)
    _assert_as_zipfile(data)


def test_zips_streamed_by_python() -> None:
    class _Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.pieces: list[bytes] = []

        def writable(self) -> bool:
            return True

        def write(self, data: object) -> int:
            self.pieces.append(bytes(data))  # type: ignore[call-overload]  # a buffer
            return len(self.pieces[-1])

    for nbytes in (10, 64, 50_000, 65_536 - 64):
        pipe = _Pipe()
        with zipfile.ZipFile(pipe, "w") as archive:
            for number in range(3):
                archive.writestr(f"a/{number}", bytes([number]) * nbytes)
            with archive.open("a/large", "w", force_zip64=True) as member:
                member.write(b"l" * nbytes)
        _assert_as_zipfile(b"".join(pipe.pieces))


def test_names_and_comments_that_are_not_ascii() -> None:
    _assert_as_zipfile(_python_zip({"a/é": b"1", "a/ü/b": b"2"}, comment=b"c" * 100))
    _assert_as_zipfile(_python_zip({"a/b": b"2" * 70_000}, comment=b"c" * 65_535))


def test_a_comment_that_resembles_an_end_record() -> None:
    data = _python_zip({"a/b": b"2"}, comment=b"PK\x05\x06" + b"c" * 100)
    assert list(_read(data)) == ["a/b"]


def test_zips_of_torch_are_recognized_by_member_names() -> None:
    members = torch_members(_read(_saved(4)))
    assert {"data.pkl", "byteorder", "version", "data/0", "data/1", "data/2"} <= set(members)
    assert torch_members(_read(_python_zip({"a.npy": b"1"}))) == {}
    assert torch_members(_read(_python_zip({"a/data.pkl": b"1", "b/data.pkl": b"1"}))) == {}


def test_a_damaged_member_is_refused() -> None:
    data = bytearray(_saved(100))
    member = torch_members(_read(bytes(data)))["data/1"]
    data[member.start + 5] ^= 1
    with pytest.raises(ChecksumError, match="CRC-32") as caught:
        read_member(_Object(bytes(data)).fetch, member, key="file")
    assert (caught.value.key, caught.value.start) == ("file", member.start)


def test_a_file_without_computed_checksums() -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        data = _saved(3)
    finally:
        torch.serialization.set_crc32_options(before)
    member = torch_members(_read(data))["data/0"]
    assert read_member(_Object(data).fetch, member, key="file") == bytes(torch.arange(3).numpy())


def test_inflating_stops_at_the_stated_size() -> None:
    data = _python_zip({"a": b"\0" * 1_000_000}, zipfile.ZIP_DEFLATED)
    member = _read(data)["a"]
    assert member.compression == DEFLATED
    for size in (0, 10, 999_999, 1_000_001):
        wrong = ZipMember("a", member.start, member.nbytes, size, 0, DEFLATED)
        with pytest.raises(CorruptCheckpointError):
            read_member(_Object(data).fetch, wrong, key="file")
    with pytest.raises(CorruptCheckpointError, match="at most 100"):
        read_member(_Object(data).fetch, member, key="file", limit=100)


def test_overlapping_members_are_refused() -> None:
    data = bytearray(_python_zip({"a": b"1" * 100, "b": b"2" * 100}))
    second = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 1)
    for offset in (0, 1, 50):
        data[second + 42 : second + 46] = offset.to_bytes(4, "little")
        with pytest.raises(CorruptCheckpointError, match=r"overlap|local header"):
            _read(bytes(data))


def test_local_headers_that_make_members_overlap_are_refused() -> None:
    data = bytearray(_python_zip({"a": b"1" * 100, "b": b"2" * 100}))
    data[28:30] = (40).to_bytes(2, "little")
    with pytest.raises(CorruptCheckpointError, match="overlap"):
        _read(bytes(data))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (8, 1, "encrypted"),
        (8, 1 << 13, "encrypted"),
        (10, 12, "compression 12"),
        (10, 99, "compression 99"),
        (34, 2, "part"),
    ],
)
def test_errors_name_unsupported_features(field: int, value: int, message: str) -> None:
    data = bytearray(_python_zip({"a": b"1"}))
    entry = data.index(b"PK\x01\x02")
    data[entry + field : entry + field + 2] = value.to_bytes(2, "little")
    with pytest.raises(CorruptCheckpointError, match=message):
        _read(bytes(data))


def test_duplicate_names_and_control_characters_are_refused() -> None:
    data = _python_zip({"a/ab": b"1", "a/cd": b"2"})
    for old, new in ((b"a/cd", b"a/ab"), (b"a/cd", b"a/\0d"), (b"a/cd", b"a/\nd"), (b"a/cd", b"a/\x7fd")):
        with pytest.raises(CorruptCheckpointError):
            _read(data.replace(old, new))


@pytest.mark.parametrize(
    "make", [lambda: _saved(3), lambda: _saved(30_000, 2), lambda: _python_zip({"a": b"1", "b": b"22"})]
)
def test_extreme_values_in_every_field(make: Callable[[], bytes]) -> None:
    good = make()
    fields: list[tuple[int, int]] = []
    for magic, shape in (
        (b"PK\x01\x02", "<4s6H3I5H2I"),
        (b"PK\x05\x06", "<4s4H2IH"),
        (b"PK\x06\x06", "<4sQ2H2I4Q"),
        (b"PK\x06\x07", "<4sIQI"),
        (b"PK\x03\x04", "<4s5H3I2H"),
    ):
        place = good.find(magic)
        while place >= 0:
            offset = place + 4
            for code in _codes(shape):
                width = {"H": 2, "I": 4, "Q": 8}[code]
                fields.append((offset, width))
                offset += width
            place = good.find(magic, place + 4)
    tracemalloc.start()
    try:
        for offset, width in fields:
            for value in (0, 1, 29, 0x7F, 1 << (8 * width - 1), (1 << (8 * width)) - 2, (1 << (8 * width)) - 1):
                data = bytearray(good)
                data[offset : offset + width] = value.to_bytes(width, "little")
                _read_damaged(bytes(data))
        assert tracemalloc.get_traced_memory()[1] < 4 * len(good) + 1_000_000
    finally:
        tracemalloc.stop()


def _codes(shape: str) -> str:
    codes = ""
    count = ""
    for letter in shape[3:]:
        if letter.isdigit():
            count += letter
        else:
            codes += letter * int(count or 1)
            count = ""
    return codes


def _read_damaged(data: bytes) -> None:
    """Assert that a read raises an error, or that all members are inside the zip."""
    try:
        members = _read(data)
    except CorruptCheckpointError:
        return
    last = 0
    for member in sorted(members.values(), key=lambda member: member.start):
        assert last <= member.start and member.start + member.nbytes <= len(data)
        last = member.start + member.nbytes
        try:
            read_member(_Object(data).fetch, member, key="file", limit=1 << 20)
        except CheckpointError as error:
            assert isinstance(error, CorruptCheckpointError)


@pytest.mark.parametrize("seed", range(4))
def test_random_damage(seed: int) -> None:
    chance = random.Random(seed)
    samples = [_saved(3), _python_zip({"a/b": b"1" * 50, "c": b"2" * 5000}, zipfile.ZIP_DEFLATED)]
    for _ in range(300):
        data = bytearray(chance.choice(samples))
        for _ in range(chance.randint(1, 6)):
            # Most of them in the zip directory, at the end.
            place = len(data) - 1 - int(len(data) * chance.random() ** 3)
            data[place] = chance.randrange(256)
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        _read_damaged(bytes(data))


@pytest.mark.parametrize("data", [b"", b"P", b"PK\x05\x06", b"\0" * 100, b"PK\x05\x06" * 20_000])
def test_bytes_that_are_no_zip_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        _read(data)
    with pytest.raises(CorruptCheckpointError):
        read_zip(_Object(data).fetch, 5, 4, key="file")


def test_a_truncated_zip_is_refused() -> None:
    data = _saved(3)
    with pytest.raises(CorruptCheckpointError, match="cut off"):
        read_zip(lambda start, stop: data[start:stop], 0, len(data) + 10, key="file")
