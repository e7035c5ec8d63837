"""Runs in two tiers, one near and one far: the module of another distribution, for `from ckptcore.tiers import ...`."""

import sys
from typing import TYPE_CHECKING

from ckptcore.distributions import import_name

__all__: list[str] = []

if TYPE_CHECKING:
    from typing import Any

    def __getattr__(name: str) -> Any: ...


sys.modules[__name__] = import_name("tiers")  # type: ignore[assignment]  # a module
