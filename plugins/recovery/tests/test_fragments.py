"""Objects in fragments of an erasure code: any failure domains up to the number of parity fragments can be lost."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ckptcore_recovery.peers import ErasureCode, PeerMemory
from ckptcore_recovery.peers.fragments import Fragments
from ckptcore_recovery.peers.joining import MemoryOptions
from ckptcore_recovery.peers.messages import PIECE_BYTES
from ckptcore_recovery.peers.session import Session
from ckptcore_recovery.peers.storage import PeerStorage
from ckptcore_testing import NewObjectTests, StorageBackendTests

from ckptcore.errors import CorruptCheckpointError, MissingDistributionError, StorageError
from ckptcore.policies import FixedInterval
from ckptcore.protocols import StorageBackend
from plugins.recovery.tests.counted_hosts import CountedHosts

pytest.importorskip("pyeclib")

LARGE = bytes(range(256)) * (9 << 12)
"""More than a segment of two fragments."""

TWO_AND_ONE = MemoryOptions(1 << 30, copies=1, needed=2)
TWO_AND_TWO = MemoryOptions(1 << 30, copies=2, needed=2)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CountedHosts:
    """Return hosts without servers."""
    return CountedHosts(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def module_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Return the process on one of three hosts, which the conformance tests share."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        hosts = CountedHosts(tmp_path_factory.mktemp("hosts"), monkeypatch)
        yield hosts.join("a", "b", "c", options=TWO_AND_ONE)[1]


class InFragments:
    """A storage in fragments on three hosts."""

    @pytest.fixture(autouse=True)
    def use_hosts(self, module_hosts: Session) -> None:
        """Use the process on one of the hosts."""
        self.session = module_hosts

    def open(self, directory: str) -> StorageBackend:
        """Return the same directory for the same name."""
        return PeerStorage("job", f"{directory}/", self.session)


class TestConformance(InFragments, StorageBackendTests):
    """Conformance tests."""

    examples = 3
    threads = 4


class TestNewObjects(InFragments, NewObjectTests):
    """New objects."""


def storage(session: Session) -> PeerStorage:
    """Return the whole memory of a job as one of its processes uses it."""
    return PeerStorage("job", "", session)


def write(session: Session, key: str, data: bytes) -> None:
    """Write a large object in pieces."""
    writer = storage(session).open_writer(key, len(data))
    writer.write_at(0, data)
    writer.finish()


def fragments_of(hosts: CountedHosts, host: str) -> list[Path]:
    """Return the files of the fragments on a host."""
    return [path for path in (hosts.servers[host].memory.directory / "blobs").iterdir() if not path.suffix]


@pytest.mark.parametrize(("needed", "count"), [(2, 3), (3, 5), (4, 6), (5, 8), (10, 14)])
def test_any_fragments_give_an_object_back(needed: int, count: int) -> None:
    segment = needed * (PIECE_BYTES - 80)
    for size in (0, 1, needed - 1, 1000, 99_991, segment - 1, segment, segment + 1):
        data = (LARGE * (size // len(LARGE) + 1))[:size]
        fragments = Fragments(size, needed, count)
        read = bytearray(size)
        files = [bytearray(fragments.nbytes) for _ in range(count)]
        for number in fragments.segments:
            pieces = fragments.encode(memoryview(data)[fragments.segment(number)])
            for file, piece in zip(files, pieces, strict=True):
                file[number * PIECE_BYTES : number * PIECE_BYTES + len(piece)] = piece
                assert len(piece) == fragments.piece_bytes(number)
            choices = list(itertools.combinations(range(count), needed))
            for places in choices if size < 2000 else choices[-1:]:
                assert fragments.decode([pieces[place] for place in places]) == data[fragments.segment(number)]
                lost = next(place for place in range(count) if place not in places)
                assert fragments.rebuild([pieces[place] for place in places], lost) == pieces[lost]
        for part in fragments.parts(0, size):
            nbytes = part.of_range.stop - part.of_range.start
            read[part.of_range] = files[part.place][part.offset : part.offset + nbytes]
        assert read == data
        assert fragments.nbytes <= size / needed + 160 + size / segment * 80


def test_pieces_that_do_not_belong_together_are_errors() -> None:
    fragments = Fragments(100_000, 2, 4)
    pieces = fragments.encode(memoryview(LARGE)[:100_000])
    wrong = bytes(len(pieces[0]))
    for given in ([wrong, wrong], [pieces[1], wrong], [pieces[1], pieces[1]], [pieces[2], pieces[2]], [pieces[1]], []):
        with pytest.raises(StorageError, match="cannot be decoded"):
            fragments.decode(given)
        with pytest.raises(StorageError, match="cannot be made again"):
            fragments.rebuild(given, 0)
    for needed, count in ((0, 2), (3, 2), (2, 2), (-1, 3), (30, 40)):
        with pytest.raises(StorageError, match="no erasure code"):
            Fragments(1, needed, count)


@pytest.mark.parametrize("size", [0, 1, 600_001, 2 * (PIECE_BYTES - 80), len(LARGE)])
def test_objects_of_any_size_survive_the_loss_of_any_two_hosts(hosts: CountedHosts, size: int) -> None:
    names = ["a", "b", "c", "d"]
    write(hosts.join(*names, options=TWO_AND_TWO)[0], "data", LARGE[:size])
    for lost in itertools.combinations(names, 2):
        servers = dict(hosts.servers)
        left = [name for name in names if name not in lost]
        for name in lost:
            del hosts.servers[name]
        # Copies in place of fragments, because two hosts are too few for these. Nothing is made again.
        for session in hosts.join(*left, options=MemoryOptions(1 << 30, copies=0)):
            assert storage(session).get("data") == LARGE[:size]
            assert storage(session).get("data", 1, 7) == LARGE[1 : min(7, size)]
        hosts.servers.update(servers)
        hosts.join(*names, options=TWO_AND_TWO)


def test_lost_fragments_are_made_again_when_a_job_starts(hosts: CountedHosts) -> None:
    names = ["a", "b", "c", "d", "e"]
    write(hosts.join(*names, options=TWO_AND_TWO)[0], "data", LARGE)
    for number in range(6):
        del hosts.servers[names.pop(0)]
        names.append(f"spare {number}")
        for session in hosts.join(*names, options=TWO_AND_TWO):
            entry = session.find("data")
            assert len(entry.holders) == len(set(entry.holders)) == 4
            assert storage(session).get("data") == LARGE
        assert sum(len(fragments_of(hosts, name)) for name in names) == 4


def test_fragments_are_read_by_a_job_of_fewer_hosts(hosts: CountedHosts) -> None:
    for session in hosts.join("a", "b", "c", "d", "e", options=TWO_AND_TWO):
        assert session.local is not None
        write(session, f"of {session.local.id}", LARGE)
    del hosts.servers["b"]
    for session in hosts.join("a", "d", "c", "e", options=TWO_AND_TWO):
        assert len(list(storage(session).list())) == 5
        for key in storage(session).list():
            assert storage(session).get(key) == LARGE
            holders = [session.view.by_id[name] for name in session.find(key).holders]
            assert len({member.domain for member in holders if not member.is_reader}) == 4


def test_fragments_of_hosts_that_left_the_job_are_copied(hosts: CountedHosts) -> None:
    write(hosts.join("a", "b", "c", "d", options=TWO_AND_TWO)[0], "data", LARGE)
    del hosts.servers["c"], hosts.servers["d"]
    hosts.join("a", "e", "f", "g", options=TWO_AND_TWO)  # b is needed once more
    del hosts.servers["b"], hosts.servers["f"], hosts.servers["g"]
    for session in hosts.join("a", "e", "h", "i", options=TWO_AND_TWO):
        assert storage(session).get("data") == LARGE


def test_a_corrupt_fragment_is_named_and_passed_over(hosts: CountedHosts, caplog: pytest.LogCaptureFixture) -> None:
    first, second, _ = hosts.join("a", "b", "c", options=TWO_AND_ONE)
    write(first, "step/data", LARGE)
    (path,) = fragments_of(hosts, "a")
    with path.open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"\xff\xfe")
    with caplog.at_level(logging.WARNING, "ckptcore.recovery"):
        assert storage(second).get("step/data") == LARGE
    assert len(caplog.messages) == 1, "a host that failed is not tried again"
    assert "step/data: the fragment on host a is passed over: its fragment is corrupt" in caplog.messages[0]
    (path,) = fragments_of(hosts, "b")
    with path.open("r+b") as file:
        file.write(b"\xff\xfe")
    with pytest.raises(CorruptCheckpointError, match="'step/data' is lost: 1 of the 2 fragments"):
        storage(first).get("step/data")


def test_fragments_are_in_different_failure_domains(hosts: CountedHosts) -> None:
    def join(**domains: str) -> list[Session]:
        return hosts.join(*domains, options=TWO_AND_ONE, domains=domains)

    for session in join(a="1", b="1", c="2", d="2", e="3", f="3"):
        write(session, str(session.local), LARGE)
        holders = session.find(str(session.local)).holders
        assert len({session.view.by_id[name].domain for name in holders}) == 3
    with pytest.raises(ExceptionGroup) as raised:
        join(a="1", b="1", c="2", d="2")
    assert raised.group_contains(StorageError, match=r"data=2, parity=1\) needs 3 failure domains")


def test_fragments_take_less_memory_than_copies(hosts: CountedHosts) -> None:
    sessions = hosts.join("a", "b", "c", "d", options=TWO_AND_TWO)
    write(sessions[0], "data", LARGE)
    used = sum(path.stat().st_size for host in "abcd" for path in fragments_of(hosts, host))
    assert 2 * len(LARGE) <= used < 2.01 * len(LARGE), "three copies would survive the loss of two hosts, too"


@pytest.mark.parametrize(("data", "parity"), [(1, 1), (2, 0), (0, 1), (-1, 2), (30, 3)])
def test_numbers_of_fragments_are_checked(data: int, parity: int) -> None:
    with pytest.raises(ValueError, match="fragments"):
        ErasureCode(data, parity)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyeclib.ec_iface", None)
    with pytest.raises(MissingDistributionError, match=r"pip install 'ckptcore-recovery\[erasure\]'"):
        ErasureCode(4, 2)


def test_the_memory_of_a_run_can_have_fragments() -> None:
    memory = PeerMemory(
        "run", memory_bytes=1, erasure_code=ErasureCode(4, 2), upload_policy=FixedInterval(1), domain="rack"
    )
    assert memory._options == replace(TWO_AND_TWO, limit=1, needed=4, domain="rack")


def test_a_read_of_a_part_moves_only_this_part(hosts: CountedHosts) -> None:
    first, *_, last = hosts.join("a", "b", "c", "d", options=TWO_AND_ONE)
    write(first, "data", LARGE)
    assert last.local is not None and last.local.id not in last.find("data").holders
    hosts.most()
    part = 100_000
    for start in range(0, len(LARGE), part):
        assert storage(last).get("data", start, start + part) == LARGE[start : start + part]
    requests = -(-len(LARGE) // part)
    assert hosts.nbytes["d"] < len(LARGE) + 1000 * requests
