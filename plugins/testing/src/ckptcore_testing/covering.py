"""Covering arrays: few combinations of parameter values that contain every pair, or every triple, of values."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

_Values: TypeAlias = tuple[tuple[int, str], ...]
"""Values of some parameters: the position of each parameter, in order, and its value."""


def covering(*parameters: Sequence[str], strength: int) -> list[tuple[str, ...]]:
    """Return combinations of parameter values. Any values of any `strength` parameters occur together at least once.

    Most defects depend on one or two values, and the full product of four parameters is many times longer. Equal
    arguments give equal combinations. If there are at most `strength` parameters, the result is their full product.
    """
    if len(parameters) <= strength or not all(parameters):
        return list(itertools.product(*parameters))
    missing: dict[_Values, None] = dict.fromkeys(
        tuple(zip(positions, values, strict=True))
        for positions in itertools.combinations(range(len(parameters)), strength)
        for values in itertools.product(*(parameters[position] for position in positions))
    )
    rows: list[tuple[str, ...]] = []
    while missing:
        row = dict(next(iter(missing)))
        for position, values in enumerate(parameters):
            if position not in row:
                others = list(itertools.combinations(row.items(), strength - 1))
                gains = [
                    sum(tuple(sorted([(position, value), *chosen])) in missing for chosen in others) for value in values
                ]
                # Break ties differently in each row, which also varies the choices with later parameters.
                order = [(len(rows) + number) % len(values) for number in range(len(values))]
                row[position] = values[max(order, key=gains.__getitem__)]
        for chosen in itertools.combinations(sorted(row.items()), strength):
            missing.pop(chosen, None)
        rows.append(tuple(row[position] for position in range(len(parameters))))
    return rows
