"""Conformance tests of the coordinator over the key-value service of JAX, with real processes."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import jax
import pytest
from ckptcore_jax import KeyValueCoordinator
from ckptcore_jax.key_value_coordinator import KeyValueClient
from ckptcore_jax.plugin import ckpt_coordinator
from ckptcore_testing import CoordinatorTests
from ckptcore_testing.servers import free_port
from jax._src import distributed

from ckptcore import Context, hookimpl
from ckptcore.context import JobOptions, PluginOptions
from ckptcore.errors import PluginConflictError, PluginError, RankFailedError
from ckptcore.protocols import Coordinator
from ckptcore.runtime import runtime_of

pytestmark = pytest.mark.system

T = TypeVar("T")


def _rank(file: str, address: str, rank: int, size: int, timeout_seconds: float, job: bytes) -> None:
    work = pickle.loads(job)
    jax.distributed.initialize(address, size, rank, cluster_detection_method="deactivate")
    try:
        coordinator = KeyValueCoordinator.of_job(timeout_seconds=timeout_seconds)
        outcome: tuple[bool, object] = (True, work(coordinator))
    except Exception as error:  # noqa: BLE001  # the parent raises the error again
        outcome = (False, error)
    Path(file).write_bytes(pickle.dumps(outcome))
    jax.distributed.shutdown()  # waits for all ranks


class TestKeyValueCoordinator(CoordinatorTests):
    sizes = (2,)

    def run(self, size: int, job: Callable[[Coordinator], T], *, timeout_seconds: float) -> Sequence[T]:
        context = multiprocessing.get_context("forkserver")
        address = f"127.0.0.1:{free_port()}"
        with tempfile.TemporaryDirectory() as directory:
            files = [f"{directory}/{rank}" for rank in range(size)]
            processes = [
                context.Process(target=_rank, args=(file, address, rank, size, timeout_seconds, pickle.dumps(job)))
                for rank, file in enumerate(files)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            outcomes = [pickle.loads(Path(file).read_bytes()) for file in files]
        errors = [value for ok, value in outcomes if not ok]
        if errors:
            raise ExceptionGroup(f"{len(errors)} of {size} ranks failed", errors)
        return [value for _, value in outcomes]

    def test_no_keys_remain_in_the_service(self) -> None:
        assert self.run(2, _left_behind, timeout_seconds=self.long_seconds) == [[], []]

    def test_versions_without_a_counter_also_remove_keys(self) -> None:
        assert self.run(2, _left_behind_without_counter, timeout_seconds=self.long_seconds) == [[], []]


@pytest.mark.slow
class TestMoreAndFewerRanks(TestKeyValueCoordinator):
    sizes = (1, 3, 4)


def _left_behind(coordinator: KeyValueCoordinator) -> list[str]:
    """Return the keys that remain in the service after exchanges of small and large payloads."""
    for number, nbytes in enumerate((0, 10, 3_000_000)):
        coordinator.gather(f"a/b#{number}", bytes(nbytes))
        coordinator.broadcast(f"a/b#{number}", bytes(nbytes) if coordinator.rank == 0 else None)
    coordinator.gather("done", b"")
    client = coordinator._client
    if coordinator.rank == 0:
        return [name for name, _ in client.key_value_dir_get_bytes("ckptcore")]
    return []


def _left_behind_without_counter(coordinator: KeyValueCoordinator) -> list[str]:
    client = _WithoutCounter(coordinator._client)
    return _left_behind(KeyValueCoordinator(client, coordinator.rank, coordinator.size, timeout_seconds=60))


class _WithoutCounter:
    """A client with the methods of jaxlib 0.4.34."""

    def __init__(self, client: KeyValueClient) -> None:
        self.key_value_set_bytes = client.key_value_set_bytes
        self.blocking_key_value_get_bytes = client.blocking_key_value_get_bytes
        self.key_value_dir_get_bytes = client.key_value_dir_get_bytes
        self.key_value_delete = client.key_value_delete


# --- which job a process belongs to


class _FailingClient:
    """A client whose calls fail like those of a failed service."""

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        raise RuntimeError("UNAVAILABLE: failed to connect to all addresses")

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        raise RuntimeError("UNAVAILABLE: failed to connect to all addresses")

    def key_value_dir_get_bytes(self, key: str) -> Sequence[tuple[str, bytes]]:
        raise RuntimeError("UNAVAILABLE: failed to connect to all addresses")

    def key_value_delete(self, key: str) -> None:
        raise RuntimeError("UNAVAILABLE: failed to connect to all addresses")


@pytest.fixture
def in_job(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that simulates a job of the given size."""

    def join(size: int) -> None:
        monkeypatch.setattr(distributed.global_state, "client", _FailingClient())
        monkeypatch.setattr(distributed.global_state, "process_id", size - 1)
        monkeypatch.setattr(distributed.global_state, "num_processes", size)

    return join


def test_process_without_initialization_saves_alone() -> None:
    assert ckpt_coordinator() is None
    assert runtime_of(Context()).job().size == 1
    with pytest.raises(PluginError, match=r"call jax.distributed.initialize"):
        KeyValueCoordinator.of_job()


def test_a_job_of_one_process_needs_no_coordinator(in_job: Callable[[int], None]) -> None:
    in_job(1)
    assert ckpt_coordinator() is None
    assert KeyValueCoordinator.of_job().size == 1


def test_a_job_is_found(in_job: Callable[[int], None]) -> None:
    in_job(3)
    job = runtime_of(Context()).job()
    assert isinstance(job, KeyValueCoordinator) and (job.rank, job.size) == (2, 3)


def test_failed_service_is_a_clear_error(in_job: Callable[[int], None]) -> None:
    in_job(2)
    for exchange in (
        lambda: runtime_of(Context()).job().gather("key", b""),
        lambda: runtime_of(Context()).job().broadcast("key", None),
    ):
        with pytest.raises(RankFailedError, match="process 0.*UNAVAILABLE"):
            exchange()


def test_unsupported_version_of_jax_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed.global_state, "client", object())
    with pytest.raises(PluginError, match=r"a object without key-value methods.*JobOptions\(coordinator="):
        runtime_of(Context()).job()
    monkeypatch.delattr(distributed, "global_state")
    with pytest.raises(PluginError, match=rf"jax {jax.__version__} is not supported.*global_state"):
        runtime_of(Context()).job()


class _OtherLauncher:
    """Another plugin that returns a coordinator."""

    @hookimpl
    def ckpt_coordinator(self) -> Coordinator:
        return KeyValueCoordinator(_FailingClient(), 0, 2)


def test_a_process_in_two_jobs_must_select_a_coordinator(in_job: Callable[[int], None]) -> None:
    in_job(2)
    with pytest.raises(PluginConflictError, match=r"the plugins .*jax.* report a job .*JobOptions\(coordinator="):
        runtime_of(Context(plugins=PluginOptions(extra=(_OtherLauncher(),)))).job()
    mine = KeyValueCoordinator.of_job()
    assert (
        runtime_of(Context(plugins=PluginOptions(extra=(_OtherLauncher(),)), job=JobOptions(coordinator=mine))).job()
        is mine
    )


def test_only_the_leader_passes_a_payload_to_broadcast(in_job: Callable[[int], None]) -> None:
    in_job(2)
    with pytest.raises(PluginError, match="the leader must pass"):
        KeyValueCoordinator.of_job().broadcast("key", b"mine")
