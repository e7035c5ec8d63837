"""File systems that lack optional system calls: the table of `docs/reference/file-systems.md`.

Each row of the table has system calls. A preloaded library makes these calls fail, with the error numbers of file
systems, kernels and sandboxes.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

pytestmark = pytest.mark.system

_ROOT: Final = Path(__file__).parents[2]
_HERE: Final = Path(__file__).parent
_REFUSED: Final = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_NO_LOCKS: Final = (*_REFUSED, errno.ENOLCK, errno.EBADF)
_ROWS: Final = {
    "exchange": _REFUSED,
    "flock-directory": _NO_LOCKS,
    "flock-file": _NO_LOCKS,
    "flock-directory+flock-file": (errno.ENOSYS, errno.ENOLCK),
    "flock-directory+no-replace": _REFUSED,
    "flock-directory+no-replace+link": _REFUSED,
    "fallocate": (*_REFUSED, errno.ENODEV),
    "writeback": (errno.EPERM, errno.ENOSYS, errno.ESPIPE),
    "direct-open": (errno.EINVAL, errno.EPERM),
    "direct-read": (errno.EINVAL, errno.EOPNOTSUPP),
    "openat2": (errno.ENOSYS, errno.EPERM),
    "fsync-directory": (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF),
}
"""Error numbers by calls. Only leases need `no-replace` and `link`, and so only file systems without locks."""

_PARAMETERS: Final = [
    pytest.param(f"{calls}:{number}", id=f"{calls}-{errno.errorcode[number]}")
    for calls, numbers in _ROWS.items()
    for number in numbers
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Return the result of each row. One program runs all rows."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs Linux and a C compiler")
    directory = tmp_path_factory.mktemp("missing")
    library = directory / "missing_calls.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(_HERE / "missing_calls.c")], check=True)
    wanted = [str(parameter.values[0]) for parameter in _PARAMETERS]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.storage.missing_program", str(directory), *wanted],
        cwd=_ROOT, env=os.environ | {"LD_PRELOAD": str(library)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    results = [json.loads(line) for line in ended.stdout.splitlines()]
    return {row["row"]: row for row in results}


@pytest.mark.lives(
    "NFS, Lustre, old kernels, sandboxes",
    "a preloaded library whose system calls fail",
    "saves, loads, sessions, runs, deletion without each call",
    "see [File systems](file-systems.md)",
)
@pytest.mark.parametrize("row", _PARAMETERS)
def test_everything_works_without_a_call(row: str, rows: Mapping[str, Any]) -> None:
    result, calls = rows[row], row.partition(":")[0]
    happened = dict(result["happened"])
    if calls == "exchange":
        refused = happened.pop("overwrite")
        assert refused.startswith("AtomicityError: ") and "non-atomic" in refused
        run = happened.pop("run")
        assert run.startswith("AtomicityError: ") and "non-atomic" in run, "the step that is overwritten"
    assert set(happened.values()) == {"done"}, happened
    assert all(result["failed"]), f"not all of {calls} was tried"
    assert [name for name in result["left"] if name != "run/.ckptcore"] == []


@pytest.mark.parametrize("row", _PARAMETERS)
def test_weaker_guarantees_are_logged_once_for_each_directory(row: str, rows: Mapping[str, Any]) -> None:
    warnings = rows[row]["warnings"]
    if "flock-directory" in row:
        assert len(warnings) == len(set(warnings)) == 2
        assert all("may not see the locks (flock) of this file system" in warning for warning in warnings)
    else:
        assert warnings == []
