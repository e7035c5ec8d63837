"""`PeerMemory` as a run directory, against the conformance kit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ckptcore_recovery.peers import PeerMemory
from ckptcore_recovery.peers.starting import DIRECTORY_VARIABLE
from ckptcore_testing import RunDirectoryTests

from ckptcore.policies import FixedInterval
from ckptcore.training import RunDirectory
from plugins.recovery.tests.host_directories import kill_servers

pytestmark = pytest.mark.system


@pytest.mark.parametrize(
    "arguments",
    [{"copies": -1}, {"memory_bytes": 0}, {"bytes_per_second": 0.0}, {"bytes_per_second": -1.0}, {"interface": "::"}],
    ids=str,
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(arguments))}=.*expected"):
        PeerMemory("run", **{"memory_bytes": 1, "upload_policy": FixedInterval(1), **arguments})


class TestPeerMemory(RunDirectoryTests):
    """A job on one host, in front of a directory that gets every second step."""

    @pytest.fixture(autouse=True)
    def use_host(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Use the memory of a host of its own."""
        monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "host"))
        yield
        kill_servers(tmp_path)

    def directory(self, path: Path) -> RunDirectory:
        """Return the memory in front of a directory."""
        return PeerMemory(path, memory_bytes=1 << 26, copies=0, upload_policy=FixedInterval(2))
