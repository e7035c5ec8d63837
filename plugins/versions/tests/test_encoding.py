"""Encodings of chunks."""

from __future__ import annotations

import random
import struct
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from ckptcore_testing import strategies
from ckptcore_testing.arrays import DTYPE_NAMES, bit_patterns
from ckptcore_versions.deltas import encoding
from ckptcore_versions.deltas.encoding import HEAD_BYTES, EncodedWords, decode, decode_all, word_bytes, words_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import ArraySpec, HostArray

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

KINDS = {"raw": 0, "planes": 1, "differences": 2, "sparse": 3, "packed": 4}


def encode(old: HostArray | None, new: HostArray) -> bytes:
    """Encode one chunk."""
    (encoded,) = encoding.encode(old, new, [new.size])
    return encoded


def kind_of(encoded: bytes) -> str:
    return next(name for name, kind in KINDS.items() if kind == encoded[0])


def words(count: int, nbytes: int, seed: int = 0) -> HostArray:
    return np.frombuffer(np.random.default_rng(seed).bytes(count * nbytes), f"<u{nbytes}").copy()


def changed(old: HostArray, part: float, seed: int = 1) -> HostArray:
    """Return words of which a part is a little larger or smaller."""
    random_numbers = np.random.default_rng(seed)
    at = random_numbers.random(old.size) < part
    new = old.copy()
    new[at] += random_numbers.choice(np.array([1, 2, -1, -3]), int(at.sum())).astype(old.dtype)
    return new


def bf16_steps(count: int, rate: float) -> tuple[HostArray, HostArray]:
    """Return bfloat16 weights before and after a step of training with float32 master weights, as words."""
    random_numbers = np.random.default_rng(0)
    master = (random_numbers.standard_normal(count) * 0.04).astype(np.float32)
    after = master + (random_numbers.standard_normal(count) * rate).astype(np.float32)
    before, new = [weights.astype(ml_dtypes.bfloat16) for weights in (master, after)]
    return words_of(before, 2), words_of(new, 2)


def assert_decodes(old: HostArray | None, new: HostArray, encoded: bytes) -> None:
    elements = np.zeros_like(new) if old is None else old.copy()
    decode(memoryview(encoded), elements, has_old=old is not None)
    assert elements.tobytes() == new.tobytes()


def packed(content: bytes) -> bytes:
    return zstd.compress(content, 1)


# --- every chunk comes back


@settings(deadline=None)
@given(
    nbytes=st.sampled_from([1, 2, 4, 8]),
    pairs=st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.booleans()), min_size=1, max_size=600
    ),
    repeat=st.sampled_from([1, 1, 300]),
)
def test_any_words_come_back(nbytes: int, pairs: list[tuple[int, int, bool]], repeat: int) -> None:
    modulus = 256**nbytes
    old = np.array([first % modulus for first, _, _ in pairs] * repeat, f"<u{nbytes}")
    new = np.array([(first if same else second) % modulus for first, second, same in pairs] * repeat, f"<u{nbytes}")
    encoded = encode(old, new)
    assert len(encoded) <= HEAD_BYTES + new.nbytes
    if old.tobytes() == new.tobytes():
        assert encoded == b""
    else:
        assert_decodes(old, new, encoded)
    assert_decodes(None, new, encode(None, new))


@settings(deadline=None)
@given(data=st.data(), part=st.sampled_from([0.0, 0.01, 0.3, 0.9]), nbytes=st.sampled_from([1, 2, 8]))
def test_adjacent_chunks_are_encoded_as_if_each_were_alone(data: st.DataObject, part: float, nbytes: int) -> None:
    old = words(500, nbytes)
    new = changed(old, part)
    some = sorted(data.draw(st.sets(st.integers(1, 499), max_size=8)))
    new[: some[0] if some else 0] = old[: some[0] if some else 0]
    stops = [*some, 500]
    encoded = encoding.encode(old, new, stops)
    assert len(encoded) == len(stops)
    for chunk, start, stop in zip(encoded, [0, *some], stops, strict=True):
        if chunk:
            assert_decodes(old[start:stop], new[start:stop], chunk)
        else:
            assert old[start:stop].tobytes() == new[start:stop].tobytes()
        assert len(chunk) == len(encode(old[start:stop], new[start:stop]))


@given(spec=strategies.specs(max_dims=2), seed=st.integers(0, 100))
def test_elements_of_every_dtype_come_back(spec: ArraySpec, seed: int) -> None:
    nbytes = word_bytes(spec)
    if not spec.size:
        return
    old, new = [words_of(bit_patterns(spec, seed + number).copy(), nbytes) for number in (0, 1)]
    encoded = encode(old, new)
    if encoded:
        assert_decodes(old, new, encoded)
    else:
        assert old.tobytes() == new.tobytes()


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_the_words_of_every_dtype_divide_its_elements(dtype: str) -> None:
    spec = ArraySpec((3,), dtype)
    nbytes = word_bytes(spec)
    assert nbytes in (1, 2, 4, 8)
    assert spec.numpy_dtype.itemsize % nbytes == 0


def test_words_of_usual_dtypes_are_their_numbers() -> None:
    sizes = {name: word_bytes(ArraySpec((1,), name)) for name in ("bfloat16", "float8_e4m3fn", "float32", "int64")}
    assert sizes == {"bfloat16": 2, "float8_e4m3fn": 1, "float32": 4, "int64": 8}
    assert word_bytes(ArraySpec((1,), "complex64")) == 4
    assert word_bytes(ArraySpec((1,), "complex128")) == 8
    assert word_bytes(ArraySpec((1,), "S7")) == 1


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8])
@pytest.mark.parametrize("part", [0.001, 0.02, 0.3, 0.6, 1.0])
def test_any_part_of_the_words_may_change(nbytes: int, part: float) -> None:
    old = words(20_000, nbytes)
    new = changed(old, part)
    encoded = encode(old, new)
    assert kind_of(encoded) in (("sparse", "packed") if part < 0.5 else ("differences",))
    assert_decodes(old, new, encoded)
    assert len(encoded) < new.nbytes * (0.2 + 0.8 * part)


@pytest.mark.parametrize("at", [[0], [19_999], [255], [254, 510], [0, 256, 19_999], [7, 8, 9, 700]])
def test_gaps_of_any_length_come_back(at: list[int]) -> None:
    old = words(20_000, 2)
    new = old.copy()
    new[at] += 1
    encoded = encode(old, new)
    assert_decodes(old, new, encoded)
    assert len(encoded) < 150


def test_few_changes_are_stored_without_compression() -> None:
    old = words(20_000, 4)
    new = old.copy()
    new[5] ^= 0xFFFFFFFF
    encoded = encode(old, new)
    assert kind_of(encoded) == "sparse"
    assert len(encoded) == HEAD_BYTES + 4 + 1 + 4
    assert_decodes(old, new, encoded)


def test_words_that_were_replaced_are_stored_whole() -> None:
    old, zeros = words(20_000, 4), np.zeros(20_000, "<u4")
    encoded = encode(old, zeros)
    assert kind_of(encoded) == "planes"
    assert len(encoded) < 60
    assert_decodes(old, zeros, encoded)
    assert kind_of(encode(old, words(20_000, 4, seed=9))) == "raw"
    assert kind_of(encode(None, words(20_000, 4))) == "raw"
    assert kind_of(encode(None, zeros)) == "planes"


@pytest.mark.parametrize(("rate", "most"), [(3e-6, 0.52), (1e-5, 0.52), (1e-4, 0.75)])
def test_weights_take_fewer_bytes_than_their_compressed_xor(rate: float, most: float) -> None:
    """slime and SkyRL store zstd of the XOR."""
    old, new = bf16_steps(1 << 18, rate)
    encoded = b"".join([encode(old[at : at + (1 << 17)], new[at : at + (1 << 17)]) for at in (0, 1 << 17)])
    assert len(encoded) < most * len(zstd.compress((old ^ new).tobytes(), 3))


# --- damaged and hostile bytes


@pytest.mark.parametrize("part", [0.02, 0.7])
def test_a_base_that_differs_is_noticed(part: float) -> None:
    old = words(5000, 2)
    encoded = encode(old, changed(old, part))
    other = old.copy()
    other[17] += 1
    with pytest.raises(CorruptCheckpointError, match="differ from those that were saved"):
        decode(memoryview(encoded), other)
    decode(memoryview(encoded), other, is_whole=False)


def test_an_encoding_that_needs_old_words_is_refused_without_them() -> None:
    old = words(5000, 2)
    for part in (0.02, 0.7):
        with pytest.raises(CorruptCheckpointError, match="the base does not have the array"):
            decode(memoryview(encode(old, changed(old, part))), np.zeros_like(old), has_old=False, is_whole=False)


def _head(kind: str) -> bytes:
    return struct.pack("<BQ", KINDS[kind], 0)


def _count(count: int) -> bytes:
    return struct.pack("<I", count)


HOSTILE = {
    "nothing": b"",
    "half a head": b"\x00\x01",
    "unknown kind": b"\xff" + bytes(20),
    "short raw": _head("raw") + bytes(1999),
    "long raw": _head("raw") + bytes(2001),
    "no frame": _head("planes") + b"not zstd",
    "short frame": _head("planes") + packed(bytes(1999)),
    "long frame": _head("differences") + packed(bytes(2001)),
    "bomb": _head("planes") + packed(bytes(200 << 20)),
    "two frames": _head("planes") + packed(bytes(2000)) + packed(b""),
    "half a frame": _head("planes") + packed(random.Random(0).randbytes(2000))[:-1],
    "no count": _head("sparse") + b"\x01",
    "zero changes": _head("sparse") + _count(0),
    "too many changes": _head("sparse") + _count(1001) + bytes(3003),
    "huge count": _head("packed") + _count(2**32 - 1) + packed(bytes(3000)),
    "position after the end": _head("sparse") + _count(1) + b"\xff\xff\xff\xf0" + bytes(2),
    "last gap without an end": _head("sparse") + _count(1) + b"\xff" + bytes(2),
    "gaps without an end": _head("sparse") + _count(2) + b"\x01\xff\xff" + bytes(4),
    "fewer gaps": _head("sparse") + _count(3) + b"\x01\xff\xff\x01" + bytes(6),
    "too many gaps": _head("sparse") + _count(2) + bytes(3) + bytes(4),
    "positions beyond": _head("packed") + _count(900) + packed(b"\xfe" * 900 + bytes(1800)),
    "packed bomb": _head("packed") + _count(1000) + packed(bytes(200 << 20)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_refused_before_memory_is_taken(name: str) -> None:
    old = np.zeros(1000, "<u2")
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match="damaged"):
            decode(memoryview(HOSTILE[name]), old, is_whole=False)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000


@pytest.mark.parametrize("part", [0.02, 0.4, 0.7])
def test_chunks_that_are_decoded_together_come_back(part: float) -> None:
    """Between them and around them are words that stay."""
    old = words(9000, 2)
    new = changed(old, part)
    new[2000:2400] = words(400, 2, seed=9)  # stored without the old words
    bounds = [(10, 1500), (1500, 1501), (2000, 2400), (3000, 8990)]
    expected = old.copy()
    chunks = []
    for start, stop in bounds:
        new[start] ^= 1
        expected[start:stop] = new[start:stop]
        chunks.append(EncodedWords(memoryview(encode(old[start:stop], new[start:stop])), start, stop))
    decode_all(chunks, old)
    assert old.tobytes() == expected.tobytes()


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_chunk_among_others_is_refused(name: str, number: int) -> None:
    """Also if its changed words are in the chunk after it."""
    old = words(3000, 2)
    new = old.copy()
    new[::1000] += 1
    bounds = [(start, start + 1000) for start in range(0, 3000, 1000)]
    chunks = [EncodedWords(memoryview(encode(old[slice(*own)], new[slice(*own)])), *own) for own in bounds]
    chunks[number] = chunks[number]._replace(encoded=memoryview(HOSTILE[name]))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match="damaged"):
            decode_all(chunks, old)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000


def test_a_frame_with_a_large_window_is_refused() -> None:
    """The window would be allocated before the first byte is decoded."""
    options: dict[int, int] = {
        zstd.CompressionParameter.window_log: 27,
        zstd.CompressionParameter.compression_level: 1,
    }
    compressor = zstd.ZstdCompressor(options=options)
    frame = compressor.compress(bytes(2000)) + compressor.flush()
    with pytest.raises(CorruptCheckpointError, match="zstd frame cannot be read"):
        decode(memoryview(_head("planes") + frame), np.zeros(1000, "<u2"), is_whole=False)


@pytest.mark.parametrize("part", [0.0005, 0.02, 0.7, None])
def test_any_changed_byte_is_noticed(part: float | None) -> None:
    """Without a checksum of the encoded bytes, the digest of the new words notices it."""
    old = words(2000, 2)
    new = words(2000, 2, seed=5) if part is None else changed(old, part)
    encoded = encode(old, new)
    choices = random.Random(1)
    for _ in range(300):
        damaged = bytearray(encoded)
        damaged[choices.randrange(len(damaged))] ^= choices.randrange(1, 256)
        elements = old.copy()
        try:
            decode(memoryview(bytes(damaged)), elements)
        except CorruptCheckpointError:
            continue
        assert elements.tobytes() == new.tobytes()  # such as a flag of zstd that the decoder ignores


def test_the_memory_of_a_decoder_is_bounded_by_the_chunk() -> None:
    old = words(1 << 17, 2)
    for part in (0.02, 0.49, 0.7):
        encoded = memoryview(encode(old, changed(old, part)))
        elements = old.copy()
        tracemalloc.start()
        try:
            decode(encoded, elements)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 8 * old.nbytes, part


def test_encodings_are_numbered_as_documented() -> None:
    documented = [
        line.split()[0] for line in (encoding.__doc__ or "").splitlines() if "frame" in line or "words" in line
    ]
    assert [name for name in KINDS if name in documented] == list(KINDS)
