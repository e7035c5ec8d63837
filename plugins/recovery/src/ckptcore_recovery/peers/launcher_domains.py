"""The failure domain of this host as its launcher names it: what fails together with it, besides the host itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_SLURM_KINDS: Final = ("switch", "block")
"""Parts of a Slurm topology that hold nodes: a leaf switch (topology/tree), or a block (topology/block)."""


def launcher_domain(environment: Mapping[str, str]) -> str | None:
    """Return the name of the failure domain that variables of a launcher state; None if they state none.

    - ``MEGASCALE_SLICE_ID``: the slice of a TPU in a job with several slices.
    - ``SLURM_TOPOLOGY_ADDR``, such as ``s[0-2].s1.node5``: the switches above this node, the leaf last, or its block.
      ``SLURM_TOPOLOGY_ADDR_PATTERN``, such as ``switch.switch.node``, says what each part is. Both are set if Slurm
      knows a topology (``topology_p_get_node_addr`` of its plugins topology/tree and topology/block).

    Args:
        environment: the environment of a process on this host.
    """
    if slice_id := environment.get("MEGASCALE_SLICE_ID"):
        return f"slice {slice_id}"
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    parts = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".", len(kinds) - 1)  # names of nodes may have dots
    if len(parts) < 2 or len(parts) != len(kinds) or kinds[-1] != "node" or kinds[-2] not in _SLURM_KINDS:
        return None
    return f"{kinds[-2]} {parts[-2]}" if parts[-2] else None
