"""Directories of steps on a file system with locks, and on storages with conditional puts: memory and servers."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.servers.samples import SERVERS, quick_sample


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, object, object]:
    """On a server most tests are slow ones."""
    made = yield
    return (
        quick_sample(made, one_of=20, long=["test_an_evaluator_reads_while_a_writer_saves"])
        if isinstance(made, list)
        else made
    )


@pytest.fixture(params=["local", "memory", *SERVERS])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """One that is not there yet."""
    match request.param:
        case "local":
            yield str(tmp_path / "run")
        case "memory":
            yield f"memory://{uuid.uuid4().hex}/run"
        case server:
            with SERVERS[server].open(tmp_path) as location:
                yield location


@pytest.fixture(params=["local", "memory"])
def near(request: pytest.FixtureRequest, local: str, memory: str) -> str:
    """One that is not there yet, where a request costs next to nothing."""
    return local if request.param == "local" else memory


@pytest.fixture
def local(tmp_path: Path) -> str:
    """One on a file system."""
    return str(tmp_path / "run")


@pytest.fixture
def memory() -> str:
    """One in memory."""
    return f"memory://{uuid.uuid4().hex}/run"
