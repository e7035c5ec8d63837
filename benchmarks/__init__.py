"""Benchmarks that compare ckptcore with other libraries: ``python -m benchmarks``.

A benchmark is a module of this package with a function ``rows(setting: Setting) -> Iterator[Row]``. Its name in
`BENCHMARKS` makes it part of ``make bench`` and of the tests.
"""

from __future__ import annotations

from typing import Final

BENCHMARKS: Final = (
    "peers",
    "replaced_safetensors",
    "replaced_jobs",
    "local",
    "checks",
    "plain_numbers",
    "saved_bytes",
    "processes",
    "stall",
    "slices",
    "quantised",
    "dcp",
    "dcp_metadata",
    "dcp_reshard",
    "orbax",
    "resharding",
    "jobs",
    "broadcast",
    "object_stores",
    "scale",
    "recovery",
    "versions",
)
"""Modules with benchmarks, in the order in which they run."""
