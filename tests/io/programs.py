"""Programs that run in a process of their own."""

from __future__ import annotations

import subprocess
import sys


def run_program(program: str) -> str:
    """Run Python code; what it prints. It must end well and write no error."""
    # Python 3.12 warns of a fork in a process with threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stderr == ""
    return found.stdout
