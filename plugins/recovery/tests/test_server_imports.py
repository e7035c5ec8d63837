"""The server of a spare host starts fast, because it imports little; its names are those of the core."""

from __future__ import annotations

import subprocess
import sys

from ckptcore_recovery.peers import request_handler, views

from ckptcore.commit import locks, names


def test_a_server_imports_no_numpy_and_no_framework() -> None:
    program = "import sys, ckptcore_recovery.peers.server; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert not {"numpy", "torch", "jax", "pluggy", "ckptcore_tiers"} & set(done.stdout.split())


def test_a_server_has_the_names_of_the_core() -> None:
    assert request_handler.OWNER == locks.OWNER
    assert views.INTERNAL_DIRECTORY == names.INTERNAL_DIRECTORY
