"""The pickle machine and encoder, compared with Python's own pickle and with torch."""

from __future__ import annotations

import collections
import io
import math
import os
import pickle
import pickletools
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptcore_dcp.pickled_trees import Unreadable, tree_of
from ckptcore_dcp.pickles import Call, Global, Persistent, brief, builtin_value, read_pickle, write_pickle
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict_saver import save

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
KEYS = st.text() | st.integers() | st.booleans() | st.tuples(st.text(), st.integers()) | st.floats(allow_nan=False)
VALUES = st.recursive(
    SCALARS | st.complex_numbers(allow_nan=False) | st.sets(st.integers() | st.text()) | st.frozensets(st.binary()),
    lambda inner: (
        st.lists(inner, max_size=5) | st.lists(inner, max_size=5).map(tuple) | st.dictionaries(KEYS, inner, max_size=5)
    ),
    max_leaves=20,
)


def plain(value: Any) -> Any:
    """Return a small value as Python would build it: calls of builtins are replaced by their results."""
    match value:
        case Call():
            call = Call(value.function, tuple(plain(each) for each in value.arguments))
            made = builtin_value(call)
            assert not isinstance(made, Call), made
            return made
        case list():
            return [plain(each) for each in value]
        case tuple():
            return tuple(plain(each) for each in value)
        case set():
            return {plain(each) for each in value}
        case frozenset():
            return frozenset(plain(each) for each in value)
        case dict():
            return {plain(name): plain(each) for name, each in value.items()}
    return value


def same(left: Any, right: Any) -> bool:
    return repr(left) == repr(right) or left == right


@pytest.mark.parametrize("protocol", range(6))
@given(value=VALUES)
def test_pickles_written_by_python_are_read(protocol: int, value: Any) -> None:
    data = pickle.dumps(value, protocol)
    decoded, end = read_pickle(b"before" + data + b"after", key="k", start=6)
    made = plain(decoded)
    if protocol < 3:  # below protocol 3 a set of bytes contains calls, so compare plain values
        assert made == value
    assert same(made, value)
    assert end == 6 + len(data)


@pytest.mark.parametrize("protocol", [2, 4])
@given(value=VALUES)
def test_python_reads_our_pickles(protocol: int, value: Any) -> None:
    data = write_pickle(value, protocol=protocol)
    assert pickle.loads(data) == value
    # Python's implementation, unlike that in C, checks the frames.
    assert pickle._Unpickler(io.BytesIO(data)).load() == value
    pickletools.dis(data, io.StringIO())
    assert plain(read_pickle(data, key="k")[0]) == value
    assert write_pickle(value, protocol=protocol) == data


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    "value",
    [
        *[
            None,
            True,
            0,
            255,
            256,
            65535,
            65536,
            -1,
            2**31 - 1,
            -(2**31),
            2**31,
            2**63,
            -(2**63),
            -(2**63) - 1,
            2**2000,
        ],
        *[
            0.1,
            math.inf,
            "",
            "x" * 255,
            "x" * 256,
            "é" * 200,
            b"",
            b"a",
            b"\xff" * 256,
            (),
            (1,),
            (1, 2),
            (1, 2, 3),
            (1, 2, 3, 4),
        ],
        *[[], [1], [1, 2], list(range(1000)), list(range(1001)), {}, {"a": 1}, {"a": 1, "b": [()]}],
        {number: [number] for number in range(2001)},
    ],
    ids=lambda value: repr(value)[:20],
)
def test_the_encoder_writes_the_same_bytes_as_pickle(protocol: int, value: Any) -> None:
    written = write_pickle(value, protocol=protocol)
    if value == b"" and protocol == 2:
        # ``bytes`` is encoded without a call, because torch rejects calls of ``bytes``.
        assert pickle.loads(written) == value
    else:
        assert written == pickle.dumps(value, protocol)


def test_a_large_value_is_written_in_frames() -> None:
    value: list[Any] = [("name", float(number), str(number)) for number in range(50_000)]
    data = write_pickle(value, protocol=4)
    frames: list[Any] = [argument for opcode, argument, _ in pickletools.genops(data) if opcode.name == "FRAME"]
    assert len(frames) > 5
    assert max(frames) < 300_000
    assert pickle._Unpickler(io.BytesIO(data)).load() == value
    assert read_pickle(data, key="k") == (value, len(data))


@pytest.mark.system
def test_bytes_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "from ckptcore_dcp.pickles import write_pickle, Global, Call\n"
        "value = [{'b', 'a', 'c', 'dd'}, frozenset(['x', 'y', 'z']), "
        "{'k': Call(Global('a', 'b'), ('q',))}, 'q', ''.join(['q'])]\n"
        "print(write_pickle(value, protocol=2).hex(), write_pickle(value, protocol=4).hex())"
    )
    written = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(written) == 1


@pytest.mark.parametrize("protocol", [2, 4])
def test_shared_values_stay_shared(protocol: int) -> None:
    inner: list[Any] = [1]
    pair = (inner, "x")
    call = Call(Global("m", "f"), (inner,), state={"s": pair}, appended=[pair], pairs=[("k", inner)])
    value: Any = read_pickle(write_pickle([inner, pair, pair, call, call, {"a": inner}], protocol=protocol), key="k")[0]
    assert issubclass(type(value), list)
    assert value[1] is value[2]
    assert value[1][0] is value[0]
    assert value[3] is value[4]
    assert value[3].arguments[0] is value[0]
    assert value[3].state["s"] is value[1]
    assert value[3].appended[0] is value[1]
    assert value[3].pairs[0][1] is value[0]
    assert value[5]["a"] is value[0]


@pytest.mark.parametrize("protocol", [2, 4])
def test_values_that_contain_themselves_are_read(protocol: int) -> None:
    row: list[Any] = []
    row.append(row)
    decoded = pickle.loads(write_pickle(row, protocol=protocol))
    assert decoded[0] is decoded
    for size in (1, 5):
        held: list[Any] = []
        pair = (held,) * size
        held.append(pair)
        data = write_pickle(pair, protocol=protocol)
        reads: list[Any] = [pickle.loads(data), read_pickle(data, key="k")[0]]
        for read in reads:
            assert read[0][0] is read
    call = Call(Global("m", "f"), (held,))
    held.append(call)
    call.state = call
    for value in (call, held):
        made: Any = read_pickle(write_pickle(value, protocol=protocol), key="k")[0]
        made = made if isinstance(made, Call) else made[1]
        assert made.state is made
        assert made.arguments[0][1] is made


@pytest.mark.parametrize("protocol", [2, 4])
def test_calls_with_themselves_as_argument_are_refused(protocol: int) -> None:
    call = Call(Global("m", "f"))
    call.arguments = (1j, "a", b"b", call)
    with pytest.raises(UnsupportedLeafError, match="contains itself"):
        write_pickle(call, protocol=protocol)
    call.arguments = ({call},)
    if protocol == 2:  # protocol 4 puts the set into the memo before its items, so the cycle can be written
        with pytest.raises(UnsupportedLeafError, match="contains itself"):
            write_pickle(call, protocol=protocol)


def test_calls_survive_a_round_trip() -> None:
    call = Call(
        Global("collections", "OrderedDict"),
        (),
        state={"a": 1},
        appended=list(range(1200)),
        pairs=[([], 1), ("b", Persistent(("storage", Global("torch", "FloatStorage"), "0", "cpu", 4)))],
        keywords={"key": 2.5},
        new=True,
    )
    value: Any = read_pickle(write_pickle(call, protocol=4), key="k")[0]
    assert issubclass(type(value), Call)
    assert value.function == call.function
    assert (value.arguments, value.state, value.appended, value.pairs) == ((), {"a": 1}, call.appended, call.pairs)
    assert (value.keywords, value.new) == (call.keywords, True)
    with pytest.raises(UnsupportedLeafError, match="keywords"):
        write_pickle(call, protocol=2)


@pytest.mark.parametrize("value", [object(), bytearray(b"a"), range(3), collections.OrderedDict(), torch.float32])
def test_unsupported_values_are_not_written(value: Any) -> None:
    with pytest.raises(UnsupportedLeafError, match="cannot be written"):
        write_pickle([value], protocol=2)
    with pytest.raises(UnsupportedLeafError, match="255 bytes"):
        write_pickle(1 << 2040, protocol=2)
    with pytest.raises(ValueError, match="protocol 3"):
        write_pickle(None, protocol=3)


def test_deep_values_are_written_and_read() -> None:
    value: Any = []
    for number in range(50_000):
        value = (value,) if number % 2 else [value]
    data = write_pickle(value, protocol=4)
    decoded: Any = read_pickle(data, key="k")[0]
    for _ in range(50_000):
        decoded = decoded[0]
    assert decoded == []
    with pytest.raises(CorruptCheckpointError, match="deep"):
        tree_of(value, key="k", limit=10**6)


def test_globals_keep_their_stored_names() -> None:
    data = pickle.dumps([set, collections.OrderedDict, math.sin], 2)
    assert read_pickle(data, key="k")[0] == [
        Global("__builtin__", "set"),
        Global("collections", "OrderedDict"),
        Global("math", "sin"),
    ]


def test_texts_of_python_2() -> None:
    assert read_pickle(b"(S'a\\x41\\n\\'b'\nU\x02\xc3\xa9T\x02\x00\x00\x00\xff\xfeVx\\u00e9\nl.", key="k")[0] == [
        "aA\n'b",
        "é",
        b"\xff\xfe",
        "xé",
    ]


def test_memo_entries_in_any_order() -> None:
    assert read_pickle(b"(NNN]q\x03Nq\x01h\x03h\x01l.", key="k")[0] == [None, None, None, [], None, [], None]
    with pytest.raises(CorruptCheckpointError, match="before it is set"):
        read_pickle(b"(NNN]q\x03h\x01l.", key="k")


def test_fused_opcodes_give_the_same_result_as_single_ones() -> None:
    # The machine executes `new object with attributes` and `call with a pair` in one step each. POP between the opcodes
    # prevents this.
    class_ = b"cm\nC\nq\x00"
    fused = class_ + b")\x81\x94}\x94(\x8c\x01a\x94h\x00K\x01K\x02\x86\x94\x85\x94R\x94ub."
    single = class_ + b")N0\x81\x94}\x94(\x8c\x01a\x94h\x00K\x01K\x02\x86N0\x94\x85\x94R\x94uN0b."
    for data in (fused, single):
        value: Any
        value, end = read_pickle(data, key="k")
        assert end == len(data)
        assert issubclass(type(value), Call)
        assert value.new
        assert value.function == Global("m", "C")
        assert issubclass(type(value.state), dict)
        size = value.state["a"]
        assert issubclass(type(size), Call)
        assert (size.function, size.arguments, size.new) == (Global("m", "C"), ((1, 2),), False)
    for number in range(10):  # both pickles have the same memo entries
        tail = b"0h" + bytes([number]) + b"."
        answers = []
        for data in (fused, single):
            try:
                answers.append(repr(read_pickle(data[:-1] + tail, key="k")[0]))
            except CorruptCheckpointError:
                answers.append("none")
        assert answers[0] == answers[1]
        assert (answers[0] == "none") == (number > 6)


def test_an_error_says_where_a_truncated_pickle_ends() -> None:
    data = pickle.dumps({"a": [1, 2.5, "x" * 300, b"y" * 300, 2**70], "b": (True, None)}, 4)
    for protocol in range(6):
        data = pickle.dumps({"a": [1, 2.5, "x" * 300, b"y" * 300, 2**70], "b": (True, None)}, protocol)
        for stop in range(len(data)):
            with pytest.raises(CorruptCheckpointError) as caught:
                read_pickle(data[:stop], key="the key")
            assert caught.value.key == "the key"
            assert caught.value.stop is not None
            assert caught.value.stop > stop
    with pytest.raises(CorruptCheckpointError):
        read_pickle(b"N.", key="k", start=3)
    assert read_pickle(memoryview(b"..N."), key="k", start=2) == (None, 4)


def state() -> dict[str, Any]:
    return {
        "weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
        "parameter": torch.nn.Parameter(torch.zeros(2)),
        "fp8": torch.zeros(4, dtype=torch.float8_e4m3fn),
        "nested": {"a": [1, 2.5, "text", b"bytes", None, (True, {1, 2}, 1j)], 3: torch.tensor(1)},
    }


def test_files_of_torch(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    file = io.BytesIO()
    torch.save({**state(), "model": model.state_dict()}, file)
    with zipfile.ZipFile(file) as archive:
        data = archive.read("archive/data.pkl")
    value: Any
    value, end = read_pickle(data, key="k")
    assert end == len(data)
    assert issubclass(type(value), dict)
    weight = value["weight"]
    assert issubclass(type(weight), Call)
    assert weight.function == Global("torch._utils", "_rebuild_tensor_v2")
    assert weight.arguments[0] == Persistent(("storage", Global("torch", "BFloat16Storage"), "0", "cpu", 6))
    assert weight.arguments[1:5] == (0, (3, 2), (1, 3), False)
    weights = value["model"]
    assert issubclass(type(weights), Call)
    assert weights.function == Global("collections", "OrderedDict")
    assert [name for name, _ in weights.pairs] == ["weight", "bias"]
    assert issubclass(type(weights.state), dict)
    assert list(weights.state) == ["_metadata"]

    rewritten = io.BytesIO()
    with zipfile.ZipFile(file) as archive, zipfile.ZipFile(rewritten, "w") as copy:
        for name in archive.namelist():
            copy.writestr(name, write_pickle(value, protocol=2) if name.endswith("data.pkl") else archive.read(name))
    rewritten.seek(0)
    loaded = torch.load(rewritten, weights_only=True)
    file.seek(0)
    expected = torch.load(file, weights_only=True)
    assert list(loaded) == list(expected)
    assert torch.equal(loaded["weight"], expected["weight"])
    assert loaded["weight"].stride() == (1, 3)
    assert isinstance(loaded["parameter"], torch.nn.Parameter)
    assert loaded["nested"]["a"] == expected["nested"]["a"]
    assert torch.equal(loaded["model"]["weight"], expected["model"]["weight"])
    assert loaded["model"]._metadata == expected["model"]._metadata


@pytest.mark.filterwarnings("ignore")  # torch warns that there is a single process
def test_metadata_of_dcp(tmp_path: Path) -> None:
    save(state(), checkpoint_id=tmp_path / "checkpoint")
    data = (tmp_path / "checkpoint" / ".metadata").read_bytes()
    value: Any
    value, end = read_pickle(data, key=".metadata")
    assert end == len(data)
    assert issubclass(type(value), Call)
    assert value.function == Global("torch.distributed.checkpoint.metadata", "Metadata")
    assert issubclass(type(value.state), dict)
    stored = value.state["storage_data"]
    assert issubclass(type(stored), dict)
    expected = pickle.loads(data)
    assert [key.state["fqn"] for key in stored] == [index.fqn for index in expected.storage_data]
    for protocol in (2, 4):
        assert pickle.loads(write_pickle(value, protocol=protocol)) == expected


def test_descriptions_of_large_values_are_short() -> None:
    deep: Any = ()
    for _ in range(100_000):
        deep = (deep,)
    large: list[Any] = [
        deep,
        "x" * 10**6,
        b"x" * 10**6,
        1 << 8000,
        Global("m" * 10**6, "n" * 10**6),
        Persistent(deep),
        {1: deep},
    ]
    large += [Call(deep, (deep,)), Call(Global("a", "b"), deep), Call(Call(Call("f")))]
    for value in large:
        assert len(brief(value)) < 300
    assert repr(Call(Global("a", "b"), (1, 2))) == "<call of a.b with 2 arguments>"


def test_trees_have_a_limit_of_leaves() -> None:
    value: Any = []
    for _ in range(100):
        value = [value, value]
    with pytest.raises(CorruptCheckpointError, match="more leaves than bytes"):
        tree_of(value, key="k", limit=10_000)
    row: list[Any] = []
    row.append(row)
    assert [type(leaf) for leaf in tree_of(row, key="k", limit=10_000)[1]] == [Unreadable]
    tree_of({"a": [1, (2, Call(Global("a", "b"), (3,), state={"x": 1}))]}, key="k", limit=20)
    with pytest.raises(CorruptCheckpointError):
        tree_of(list(range(20)), key="k", limit=20)


@given(data=st.data(), value=VALUES, protocol=st.integers(0, 5))
def test_damage_raises_an_error_or_gives_another_value(data: st.DataObject, value: Any, protocol: int) -> None:
    good = bytearray(pickle.dumps(value, protocol))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(good) - 1))
        match data.draw(st.integers(0, 2)):
            case 0:
                good[place] = data.draw(st.integers(0, 255))
            case 1:
                good.insert(place, data.draw(st.integers(0, 255)))
            case _ if len(good) > 1:
                del good[place]
    try:
        decoded, end = read_pickle(bytes(good), key="k")
    except CorruptCheckpointError:
        return
    assert 0 < end <= len(good)
    brief(decoded)
