"""Fixtures with directories of steps: on a file system with locks, and on object stores in memory and on servers."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.servers.samples import SERVERS, quick_sample


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, object, object]:
    """Mark most tests on servers as slow."""
    made = yield
    return (
        quick_sample(made, one_of=20, long=["test_an_evaluator_reads_while_a_writer_saves"])
        if isinstance(made, list)
        else made
    )


@pytest.fixture(params=["local", "memory", *SERVERS])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Return a directory that does not exist yet."""
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
    """Return a directory that does not exist yet, on a storage with fast requests."""
    return local if request.param == "local" else memory


@pytest.fixture
def local(tmp_path: Path) -> str:
    """Return a directory on a file system. It does not exist yet."""
    return str(tmp_path / "run")


@pytest.fixture
def memory() -> str:
    """Return a directory in memory. It does not exist yet."""
    return f"memory://{uuid.uuid4().hex}/run"
