"""Recovery from replicas in jobs whose processes are threads: bytes, balance, objects, errors, wrong elements."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from ckptcore_recovery.peers.messages import Connection
from ckptcore_recovery.replicas import NoReplicaError, RecoveryReport, ReplicasDifferError, recover
from ckptcore_recovery.replicas.fetching import Fetch, Holders, Wanted
from ckptcore_recovery.replicas.sending import HeldElements, ReplicaServer
from ckptcore_recovery.replicas.transfers import Parcel, Piece
from ckptcore_testing.thread_coordinator import run_ranks

from ckptcore import PLACEHOLDER, Context, PerProcess, ShardedArray
from ckptcore.builtin.sharded_arrays import ArrayShard
from ckptcore.context import MemoryOptions
from ckptcore.errors import CheckpointError, RankFailedError, TreeMismatchError
from ckptcore.model import ArrayRecord, ArraySpec, Box, HostArray, TreeMetadata
from ckptcore.model.transfer import ReadItem, ReadPlan
from ckptcore.model.tree import LEAF
from ckptcore.planning.partition import ReplicaOptions

State = dict[str, Any]


@functools.cache
def elements_of(step: int, rows: int) -> HostArray:
    """Return the elements of the largest array of a state; not to be changed."""
    return np.random.default_rng(step).random((rows, 1000), np.float32)


def state_of(step: int = 7, *, rows: int = 1500) -> State:
    """Return a state whose elements depend on the step."""
    generator = np.random.default_rng(step)
    shared = generator.random((10, 20))
    return {
        "w": elements_of(step, rows).copy(),
        "small": [generator.integers(0, 9, number, np.int8) for number in range(50)],
        "tied": {"a": shared, "b": shared},
        "scalar": np.array(2.5 + step),
        "empty": np.zeros((0, 4)),
        "swapped": [generator.integers(0, 999, 20).astype(dtype) for dtype in (">f4", ">i8", ">c16", ">M8[s]")],
        "strided": generator.random((20, 30))[::-2, 1::3],
        "step": step,
        "rate": 0.1 * step,
        "names": ["a", "b"],
        "nothing": None,
    }


def lost_state(rows: int = 1500) -> State:
    """Return the state of a process that was started again."""
    state = state_of(0, rows=rows)
    return {**state, "names": ["", ""]}


def expect_equal(state: Any, expected: Any) -> None:
    """Check that two states are equal in every bit."""
    if isinstance(expected, np.ndarray):
        assert state.dtype == expected.dtype
        np.testing.assert_array_equal(state, expected, strict=True)
    elif isinstance(expected, dict | list):
        assert len(state) == len(expected)
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            expect_equal(state[key], expected[key])
    else:
        assert state == expected


def run(
    size: int,
    lost: Sequence[int],
    states: Callable[[int], Any],
    *,
    context: Callable[[Context], Context] = lambda context: context,
) -> Sequence[tuple[Any, RecoveryReport, CheckpointError | None]]:
    """Recover in a job. Return the result, the report and the error of each rank."""

    def work(rank: int, given: Context) -> tuple[Any, RecoveryReport, CheckpointError | None]:
        state, report = states(rank), RecoveryReport()
        try:
            return recover(state, lost=rank in lost, report=report, context=context(given)), report, None
        except CheckpointError as error:
            return state, report, error

    return run_ranks(size, work)


def expect_recovered(size: int, lost: Sequence[int], rows: int = 1500) -> Sequence[RecoveryReport]:
    """Recover replicated states, and check them."""
    outcomes = run(size, lost, lambda rank: lost_state(rows) if rank in lost else state_of(rows=rows))
    for state, _, error in outcomes:
        assert error is None, error
        expect_equal(state, state_of(rows=rows))
        assert state["tied"]["a"] is state["tied"]["b"]
    return [report for _, report, _ in outcomes]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the bytes of each message that is sent, with its header."""
    sizes: list[int] = []
    send = Connection.send

    def count(self: Connection, header: Mapping[str, Any], payload: memoryview | bytes = b"") -> None:
        sizes.append(len(json.dumps(header)) + 60 + len(payload))
        send(self, header, payload)

    monkeypatch.setattr(Connection, "send", count)
    return sizes


class Tamperer:
    """Changes what a process holds after all processes have compared their digests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def tamper(self, ranks: Sequence[int], change: Callable[[memoryview], memoryview]) -> None:
        """Change each parcel that some ranks send."""
        compute, read = HeldElements.digests, HeldElements.parcel
        tampering: list[HeldElements] = []

        def digests(self: HeldElements, parcels: Sequence[Parcel], rank: int) -> bytes:
            computed = compute(self, parcels, rank)
            if rank in ranks:
                tampering.append(self)
            return computed

        def parcel(self: HeldElements, wanted: Parcel) -> memoryview:
            data = read(self, wanted)
            return change(data) if self in tampering else data

        self._monkeypatch.setattr(HeldElements, "digests", digests)
        self._monkeypatch.setattr(HeldElements, "parcel", parcel)


@pytest.fixture
def tamperer(monkeypatch: pytest.MonkeyPatch) -> Tamperer:
    """Return an object that lets processes send wrong bytes."""
    return Tamperer(monkeypatch)


def flip_a_bit(data: memoryview) -> memoryview:
    """Return a copy with another bit in the middle."""
    changed = memoryview(bytearray(data))
    changed[len(data) // 2] ^= 1
    return changed


@pytest.mark.parametrize("lost", [(0,), (2,), (1, 3), (0, 1, 2)], ids=str)
def test_lost_states_are_recovered(lost: Sequence[int]) -> None:
    expect_recovered(4, lost)


@pytest.mark.parametrize(
    ("size", "lost", "rows"), [(2, (1,), 1500), (4, (1,), 1500), (4, (0, 3), 3000), (6, (5,), 400)]
)
def test_bytes_are_few_and_balanced(size: int, lost: Sequence[int], rows: int, sent: list[int]) -> None:
    reports = expect_recovered(size, lost, rows)
    needed = sum([report.bytes_needed for report in reports])
    assert needed > len(lost) * rows * 4000
    assert sum([report.bytes_moved for report in reports]) == needed
    assert sum(sent) <= 1.02 * needed
    for rank in lost:
        received = reports[rank].received
        assert received.keys() == set(range(size)) - set(lost)
        assert max(received.values()) <= 1.1 * reports[rank].bytes_needed / len(received)


def test_nothing_is_done_if_no_state_is_lost(sent: list[int]) -> None:
    for state, report, error in run(3, (), lambda rank: state_of()):
        assert error is None
        assert not report.lost
        expect_equal(state, state_of())
    assert not sent


@pytest.mark.parametrize("size", [1, 3])
def test_a_job_that_lost_everything_loads_a_checkpoint(size: int) -> None:
    for state, _, error in run(size, range(size), lambda rank: lost_state()):
        assert isinstance(error, NoReplicaError)
        assert f"all {size} processes of the job lost their state. Load a checkpoint" in str(error)
        expect_equal(state, lost_state())


def test_a_state_that_cannot_be_changed_is_replaced() -> None:
    def states(rank: int) -> tuple[Any, ...]:
        return (0, (np.zeros(3),)) if rank == 1 else (7, (np.arange(3.0),))

    outcomes = run(3, (1,), states)
    for state, _, error in outcomes:
        assert error is None, error
        assert type(state) is tuple
        assert state[0] == 7
        np.testing.assert_array_equal(state[1][0], np.arange(3.0))


def test_parts_of_a_sharded_array_come_from_those_that_hold_them() -> None:
    """Boxes of different processes overlap, and the process needs a box that no other process holds as one."""
    whole = np.arange(1200 * 700, dtype=np.int32).reshape(1200, 700)
    rows = [(0, 500), (300, 900), (600, 1200), (0, 1200), (250, 1000)]

    def states(rank: int) -> State:
        start, stop = rows[rank]
        elements = whole[start:stop].copy() if rank != 4 else np.zeros((stop - start, 700), np.int32)
        shard = ArrayShard(Box((start, 0), (stop, 700)), elements, rank, 5)
        return {"w": ShardedArray(whole.shape, whole.dtype, [shard])}

    outcomes = run(5, (4,), states)
    state, report, error = outcomes[4]
    assert error is None, error
    np.testing.assert_array_equal(state["w"].shards[0].elements, whole[250:1000])
    assert report.bytes_moved == report.bytes_needed == 750 * 700 * 4
    assert report.received[3] < 0.6 * report.bytes_needed, "others hold parts of it, too"


def test_a_shard_that_no_process_holds_is_listed_and_nothing_changes() -> None:
    def states(rank: int) -> State:
        part = Box((10 * rank, 0), (10 * rank + 10, 10))
        shard = ArrayShard(part, np.full((10, 10), rank), rank, 4)
        return {"w": ShardedArray((40, 10), np.int64, [shard]), "step": 7 * (rank != 1)}

    outcomes = run(4, (1,), states)
    for _, _, error in outcomes:
        assert isinstance(error, NoReplicaError)
        assert str(error).startswith(
            "rank 1: state/w[10:20, 0:10]: no process that has its state holds these elements. Load a checkpoint"
        )
    assert outcomes[1][0]["step"] == 0


def test_a_bound_on_memory_is_kept(tamperer: Tamperer) -> None:
    def bounded(context: Context) -> Context:
        return Context(job=context.job, memory=MemoryOptions(load_bytes=1))

    outcomes = run(3, (1,), lambda rank: lost_state() if rank == 1 else state_of(), context=bounded)
    expect_equal(outcomes[1][0], state_of())
    assert outcomes[1][1].bytes_moved == outcomes[1][1].bytes_needed, "parcels that two reads need are received once"


@pytest.mark.parametrize("change", [flip_a_bit, lambda data: data[:-1], lambda data: memoryview(bytes(data) + b"x")])
def test_a_holder_with_wrong_bytes_is_refused_and_named(
    change: Callable[[memoryview], memoryview], tamperer: Tamperer, caplog: pytest.LogCaptureFixture
) -> None:
    tamperer.tamper([2], change)
    reports = expect_recovered(4, (1,))
    assert reports[1].replaced.keys() == {2}
    assert reports[1].received.keys() == {0, 3}
    assert "rank 2" in caplog.text
    assert "rank 1 refused the bytes of this process" in caplog.text


def test_a_silent_holder_is_replaced_and_may_answer_later(
    tamperer: Tamperer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_recovered = threading.Event()
    connect = Holders.connect

    def expect_answers_of_rank_2_soon(self: Holders, *arguments: Any) -> Mapping[int, str]:
        failed = connect(self, *arguments)
        self.connections[2].set_timeout(0.1)
        return failed

    def wait(data: memoryview) -> memoryview:
        assert is_recovered.wait(600)
        return data

    monkeypatch.setattr(Holders, "connect", expect_answers_of_rank_2_soon)
    tamperer.tamper([2], wait)

    def work(rank: int, context: Context) -> RecoveryReport:
        state, report = lost_state() if rank == 1 else state_of(), RecoveryReport()
        recover(state, lost=rank == 1, report=report, context=context)
        expect_equal(state, state_of())
        if rank == 1:
            is_recovered.set()
        return report

    report = run_ranks(4, work)[1]
    assert report.replaced == {2: "TimeoutError: timed out"}
    assert report.received.keys() == {0, 3}
    assert "rank 1 refused the bytes of this process: timed out" in caplog.text


def test_if_no_holder_sends_the_right_bytes_the_error_names_all(tamperer: Tamperer) -> None:
    tamperer.tamper([0, 2], flip_a_bit)
    outcomes = run(3, (1,), lambda rank: lost_state() if rank == 1 else state_of())
    error = outcomes[1][2]
    assert error is not None
    assert "every process that holds it has failed" in str(error)
    assert "rank 0: RefusedError" in str(error)
    assert "rank 2: RefusedError" in str(error)


def test_the_majority_of_three_decides_about_a_corrupt_element(caplog: pytest.LogCaptureFixture) -> None:
    def states(rank: int) -> State:
        state = lost_state() if rank == 1 else state_of()
        if rank == 3:
            state["w"][700, 500] += 1
            state["small"][7][3] ^= 1
        return state

    outcomes = run(4, (1,), states)
    for rank, (state, report, error) in enumerate(outcomes):
        assert error is None, error
        assert report.differing == {3: ["state/w", "state/small[7]"]}
        if rank != 3:
            expect_equal(state, state_of())
    assert "rank 3 differs from the majority in state/w, state/small[7]: its memory may be corrupt" in caplog.text
    assert not outcomes[1][1].replaced


def test_two_holders_that_disagree_are_named() -> None:
    def states(rank: int) -> State:
        state = lost_state() if rank == 1 else state_of()
        if rank == 2:
            state["w"][0, 0] += 1
            state["small"][7][3] ^= 1
        return state

    outcomes = run(3, (1,), states)
    for _, _, error in outcomes:
        assert isinstance(error, ReplicasDifferError)
        first, *lines, _ = str(error).split("\n")
        assert first.endswith("there is no majority:")
        assert lines == ["  state/w: ranks 0, 2", "  state/small[7]: ranks 0, 2"]
        assert "Nothing was changed" in str(error)
    expect_equal(outcomes[1][0], lost_state())


def test_holders_at_different_steps_are_named() -> None:
    outcomes = run(4, (1,), lambda rank: lost_state() if rank == 1 else {**state_of(), "step": 7 + rank // 3})
    for _, _, error in outcomes:
        assert isinstance(error, ReplicasDifferError)
        assert "step: int 7 on ranks 0, 2; int 8 on rank 3" in str(error)
    expect_equal(outcomes[1][0], lost_state())


def test_another_structure_is_refused_and_nothing_changes() -> None:
    def states(rank: int) -> State:
        return {**lost_state(), "w": np.zeros((3, 3), np.float32)} if rank == 1 else state_of()

    outcomes = run(3, (1,), states)
    assert isinstance(outcomes[1][2], TreeMismatchError)
    assert "state/w: shape" in str(outcomes[1][2])
    assert "Create it as they did, or put PLACEHOLDER" in str(outcomes[1][2])
    assert outcomes[1][0]["step"] == 0
    for rank in (0, 2):
        assert isinstance(outcomes[rank][2], RankFailedError)
        assert "rank 1: TreeMismatchError" in str(outcomes[rank][2])


def test_a_value_that_only_the_lost_process_had_is_listed() -> None:
    def states(rank: int) -> State:
        state = lost_state() if rank == 1 else state_of()
        return {**state, "rng": {"own": PerProcess(np.full(3, rank))}}

    outcomes = run(3, (1,), states)
    for _, _, error in outcomes:
        assert isinstance(error, NoReplicaError)
        assert "rank 1: state/rng/own: in PerProcess(...), so only this process had the value" in str(error)
        assert "Load a checkpoint. Nothing was changed" in str(error)
    np.testing.assert_array_equal(outcomes[1][0]["w"], lost_state()["w"])

    def with_placeholder(rank: int) -> State:
        state = states(rank)
        return {**state, "rng": PLACEHOLDER} if rank == 1 else state

    outcomes = run(3, (1,), with_placeholder)
    assert outcomes[1][2] is None, outcomes[1][2]
    np.testing.assert_array_equal(outcomes[1][0]["w"], state_of()["w"])
    assert outcomes[0][0]["rng"]["own"].value[0] == 0


class Loader:
    """An iterator over data, of which every process has its own. It accepts numbers up to 8."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.buffer = np.full(5, position)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["position"] > 8:
            raise ValueError("not this one")
        self.position, self.buffer = state["position"], state["buffer"]


def of_lowest_rank(context: Context) -> Context:
    """Return the options with which the state of the lowest rank counts for objects of which every process has one."""
    return Context(job=replace(context.job, replicas=ReplicaOptions(objects="lowest_rank")))


def test_an_object_of_which_every_process_has_its_own_is_refused_unless_that_of_one_counts() -> None:
    def states(rank: int) -> State:
        return {"loader": Loader(rank), "w": np.full(10, rank == 1)}

    outcomes = run(4, (1,), states)
    for _, _, error in outcomes:
        assert "loader is a plugins.recovery.tests.test_replicas.Loader: every process has its own" in str(error)
    outcomes = run(4, (1,), states, context=of_lowest_rank)
    for rank, (state, _, error) in enumerate(outcomes):
        assert error is None, error
        assert state["loader"].position == state["loader"].buffer[0] == (0 if rank == 1 else rank)


def test_all_holders_hear_of_a_process_that_failed() -> None:
    def states(rank: int) -> State:
        return {"loader": Loader(9), "w": np.full(10, rank == 1)}

    outcomes = run(3, (1,), states, context=of_lowest_rank)
    assert isinstance(outcomes[1][2], TreeMismatchError)
    assert outcomes[1][0]["w"].all()
    for rank in (0, 2):
        assert isinstance(outcomes[rank][2], RankFailedError)
        assert "rank 1: TreeMismatchError" in str(outcomes[rank][2])
        assert "not this one" in str(outcomes[rank][2])


@pytest.fixture
def server() -> Iterator[ReplicaServer]:
    """Return a server that nothing was given to send."""
    server = ReplicaServer("127.0.0.1", b"t" * 32, [1])
    yield server
    server.close()


@pytest.mark.parametrize(
    "header",
    [{"op": "hello", "rank": 2}, {"op": "hello", "rank": True}, {"op": "hello"}, {"op": "parcel", "number": 0}, {}],
    ids=str,
)
def test_a_process_that_did_not_lose_its_state_gets_nothing(header: dict[str, Any], server: ReplicaServer) -> None:
    with socket.create_connection(server.address, timeout=30) as connected:
        connection = Connection(connected, b"t" * 32, is_server=False)
        connection.set_timeout(30)
        connection.send(header)
        with pytest.raises(OSError, match="closed|reset"):
            connection.receive()


@pytest.mark.parametrize("payload", [b"", b"x" * 100])
def test_unknown_requests_and_payloads_end_the_connection(payload: bytes, server: ReplicaServer) -> None:
    with socket.create_connection(server.address, timeout=30) as connected:
        connection = Connection(connected, b"t" * 32, is_server=False)
        connection.set_timeout(30)
        connection.send({"op": "hello", "rank": 1})
        connection.receive()
        connection.send({"op": "no such" if not payload else "parcel", "number": 0}, payload)
        with pytest.raises(OSError, match="closed|reset"):
            connection.receive()
    with pytest.raises(RankFailedError, match="rank 1: it closed its connection before it had its state"):
        server.serve(lambda number: memoryview(b""), [1])


def test_a_wrong_token_is_refused(server: ReplicaServer) -> None:
    with (
        socket.create_connection(server.address, timeout=30) as connected,
        pytest.raises(OSError, match="token|closed"),
    ):
        Connection(connected, b"x" * 32, is_server=False)


def test_a_parcel_that_a_process_does_not_hold_is_an_error(server: ReplicaServer) -> None:
    with socket.create_connection(server.address, timeout=30) as connected:
        connection = Connection(connected, b"t" * 32, is_server=False)
        connection.send({"op": "hello", "rank": 1})
        connection.receive()
        connection.send({"op": "parcel", "number": -1})
        connection.send({"op": "end", "error": None, "refusal": None})
        server.serve({0: memoryview(b"abc")}.__getitem__, [1])
        header, data = connection.receive()
        assert header["error"] == "storage"
        assert not data


def list_as_header(connection: Connection) -> bytes:
    """Return a message whose header is a list, with the code that proves who sent it."""
    frame = struct.pack("<III", connection._sent, 2, 0)
    return frame + connection._code(b"server", frame, b"[]") + b"[]"


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<III", 0, 0xFFFFFFFF, 0),
        struct.pack("<III", 0, 10, 0xFFFFFFFF),
        struct.pack("<III", 7, 10, 0),
        struct.pack("<III", 0, 10, 1 << 22),
        b"",
        list_as_header,
    ],
    ids=["header", "payload", "number", "code", "nothing", "list"],
)
def test_a_holder_with_invalid_messages_is_named_and_no_memory_is_taken(
    frame: bytes | Callable[[Connection], bytes],
) -> None:
    def answer() -> None:
        accepted, _ = listening.accept()
        with accepted:
            connection = Connection(accepted, b"t" * 32, is_server=True)
            connection.send(connection.receive()[0])  # hello
            connection.receive()  # the request
            with contextlib.suppress(OSError):  # the other side closes it at once
                if callable(frame):
                    accepted.sendall(frame(connection))
                elif frame:
                    accepted.sendall(frame + b"\0" * 16 + b"{" * 10)
                accepted.shutdown(socket.SHUT_WR)
                while accepted.recv(1 << 16):
                    pass

    item = ReadItem(0, Box.whole((10,)))
    wanted = Wanted(
        {0: Parcel((Piece(item, item.box),), 40, (5,), {1: 5})},
        [b"d" * 16],
        {},
        {item: 1},
        {0: np.dtype(np.float32)},
        ["w"],
    )
    tree = TreeMetadata(LEAF, (ArrayRecord(ArraySpec((10,), "float32")),))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer)
        thread.start()
        tracemalloc.start()
        try:
            holders = Holders({}, {})
            holders.connect(1, b"t" * 32, {5: ("127.0.0.1", listening.getsockname()[1])})
            fetch = Fetch(1, wanted, holders)
            with pytest.raises(NoReplicaError, match=r"w: every process that holds it has failed \(rank 5: .*Error"):
                list(fetch.read(ReadPlan(tree, (item,)), [np.zeros(10, np.float32)]))
            assert tracemalloc.get_traced_memory()[1] < 1 << 24
        finally:
            tracemalloc.stop()
        thread.join()
    assert fetch.failed.keys() == {5}


@pytest.mark.parametrize("unreachable", [{2}, {0, 2}], ids=str)
def test_holders_to_which_no_connection_is_possible_are_known_before_anything_changes(
    unreachable: set[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listens_at = cast(Any, ReplicaServer.address).fget
    unreachable_at = [f"127.0.0.{rank + 1}" for rank in unreachable]

    def address(server: ReplicaServer) -> tuple[str, int]:
        host, port = listens_at(server)
        return host, 1 if host in unreachable_at else port

    monkeypatch.setattr(ReplicaServer, "address", property(address))

    def work(rank: int, context: Context) -> tuple[State, RecoveryReport, CheckpointError | None]:
        state, report = lost_state() if rank == 1 else state_of(), RecoveryReport()
        try:
            recover(state, lost=rank == 1, interface=f"127.0.0.{rank + 1}", report=report, context=context)
        except CheckpointError as error:
            return state, report, error
        return state, report, None

    outcomes = run_ranks(3, work)
    for _, _, error in outcomes:
        if len(unreachable) == 1:
            assert error is None, error
        else:
            assert isinstance(error, NoReplicaError)
            assert "rank 1 cannot connect to a process that holds it (rank 0 at 127.0.0.1:1: Connection" in str(error)
            assert "rank 2 at 127.0.0.3:1: Connection" in str(error)
            assert "Pass interface= with the address of each host" in str(error)
    state, report, error = outcomes[1]
    expect_equal(state, lost_state() if error else state_of())
    assert report.replaced.keys() == (set() if error else unreachable)
    assert "rank 2 cannot send its part of the state: 127.0.0.3:1: Connection" in caplog.text


def test_an_address_of_another_host_fails_on_all_ranks_and_nothing_changes() -> None:
    def work(rank: int, context: Context) -> str:
        state = lost_state() if rank == 1 else state_of()
        with pytest.raises(CheckpointError) as caught:
            recover(state, lost=rank == 1, interface="192.0.2.1" if rank == 2 else "127.0.0.1", context=context)
        expect_equal(state, lost_state() if rank == 1 else state_of())
        return f"{type(caught.value).__name__}: {caught.value}"

    errors = run_ranks(3, work)
    assert errors[2].startswith("StorageError: cannot listen on '192.0.2.1'")
    for error in errors:
        assert "Pass interface= with an IP address of this host" in error
    assert not [thread for thread in threading.enumerate() if thread.name == "ckptcore-listen" and thread.is_alive()]
