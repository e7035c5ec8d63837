"""The contracts of imports in `pyproject.toml` name modules, not distributions or tools."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def test_contracts_list_only_modules() -> None:
    settings: Any = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for contract in settings["tool"]["importlinter"]["contracts"]:
        for module in (*contract.get("source_modules", ()), *contract.get("forbidden_modules", ())):
            assert all(part.isidentifier() for part in module.split(".")), module
