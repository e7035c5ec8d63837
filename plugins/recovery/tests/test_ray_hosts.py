"""Jobs of Ray with steps in memory: actors are killed and restarted, a node ends, and a spare one replaces it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.system]


def run(directory: Path, **system_config: bool) -> Any:
    """Run the program with an own cluster of Ray. Return what it printed."""
    command = [sys.executable, "-m", "plugins.recovery.tests.ray_hosts", str(directory), json.dumps(system_config)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400, env={**os.environ})
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_servers_outlive_killed_actors_and_a_spare_node_replaces_a_lost_one(job: Path) -> None:
    shown = run(job, process_group_cleanup_enabled=True)
    assert shown == {"loaded": [[None, None], [1, 1], [2, 2]], "same": True, "outlived node": True}


def test_memory_outlives_servers_that_ray_ends_with_their_actor(job: Path) -> None:
    """This setting makes Ray end the orphans of an actor. The next server takes over the files."""
    shown = run(job, kill_child_processes_on_worker_exit_with_raylet_subreaper=True)
    assert shown["loaded"] == [[None, None], [1, 1], [2, 2]]
    assert not shown["same"]
