"""Saves through fsspec, with a Context that declares that only one process saves."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import pytest

import ckptcore
from ckptcore import policies
from ckptcore.errors import AtomicityError, CheckpointExistsError, CheckpointNotFoundError
from ckptcore.model import JSON

Place: TypeAlias = tuple[str, ckptcore.Context]
"""The URL of an empty directory, and the Context for its storage."""

# gcsfs passes large bodies to aiohttp as bytes.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")

STATE: Final[Mapping[str, object]] = {"w": np.arange(300_000, dtype=np.float32).reshape(500, 600), "step": 7}
LAYOUTS: Final = (
    "safetensors",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("dcp", "ocdbt", "zarr3", "zarr")),
)


@contextmanager
def _memory(directory: Path) -> Iterator[Place]:
    yield f"fsspec+memory://{uuid.uuid4().hex}", ckptcore.Context()


@contextmanager
def _s3(directory: Path) -> Iterator[Place]:
    from ckptcore_s3.testing import ACCESS_KEY_ID, SECRET_ACCESS_KEY, s3_server

    with s3_server(directory) as server:
        options: dict[str, JSON] = {
            "key": ACCESS_KEY_ID,
            "secret": SECRET_ACCESS_KEY,
            "endpoint_url": server.server.url,
        }
        yield f"fsspec+s3://{server.create_bucket()}/runs", ckptcore.Context(storage={"fsspec+s3": options})


@contextmanager
def _gs(directory: Path) -> Iterator[Place]:
    from ckptcore_testing.gcs_servers import gcs_server

    with gcs_server(directory) as server:
        options: dict[str, JSON] = {"endpoint_url": server.server.url, "token": "anon"}
        yield f"fsspec+gs://{server.create_bucket()}/runs", ckptcore.Context(storage={"fsspec+gs": options})


PLACES: Final[Mapping[str, Callable[[Path], AbstractContextManager[Place]]]] = {"memory": _memory, "s3": _s3, "gs": _gs}


@pytest.fixture(
    scope="module", params=["memory", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gs", "s3"))]
)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A location on each file system, with a Context that does not set `without_conditions`."""
    with PLACES[request.param](tmp_path_factory.mktemp("server")) as (url, context):
        yield f"{url}/{uuid.uuid4().hex}", context


@pytest.fixture
def marked(place: Place) -> Place:
    """A new directory, with a Context that uses markers instead of conditional puts."""
    url, context = place
    return f"{url}/{uuid.uuid4().hex}", replace(context, io=replace(context.io, without_conditions="marker"))


def test_a_save_without_a_declaration_is_refused(place: Place) -> None:
    url, context = place
    with pytest.raises(AtomicityError, match="without_conditions='marker'"):
        ckptcore.save(f"{url}/refused", STATE, context=context)
    with (
        pytest.raises(AtomicityError, match="without_conditions='marker'"),
        ckptcore.Checkpointer(f"{url}/refused-run", context=context) as steps,
    ):
        steps.save(1, STATE)
    for name in ("refused", "refused-run/1"):
        with pytest.raises(CheckpointNotFoundError):
            ckptcore.load(f"{url}/{name}", context=context)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_comes_back(marked: Place, layout: str) -> None:
    url, context = marked
    location = f"{url}/step_1"
    ckptcore.save(location, STATE, layout=layout, context=context)
    with pytest.raises(CheckpointExistsError):
        ckptcore.save(location, STATE, layout=layout, context=context)
    _expect(location, replace(context, io=replace(context.io, without_conditions="refuse")))
    assert ckptcore.verify(location, context=context).ok
    ckptcore.delete(location, context=context)
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load(location, context=context)


@pytest.mark.lives(
    "everything else, through fsspec (SFTP, SMB and Azure were not tried)",
    "fsspec: memory, gcsfs and s3fs",
    'saves, loads, runs of one process at a time, with `without_conditions="marker"`',
    "two saves at once are not noticed",
)
def test_steps_of_a_run(marked: Place) -> None:
    url, context = marked
    with ckptcore.Checkpointer(url, preservation_policy=policies.LatestN(2), context=context) as steps:
        for number in range(4):
            steps.save(number, {"w": np.full(10, number)})
        steps.wait()
        np.testing.assert_array_equal(steps.load()["w"], np.full(10, 3))
    with ckptcore.CheckpointReader(url, context=context) as reader:
        assert list(reader.steps) == [2, 3]


def test_checkpoints_are_copied_to_fsspec_and_back(marked: Place, tmp_path: Path) -> None:
    url, context = marked
    ckptcore.save(tmp_path / "ours", STATE)
    ckptcore.copy(tmp_path / "ours", f"{url}/there", context=context)
    _expect(f"{url}/there", context)
    ckptcore.copy(f"{url}/there", tmp_path / "back", context=context)
    _expect(str(tmp_path / "back"), context)


def _expect(location: str, context: ckptcore.Context) -> None:
    loaded = ckptcore.load(location, context=context)
    np.testing.assert_array_equal(loaded["w"], STATE["w"])
    assert loaded["step"] == 7
