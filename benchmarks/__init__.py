"""Benchmarks that compare ckptcore with other libraries: ``python -m benchmarks``.

A benchmark is a module of this package with a function ``rows(setting: Setting) -> Iterator[Row]``. Its name in
`BUDGET` makes it part of ``make bench`` and of the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

BUDGET: Final[Mapping[str, int]] = {
    "peers": 125,
    "replaced_safetensors": 60,
    "replaced_jobs": 220,
    "local": 250,
    "checks": 40,
    "plain_numbers": 60,
    "saved_bytes": 60,
    "processes": 60,
    "stall": 90,
    "slices": 40,
    "quantised": 60,
    "dcp": 160,
    "dcp_metadata": 90,
    "dcp_reshard": 120,
    "orbax": 150,
    "resharding": 40,
    "jobs": 60,
    "broadcast": 45,
    "object_stores": 70,
}
"""Benchmarks of ``make bench``, in the order in which they run, with the seconds that each may take on two processors.
A report has the seconds that each took. Together they have half an hour."""

SEPARATE: Final = ("scale", "recovery", "versions", "bounds")
"""Benchmarks that run only by name. Most take as long as many others. ``make bench-recovery`` and ``make
bench-versions`` have an environment with the peers of these; ``scale`` simulates jobs and has no peer; ``bounds``
measures what plain Python reaches."""

BENCHMARKS: Final = (*BUDGET, *SEPARATE)
"""All modules with benchmarks."""
