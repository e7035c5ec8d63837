"""Transforms of loaded or copied trees. Importing this module imports the module of another distribution instead."""

import sys
from typing import TYPE_CHECKING

from ckptcore.distributions import import_name

if TYPE_CHECKING:
    from typing import Any

    def __getattr__(name: str) -> Any: ...


sys.modules[__name__] = import_name("transforms")  # type: ignore[assignment]  # a module
