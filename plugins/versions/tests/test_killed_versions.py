"""Publishers and followers are killed at random moments: no follower yields a mixture, and no version is lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from ckptcore_s3.testing import S3Server, s3_server

pytestmark = pytest.mark.system

KILLS = 25
SEEDS = 10
SECONDS = 1800


@pytest.fixture
def caches() -> Iterator[Path]:
    """Return a directory in memory, so that many versions are prepared in little time. It is removed at the end."""
    path = Path(tempfile.mkdtemp(prefix="versions-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Return a server of S3."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


def kill(location: str, directory: Path, seed: int, kills: int, environment: Mapping[str, str]) -> None:
    """Run the program that kills, and expect that it finds nothing wrong."""
    command = [sys.executable, "-m", "plugins.versions.tests.killed_versions", location, str(directory)]
    done = subprocess.run(
        [*command, str(seed), str(kills)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    print(counts)
    assert counts["kills"] == kills and counts["reports of whole"] and counts["reports of shard"]


def test_a_few_kills_on_a_disk(tmp_path: Path, caches: Path) -> None:
    kill(str(tmp_path / "weights"), caches, 0, 4, {})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 1 + SEEDS))
def test_many_kills_on_a_disk(tmp_path: Path, caches: Path, seed: int) -> None:
    kill(str(tmp_path / "weights"), caches, seed, KILLS, {})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1 + SEEDS, 1 + 2 * SEEDS))
def test_many_kills_on_s3(caches: Path, store: S3Server, seed: int) -> None:
    kill(f"s3://{store.create_bucket()}/weights", caches, seed, KILLS, store.environment)
