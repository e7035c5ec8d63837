"""The transport for torchft: the tests that torchft has for every transport, and tests of its own."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast
from unittest import TestCase

import pytest
import torch
from ckptcore_recovery.peers.messages import Connection
from torch._C._distributed_c10d import TCPStore

from ckptcore.errors import CorruptCheckpointError, StorageError

_TESTS = "torchft.checkpointing.transport_test"
"""A module that the environment of ``make test-integrations`` has."""

transport_test = pytest.importorskip(_TESTS, reason="needs torchft 0.2: make test-integrations")

import torchft  # the test above
from ckptcore_recovery.replicas.torchft import ReplicaTransport, _Receiver  # imports torchft
from torchft import coordination

pytestmark = pytest.mark.system

_SECONDS = timedelta(seconds=30)


@pytest.fixture
def transport() -> Iterator[ReplicaTransport[Any]]:
    """Return a transport, which sends to itself."""
    transport = ReplicaTransport[Any](_SECONDS)
    yield transport
    transport.shutdown()


def receive(transport: ReplicaTransport[Any], step: int, seconds: float = 30.0, metadata: str | None = None) -> Any:
    """Receive what a transport sends."""
    given = transport.metadata() if metadata is None else metadata
    return transport.recv_checkpoint(0, given, step, timedelta(seconds=seconds))


def send(transport: ReplicaTransport[Any], step: int, state: Any) -> None:
    """Begin to send a state."""
    transport.send_checkpoint([1], step, state, _SECONDS)


def test_the_tests_of_torchft_pass() -> None:
    def new(rank: int, size: int) -> ReplicaTransport[dict[str, object]]:
        return ReplicaTransport(timedelta(seconds=10))

    transport_test.run_multi_recovery_test(TestCase(), new, torch.device("cpu"))


def test_tensors_and_objects_are_equal(transport: ReplicaTransport[Any]) -> None:
    large = torch.randn(3_000_000)
    model = torch.nn.Linear(4, 5)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    state: dict[str, Any] = {
        "user": {"default": {"model": model.state_dict(), "optimizer": optimizer.state_dict()}},
        "torchft": {"step": 7, "batches_committed": 14},
        "large": large,
        "view": large[10:20],
        "strided": torch.arange(100.0).reshape(10, 10).t(),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "float8": torch.arange(4.0).to(torch.float8_e4m3fn),
        "unsigned": torch.arange(4).to(torch.uint16),
        "complex": torch.tensor([1 + 2j]).conj(),
        "empty": torch.empty(0),
        "scalar": torch.tensor(2),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    send(transport, 7, state)
    received = receive(transport, 7)
    transport_test.assertStateDictEqual(TestCase(), received["user"]["default"]["model"], model.state_dict())
    assert received["torchft"] == state["torchft"]
    for name in state.keys() - {"user", "torchft"}:
        assert torch.equal(received[name].to(torch.complex64), state[name].to(torch.complex64))
        assert received[name].dtype == state[name].dtype
        assert received[name].stride() == state[name].stride()
    assert isinstance(received["parameter"], torch.nn.Parameter)
    assert received["view"].data_ptr() == received["large"].data_ptr() + 40, "shared memory is sent once"


def test_a_state_that_changes_while_it_is_sent_is_detected(transport: ReplicaTransport[Any]) -> None:
    state = {"w": torch.zeros(3_000_000)}
    send(transport, 1, state)
    assert torch.equal(receive(transport, 1)["w"], state["w"])
    state["w"][2_999_999] = 1
    with pytest.raises(CorruptCheckpointError, match="rank 0, step 1: .* differ from those of the state"):
        receive(transport, 1)


def test_a_transfer_that_has_begun_ends_although_no_other_may_begin(
    transport: ReplicaTransport[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.randn(5_000_000)}
    send(transport, 1, state)
    disallowing = threading.Thread(target=transport.disallow_checkpoint)
    receive_pieces = _Receiver._receive_pieces

    def disallow_first(self: _Receiver, *arguments: Any) -> None:
        disallowing.start()
        while transport._staged is not None:
            time.sleep(0.01)
        receive_pieces(self, *arguments)
        assert disallowing.is_alive(), "it waits for the transfer"

    monkeypatch.setattr(_Receiver, "_receive_pieces", disallow_first)
    assert torch.equal(receive(transport, 1)["w"], state["w"])
    disallowing.join()


def test_receivers_do_not_wait_for_each_other(transport: ReplicaTransport[Any]) -> None:
    state = {"w": torch.randn(3_000_000)}
    send(transport, 1, state)
    with ThreadPoolExecutor(5) as threads:
        for received in [threads.submit(receive, transport, 1) for _ in range(5)]:
            assert torch.equal(received.result()["w"], state["w"])
    transport.disallow_checkpoint()


class _Slow:
    """A socket that sends a byte now and then."""

    def __init__(self, connected: socket.socket) -> None:
        self._connected = connected

    def sendall(self, data: bytes) -> None:
        for byte in data:
            self._connected.sendall(bytes([byte]))
            time.sleep(0.02)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connected, name)


def test_the_timeout_bounds_the_whole_transfer() -> None:
    """The sender never stops to send, but it would need hours."""

    def serve() -> None:
        accepted, _ = listening.accept()
        with accepted:
            connection = Connection(accepted, b"t" * 32, is_server=True)
            connection.receive()
            connection.send({"nbytes": 1 << 20})
            connection.receive()
            connection._socket = _Slow(accepted)  # type: ignore[assignment]
            with pytest.raises(ConnectionError):
                connection.send({}, bytes(1 << 20))

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as thread:
        serving = thread.submit(serve)
        metadata = json.dumps(["127.0.0.1", listening.getsockname()[1], (b"t" * 32).hex()])
        with pytest.raises(TimeoutError, match=r"step 1 from rank 0 timed out: .* The limit is 0\.3 s"):
            ReplicaTransport.recv_checkpoint(cast(Any, None), 0, metadata, 1, timedelta(seconds=0.3))
        serving.result()


def test_another_step_is_an_error(transport: ReplicaTransport[Any]) -> None:
    send(transport, 2345, {})
    with pytest.raises(StorageError, match="serving step 2345, but step 1234 was requested"):
        receive(transport, 1234)
    assert receive(transport, 2345) == {}


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_nothing_is_sent_before_it_is_allowed(transport: ReplicaTransport[Any], seconds: float) -> None:
    with pytest.raises((TimeoutError, StorageError), match="timed out"):
        receive(transport, 1, seconds)
    send(transport, 1, {"a": 1})
    transport.disallow_checkpoint()
    with pytest.raises((TimeoutError, StorageError), match="timed out"):
        receive(transport, 1, seconds)


def test_a_receiver_that_is_early_waits(transport: ReplicaTransport[Any]) -> None:
    received: list[Any] = []
    receiver = threading.Thread(target=lambda: received.append(receive(transport, 3)))
    receiver.start()
    send(transport, 3, {"a": torch.ones(3)})
    receiver.join()
    assert torch.equal(received[0]["a"], torch.ones(3))


def test_a_wrong_token_is_refused(transport: ReplicaTransport[Any]) -> None:
    send(transport, 1, {"a": 1})
    host, port, _ = json.loads(transport.metadata())
    with pytest.raises(OSError, match="token|closed"):
        receive(transport, 1, metadata=json.dumps([host, port, "00" * 32]))


def test_disallowing_aborts_transfers_that_are_late() -> None:
    transport = ReplicaTransport[Any](timedelta(milliseconds=50))
    send(transport, 1, {"a": torch.ones(10)})
    host, port, token = json.loads(transport.metadata())
    with socket.create_connection((host, port), timeout=30) as connected:
        connection = Connection(connected, bytes.fromhex(token), is_server=False)
        connection.set_timeout(30)
        connection.send({"op": "open", "step": 1, "seconds": 30})
        header, _ = connection.receive()
        assert header["nbytes"] > 0
        transport.disallow_checkpoint()
        with pytest.raises(OSError, match="closed|reset"):
            connection.receive()
    transport.shutdown()


class _Stopped(Exception):
    """A replica that fails."""


def _train(replica: int, lighthouse: str, failures: set[int], received: list[int]) -> dict[str, torch.Tensor]:
    """Train a model as one of two replicas of a `torchft.Manager`. Fail once at each of some steps, and start again."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    transport = ReplicaTransport[Any](_SECONDS)
    receive = transport.recv_checkpoint

    def record(src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        state = receive(src_rank, metadata, step, timeout)
        received.append(step)
        return state

    transport.recv_checkpoint = record  # type: ignore[method-assign]
    torch.manual_seed(replica)  # different models, until they are synchronized
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters())

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(loaded: dict[str, Any]) -> None:
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(),
        min_replica_size=2,
        load_state_dict=load,
        state_dict=state,
        replica_id=str(replica),
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        checkpoint_transport=transport,
    )
    try:
        wrapped = torchft.DistributedDataParallel(manager, model)
        managed = torchft.Optimizer(manager, optimizer)
        while manager.current_step() < 4:
            managed.zero_grad()
            wrapped(torch.rand(2, 3)).square().sum().backward()
            managed.step()
            if manager.current_step() in failures:
                failures.clear()
                raise _Stopped
        return model.state_dict()
    except _Stopped:
        pass
    finally:
        manager.shutdown(wait=False)
    return _train(replica, lighthouse, failures, received)


@pytest.mark.system
@pytest.mark.filterwarnings("ignore")  # of torchft
def test_a_manager_of_torchft_recovers_a_replica_that_failed() -> None:
    lighthouse = coordination.LighthouseServer(bind="[::]:0", min_replicas=2)
    received: list[list[int]] = [[], []]
    with ThreadPoolExecutor(2) as threads:
        replicas = [
            threads.submit(_train, replica, lighthouse.address(), {2} if replica == 1 else set(), received[replica])
            for replica in range(2)
        ]
        models = [replica.result() for replica in replicas]
    lighthouse.shutdown()
    assert received[1][-1] >= 2, "the replica that failed got the state of the other"
    for name, tensor in models[0].items():
        assert torch.equal(models[1][name], tensor)
