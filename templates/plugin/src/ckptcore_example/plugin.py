"""The hooks. Every program that uses ckptcore imports this module, so it imports nothing heavy."""

from __future__ import annotations

import sys

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import LeafHandler


@hookimpl
def ckpt_leaf_handler(leaf_type: type) -> LeafHandler | None:
    """Return the handler of quantities; None for other types."""
    # If the module was not imported, the program has no quantities.
    quantities = sys.modules.get("ckptcore_example.quantities")
    if quantities is None or leaf_type not in (quantities.Quantity, quantities.QuantitySpec):
        return None
    from ckptcore_example.handler import QuantityHandler

    return QuantityHandler()
