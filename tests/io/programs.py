"""Programs that run in a new process."""

from __future__ import annotations

import subprocess
import sys


def run_program(program: str) -> str:
    """Run Python code in a new process and return its output. It must exit with 0 and an empty stderr."""
    # Python 3.12 warns if a process with threads forks.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout
