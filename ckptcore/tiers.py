"""Runs in two tiers, near and far. Importing this module imports the module of another distribution in its place."""

import sys
from typing import TYPE_CHECKING

from ckptcore.distributions import import_name

if TYPE_CHECKING:
    from typing import Any

    def __getattr__(name: str) -> Any: ...


sys.modules[__name__] = import_name("tiers")  # type: ignore[assignment]  # a module
