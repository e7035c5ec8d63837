"""Our modules have no import cycles, including imports inside functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from tests.architecture.sources import core_sources, plugin_sources

EXCEPTIONS: Mapping[str, Collection[str]] = {
    # This distribution is being split into packages without cycles.
}
"""Imports that close a circle and are allowed for now: by module, the modules it imports."""


def cycles(imports: Mapping[str, Collection[str]]) -> Sequence[Sequence[str]]:
    """Return import cycles, each as modules from the first back to itself.

    Removes an import of each cycle that it finds, until no cycle is left.
    """
    left = {module: set(imported) for module, imported in imports.items()}
    circles: list[Sequence[str]] = []
    while True:
        try:
            TopologicalSorter(left).prepare()
        except CycleError as error:
            circle: Sequence[str] = error.args[1][::-1]
            circles.append(circle)
            left[circle[0]].remove(circle[1])
        else:
            return circles


def test_cycles_are_detected() -> None:
    assert not cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    (circle,) = cycles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()})
    assert len(circle) == 4 and "".join(circle) in "abcabcabc"
    assert len(cycles({"a": {"b"}, "b": {"a"}, "c": {"c"}})) == 2


def test_no_modules_import_each_other() -> None:
    sources = {source.name: source for source in (*core_sources(), *plugin_sources())}
    imports = {
        name: set(source.modules_needed_at_runtime(sources)).difference(EXCEPTIONS.get(name, ()))
        for name, source in sources.items()
    }
    circles = cycles(imports)
    assert not circles, "these modules import each other; move what they share to a module of its own:\n" + "\n".join(
        " -> ".join(circle) for circle in circles
    )
