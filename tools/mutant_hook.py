"""Import hook that replaces the source of one module; see `tools/mutants.py`.

Child processes of tests load this file as ``sitecustomize``, so it imports nothing of the project and is light.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

VARIABLE = "CKPTCORE_MUTANT"
"""The environment variable that names the file that is replaced and the file that replaces it, as a JSON list."""


class _Loader(SourceFileLoader):
    """Compiles the mutated source, and neither reads nor writes compiled files."""

    mutated = ""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the mutated source under the name of the original file."""
        code: CodeType = self.source_to_code(self.get_data(self.mutated), self.path)
        return code


class _Finder:
    """Finds the module of the replaced file."""

    def __init__(self, original: str, mutated: str) -> None:
        self._original = original
        self._mutated = mutated

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the mutated module, and None for all others."""
        if fullname.rpartition(".")[2] != os.path.basename(self._original).removesuffix(".py"):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or os.path.realpath(spec.origin) != self._original:
            return None
        loader = _Loader(fullname, spec.origin)
        loader.mutated = self._mutated
        return importlib.machinery.ModuleSpec(fullname, loader, origin=spec.origin)


def install() -> None:
    """Install the hook if the environment names a mutant."""
    if VARIABLE in os.environ:
        original, mutated = json.loads(os.environ[VARIABLE])
        sys.meta_path.insert(0, _Finder(original, mutated))


if __name__ == "sitecustomize":
    install()
