"""Types of containers, which Orbax keeps only where it is asked to: tuples and named tuples."""

from __future__ import annotations

from typing import Final

from ckptcore.model import JSON
from ckptcore_orbax.orbax.documents import corrupt, expect, object_of, parse_document, text_of
from ckptcore_orbax.orbax.trees import MAX_DEPTH, Container

__all__ = ["parse_containers"]

_ENTRY: Final = "ValueMetadataEntry"


def parse_containers(text: str, key: str) -> dict[tuple[str, ...], Container]:
    """The tuples and named tuples of a ``value_metadata_tree``, by the way to them.

    It is JSON in a string: objects and arrays as they are; ``{"category": "custom", "clazz": "tuple", "entries": [..]}``;
    ``{"category": "namedtuple", "module": .., "clazz": .., "entries": [{"key": .., "value": ..}, ..]}``; a leaf is
    ``{"category": "custom", "clazz": "ValueMetadataEntry", ..}``.

    Raises:
        CorruptCheckpointError
    """
    found: dict[tuple[str, ...], Container] = {}
    pending: list[tuple[tuple[str, ...], JSON]] = [((), parse_document(text.encode("utf-8", "surrogatepass"), key))]
    while pending:
        path, part = pending.pop()
        if len(path) > MAX_DEPTH:
            raise corrupt(key, f"at most {MAX_DEPTH} containers in each other", len(path))
        if isinstance(part, list):
            pending.extend([((*path, str(number)), child) for number, child in enumerate(part)])
            continue
        said = object_of(part, key, "a container of value_metadata_tree")
        category, name = said.get("category"), said.get("clazz")
        if category == "custom" and name == _ENTRY:
            continue
        if category == "custom" and name == "tuple":
            found[path] = Container("tuple")
            entries = expect(said.get("entries"), list, key, "the entries of a tuple")
            pending.extend([((*path, str(number)), child) for number, child in enumerate(entries)])
        elif category == "namedtuple":
            module = text_of(said.get("module"), key, "the module of a named tuple")
            found[path] = Container("object", f"{module}.{text_of(name, key, 'the name of a named tuple')}")
            for entry in expect(said.get("entries"), list, key, "the entries of a named tuple"):
                field = object_of(entry, key, "a field of a named tuple")
                pending.append(((*path, text_of(field.get("key"), key, "the name of a field")), field.get("value")))
        else:
            pending.extend([((*path, child_key), child) for child_key, child in said.items()])
    return found
