"""Objects in memory survive lost hosts, killed servers and damaged copies; a new incarnation of a job takes over."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import resource
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from ckptcore_recovery.peers import messages
from ckptcore_recovery.peers import session as session_module
from ckptcore_recovery.peers.connections import ServerConnections, ServerLostError
from ckptcore_recovery.peers.joining import MemoryOptions
from ckptcore_recovery.peers.messages import BLOCK_BYTES, PIECE_BYTES
from ckptcore_recovery.peers.session import Session
from ckptcore_recovery.peers.spreading import spread
from ckptcore_recovery.peers.storage import PeerStorage

from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError, SaveLostError, StorageError, StorageFullError
from plugins.recovery.tests.job_hosts import Hosts

pytestmark = pytest.mark.system

LARGE = bytes(range(256)) * (9 << 12)  # more than two pieces


def storage(session: Session) -> PeerStorage:
    """Return the whole memory of a job as one of its processes uses it."""
    return PeerStorage(session.job, "", session)


def write(session: Session, key: str, data: bytes) -> None:
    """Write a large object in pieces."""
    writer = storage(session).open_writer(key, len(data))
    writer.write_at(0, data)
    writer.finish()


def blobs(hosts: Hosts, host: str) -> list[Path]:
    """Return the files of the complete blobs of a host."""
    server = hosts.server(host)
    assert server is not None
    return [path for path in (server.directory / "blobs").iterdir() if not path.suffix]


def test_every_object_survives_the_loss_of_any_one_host(hosts: Hosts) -> None:
    for lost in ("a", "b", "c"):
        for session, name in zip(hosts.join("a", "b", "c"), "abc", strict=True):
            write(session, f"large-{name}", LARGE + name.encode())
            storage(session).put(f"small-{name}", name.encode())
        hosts.lose(lost)
        for session in hosts.join(*{"a", "b", "c"} - {lost}, "spare"):
            for name in "abc":
                assert storage(session).get(f"large-{name}") == LARGE + name.encode()
                assert storage(session).get(f"small-{name}") == name.encode()
        hosts.lose("spare")


def test_objects_of_any_size_and_name_that_threads_write_survive_the_loss_of_a_host(hosts: Hosts) -> None:
    sizes = [0, 1, *[whole + more for whole in (BLOCK_BYTES, PIECE_BYTES, 2 * PIECE_BYTES) for more in (-1, 0, 1)]]
    objects = {f"d\udce9\u00e9/{size}": random.Random(size).randbytes(size) for size in sizes}
    session, *_ = hosts.join("a", "b", "c")

    def put(key: str, stride: int) -> None:
        writer = storage(session).open_writer(key, len(objects[key]))
        view = memoryview(objects[key])
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda at: writer.write_at(at, view[at : at + stride]), range(0, len(view), stride)))
        writer.finish()

    with ThreadPoolExecutor(len(objects)) as threads:
        list(threads.map(put, objects, itertools.cycle([PIECE_BYTES, 2 * PIECE_BYTES, PIECE_BYTES // 3])))
    hosts.lose("a")
    for joined in hosts.join("b", "c"):
        assert {key: storage(joined).get(key) for key in storage(joined).list()} == objects
        assert all(storage(joined).size(key) == len(data) for key, data in objects.items())


def test_hosts_that_left_the_job_can_be_lost(hosts: Hosts) -> None:
    first, second, *_ = hosts.join("a", "b", "c", "d")
    write(first, "of a", LARGE)
    write(second, "of b", LARGE)
    hosts.join("c", "d")
    for host in ("a", "b", "c"):
        hosts.lose(host)
    for session in hosts.join("d", "spare"):
        assert storage(session).get("of a") == LARGE
        assert storage(session).get("of b") == LARGE


def test_memory_is_read_from_a_host_that_left_the_job(hosts: Hosts) -> None:
    first, second = hosts.join("a", "b")
    write(first, "of a", LARGE)
    write(second, "of b", LARGE)
    hosts.options = replace(hosts.options, limit=len(LARGE) * 3 // 2)  # room for one of them
    hosts.join("a", "c")
    (alone,) = hosts.join("c")
    assert storage(alone).get("of a") == LARGE
    assert storage(alone).get("of b") == LARGE
    assert len(blobs(hosts, "c")) == 1


def test_a_killed_server_is_started_again_with_its_memory(hosts: Hosts) -> None:
    (session,) = hosts.join("a")
    write(session, "large", LARGE)
    storage(session).put("small", b"1")
    hosts.kill("a")
    (again,) = hosts.join("a")
    assert storage(again).get("large") == LARGE
    assert storage(again).get("small") == b"1"


def test_a_job_goes_on_after_its_server_was_killed(hosts: Hosts) -> None:
    first, second = hosts.join("a", "b")
    write(first, "before", LARGE)
    hosts.kill("a")
    write(first, "after", LARGE)  # starts the server again
    for session in (first, second):
        assert storage(session).get("before") == storage(session).get("after") == LARGE


def test_a_start_with_another_interface_has_the_memory_of_the_server_that_runs(hosts: Hosts) -> None:
    (session,) = hosts.join("a")
    write(session, "large", LARGE)
    before = hosts.pids("a")
    for interface, reached in (("127.0.0.2", "127.0.0.2"), ("127.0.0.1", "127.0.0.2"), ("127.0.0.3", "127.0.0.3")):
        hosts.options = replace(hosts.options, interface=interface)  # 127.0.0.1 is the default
        first, second = hosts.join("a", "b")
        assert [member.host for member in first.view.members] == [reached] * 2
        assert storage(second).get("large") == storage(session).get("large") == LARGE
    assert hosts.pids("a") == before
    hosts.kill("a")
    for joined in hosts.join("a", "b"):
        assert [member.host for member in joined.view.members] == ["127.0.0.3"] * 2
        assert storage(joined).get("large") == LARGE


def test_an_interface_that_is_not_of_this_host_is_named(hosts: Hosts) -> None:
    for before in ((), ("a",)):  # without a server, and with one
        hosts.options = replace(hosts.options, interface="127.0.0.1")
        for host in before:
            hosts.join(host)
        hosts.options = replace(hosts.options, interface="198.51.100.1")
        with pytest.raises(ExceptionGroup) as failed:
            hosts.join("a")
        assert "cannot listen on '198.51.100.1'" in str(failed.value.exceptions)


def test_a_host_that_others_cannot_reach_by_the_default_interface_is_told_of_it(hosts: Hosts) -> None:
    session, _ = hosts.join("a", "b")
    hosts.lose("b")
    with pytest.raises(StorageError, match="127.0.0.1:.*Pass interface= with the address of each host"):
        spread(session, {"op": "end", "epoch": session.view.epoch}, b"")


def test_a_server_may_have_as_many_open_files_as_the_system_allows(hosts: Hosts) -> None:
    """Each of its blobs is one. A layout of many files has thousands, and a shell often allows 1024."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024 if most == resource.RLIM_INFINITY else most // 2, most))
    try:
        hosts.join("a")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    assert resource.prlimit(hosts.pids("a")[0], resource.RLIMIT_NOFILE) == (most, most)


def test_a_server_is_started_once_on_a_host(hosts: Hosts) -> None:
    hosts.join("a", "a", "a")
    before = hosts.pids("a")
    hosts.join("a", "a")
    assert hosts.pids("a") == before


def test_several_processes_of_each_host_join(hosts: Hosts) -> None:
    first, *_ = hosts.join("a", "b", "b", "b")  # the server of b gets the token of a
    write(first, "large", LARGE)
    hosts.lose("a")
    for session in hosts.join("spare", "spare", "spare", "b"):
        assert storage(session).get("large") == LARGE


def test_a_job_of_many_hosts_keeps_the_connections_of_an_unfinished_object(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_ = hosts.join(*"abcd")
    monkeypatch.setattr(session_module, "_MAX_CONNECTED", 1)
    writer = storage(first).open_writer("large", len(LARGE))
    for number in range(20):  # requests to all hosts
        storage(first).put(f"{number}", b"1")
    writer.write_at(0, LARGE)
    writer.finish()
    assert storage(first).get("large") == LARGE


@pytest.mark.parametrize("is_lost", [True, False], ids=["a member is lost", "a request is lost"])
@pytest.mark.parametrize("before", [LARGE[::-1], b""], ids=["replaced", "created"])
def test_an_object_that_was_put_in_part_does_not_lose_an_older_one(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, is_lost: bool, before: bytes
) -> None:
    session, _ = hosts.join("a", "b")
    if before:
        storage(session).put("large", before)
    deciding = session.view.by_id[session.view.home("large")[0]]
    failed, call = list[object](), ServerConnections.call

    def fail(self: ServerConnections, header: messages.Header, payload: memoryview | bytes = b"", place=None):  # type: ignore[no-untyped-def]
        if self.place == session.server(deciding).place and (failed or header["op"] == "apply"):
            failed.append(header["op"])
            if is_lost or len(failed) == 1:
                raise ServerLostError("it does not answer")
        return call(self, header, payload, place)

    with monkeypatch.context() as patch:
        patch.setattr(ServerConnections, "call", fail)
        with pytest.raises(StorageError, match="does not answer"):
            storage(session).put("large", LARGE)
    if not is_lost and not before:
        assert blobs(hosts, "a") == blobs(hosts, "b") == []
    (session, _) = hosts.join("a", "b")
    present = [storage(session).get(key) for key in storage(session).list()]
    assert present == ([LARGE] if before or is_lost else [])
    assert len(blobs(hosts, "a")) == len(blobs(hosts, "b")) == len(present)


def test_a_start_with_a_higher_limit_has_more_memory(hosts: Hosts) -> None:
    hosts.options = replace(hosts.options, limit=12 << 20)
    (session,) = hosts.join("a")
    write(session, "first", LARGE)
    with pytest.raises(StorageFullError):
        write(session, "second", LARGE)
    hosts.options = replace(hosts.options, limit=24 << 20)
    (session,) = hosts.join("a")  # its server runs already
    write(session, "second", LARGE)
    assert storage(session).get("first") == storage(session).get("second") == LARGE


def test_a_job_whose_memory_is_full_starts_again(hosts: Hosts) -> None:
    hosts.options = replace(hosts.options, limit=1 << 20)
    sessions = hosts.join("a", "b", "c")
    stored = []
    for number in range(100):  # until no host has room
        with contextlib.suppress(StorageFullError):
            storage(sessions[0]).put(f"{number}", bytes(50_000))
            stored.append(f"{number}")
    assert len(stored) > 20, "no host keeps what others refused"
    hosts.lose("c")
    for session in hosts.join("a", "b"):  # each of them has all entries now
        assert sorted(stored) == list(storage(session).list())
        assert all(storage(session).get(key) == bytes(50_000) for key in stored)


def test_entries_that_do_not_fit_make_a_start_fail(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = hosts.join("a", "b", "c")
    storage(first).put("small", b"1")
    call = ServerConnections.call

    def fail(self: ServerConnections, header: messages.Header, payload: memoryview | bytes = b"", place=None):  # type: ignore[no-untyped-def]
        if header["op"] == "hand_over" and len(payload):  # from the host that left
            raise StorageFullError("the memory file system is full")
        return call(self, header, payload, place)

    with monkeypatch.context() as patch:
        patch.setattr(ServerConnections, "call", fail)
        with pytest.raises(ExceptionGroup, match="failed"):
            hosts.join("a", "b")
    for session in hosts.join("a", "b"):
        assert storage(session).get("small") == b"1"


def test_an_earlier_incarnation_cannot_write(hosts: Hosts) -> None:
    old, _ = hosts.join("a", "b")
    write(old, "data", b"old" * 10)
    started = storage(old).open_writer("later", 3)
    started.write_at(0, b"abc")
    (new,) = hosts.join("b")
    for attempt in (
        lambda: storage(old).put("data", b"late"),
        lambda: storage(old).delete(["data"]),
        lambda: write(old, "data", LARGE),
        started.finish,
    ):
        with pytest.raises((SaveLostError, StorageError)):
            attempt()
    assert storage(new).get("data") == b"old" * 10
    assert list(storage(new).list()) == ["data"]


def test_hosts_can_be_lost_one_after_the_other(hosts: Hosts) -> None:
    names = ["a", "b", "c"]
    first, *_ = hosts.join(*names)
    write(first, "large", LARGE)
    storage(first).put("small", b"1")
    for number in range(4):
        hosts.lose(names.pop(0))
        names.append(f"spare-{number}")
        for session in hosts.join(*names):
            assert storage(session).get("large") == LARGE
            assert storage(session).get("small") == b"1"
        assert sum(len(blobs(hosts, name)) for name in names) == 2


def test_a_corrupt_copy_is_named_and_passed_over(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    first, second, _ = hosts.join("a", "b", "c")
    write(first, "step/data", LARGE)
    (path,) = blobs(hosts, "a")
    with path.open("r+b") as file:
        file.seek(5 << 20)
        file.write(b"\xff\xfe")
    with caplog.at_level(logging.WARNING, "ckptcore.recovery"):
        assert storage(first).get("step/data") == LARGE
        assert storage(second).get("step/data") == LARGE
    assert any("step/data" in message and "corrupt" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("damaged", "text"),
    [
        *[(path, '["torn') for path in ("entries/*", "view", "server.json", "epoch", "token")],
        *[(path, None) for path in ("entries/*", "view", "server.json", "epoch", "token")],
        ("entries/*", "[1, []]"),
        ("server.json", "[]"),
        ("server.json", '{"id": "a", "interface": "127.0.0.1"}'),
        ("server.json", '{"id": ["a"], "interface": "127.0.0.1", "port": 1}'),
        ("server.json", '{"id": "a", "interface": 5, "port": 1}'),
        ("server.json", '{"id": "a", "interface": "127.0.0.1", "port": "1"}'),
        ("server.json", '{"id": "a", "interface": "127.0.0.1", "port": 65536}'),
        ("token", ""),
    ],
)
def test_a_damaged_memory_is_named_and_can_be_removed(hosts: Hosts, damaged: str, text: str | None) -> None:
    """A file has another text, or is a directory (None)."""
    first, _ = hosts.join("a", "b")
    write(first, "large", LARGE)
    storage(first).put("small", b"1")
    server = hosts.server("a")
    assert server is not None
    hosts.kill("a")
    for path in server.directory.glob(damaged):
        path.unlink()
        path.mkdir() if text is None else path.write_text(text)
    with pytest.raises(ExceptionGroup) as failed:
        hosts.join("a", "b")
    assert f"the memory in {server.directory} is damaged" in str(failed.value.exceptions)
    assert "damaged: the memory" not in str(failed.value.exceptions)
    shutil.rmtree(server.directory)
    for session in hosts.join("a", "b"):
        assert storage(session).get("large") == LARGE and storage(session).get("small") == b"1"


@pytest.mark.parametrize(
    "description",
    [
        '{"size": 1',
        "[]",
        f'{{"size": {len(LARGE)}, "key": "large"}}',
        f'{{"size": {len(LARGE)}, "key": "large", "checksums": 1}}',
        f'{{"size": {len(LARGE)}, "key": "large", "checksums": [1]}}',
        f'{{"size": {len(LARGE)}, "key": 1, "checksums": {[1] * -(-len(LARGE) // BLOCK_BYTES)}}}',
        f'{{"size": {len(LARGE)}, "checksums": {[1] * -(-len(LARGE) // BLOCK_BYTES)}}}',
    ],
)
def test_a_copy_with_a_damaged_description_is_passed_over(hosts: Hosts, description: str) -> None:
    first, _ = hosts.join("a", "b")
    write(first, "large", LARGE)
    hosts.kill("a")
    (path,) = blobs(hosts, "a")
    path.with_suffix(".json").write_text(description)
    for session in hosts.join("a", "b"):
        assert storage(session).get("large") == LARGE


def test_an_object_without_a_good_copy_is_lost(hosts: Hosts) -> None:
    first, _ = hosts.join("a", "b")
    write(first, "data", LARGE)
    for host in "ab":
        (path,) = blobs(hosts, host)
        with path.open("r+b") as file:
            file.write(b"\xff\xfe")
    with pytest.raises(CorruptCheckpointError, match="'data' is lost"):
        storage(first).get("data")


def test_an_object_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, MemoryOptions(limit=12 << 20))
    try:
        session, _ = hosts.join("a", "b")
        write(session, "first", LARGE)
        with pytest.raises(StorageFullError, match="^second: .* bytes do not fit.*memory_bytes="):
            write(session, "second", LARGE)
        assert storage(session).get("first") == LARGE
        storage(session).delete(["first"])
        write(session, "second", LARGE)
        assert len(blobs(hosts, "a")) == len(blobs(hosts, "b")) == 1
    finally:
        hosts.close()


def test_what_killed_saves_left_is_freed(hosts: Hosts) -> None:
    first, _ = hosts.join("a", "b")
    write(first, "kept", LARGE)
    unfinished = storage(first).open_writer("lost", len(LARGE))
    unfinished.write_at(0, LARGE)
    # A complete blob whose entry was never written: the process was killed between the two.
    orphan = storage(first).open_writer("lost", len(LARGE))
    orphan.write_at(0, LARGE)
    orphan._complete_copies()  # type: ignore[attr-defined]
    assert len(blobs(hosts, "b")) == 3
    session, _ = hosts.join("a", "b")
    assert len(blobs(hosts, "a")) == len(blobs(hosts, "b")) == 1
    assert storage(session).get("kept") == LARGE


def test_a_deleted_object_does_not_come_back(hosts: Hosts) -> None:
    first, _, _ = hosts.join("a", "b", "c")
    storage(first).put("gone", b"1")
    storage(first).put("kept", b"2")
    storage(first).delete(["gone"])
    for remaining in (("b", "c"), ("c", "d"), ("a", "c")):
        for session in hosts.join(*remaining):
            assert list(storage(session).list()) == ["kept"]
            with pytest.raises(ObjectNotFoundError):
                storage(session).get("gone")


def test_copies_are_in_different_failure_domains(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, MemoryOptions(limit=1 << 28))
    domains = {"a": "rack 1", "b": "rack 1", "c": "rack 2", "d": "rack 2"}
    try:
        sessions = hosts.join(*domains, domains=domains)
        for session in sessions:
            holders = session.holders()
            assert len(holders) == 2
            assert len({member.domain for member in holders}) == 2
    finally:
        hosts.close()


def test_a_process_tells_the_token_to_the_server_of_its_host_alone(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is encrypted. Servers of hosts that left the job have the token already."""
    told: list[int] = []
    send = messages.Connection.send

    def record(connection: messages.Connection, header: messages.Header, payload: memoryview | bytes = b"") -> None:
        if "token" in header:
            told.append(connection._socket.getpeername()[1])
        send(connection, header, payload)

    hosts.join("a", "b")
    left = hosts.server("a")
    monkeypatch.setattr(messages.Connection, "send", record)
    hosts.join("b", "c")
    ports = {server.port for host in "bc" if (server := hosts.server(host)) is not None}
    assert left is not None and set(told) == ports
