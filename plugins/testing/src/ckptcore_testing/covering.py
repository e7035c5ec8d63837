"""Covering arrays: few combinations that contain each pair, or each triple, of values of different parameters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

_Values: TypeAlias = tuple[tuple[int, str], ...]
"""Values of some parameters: the position of each parameter, in order, and its value."""


def covering(*parameters: Sequence[str], strength: int) -> list[tuple[str, ...]]:
    """Return combinations that contain each choice of values of `strength` parameters at least once.

    Most defects depend on one or two values, and a full product of four parameters is many times longer. Equal
    arguments give equal combinations. With at most `strength` parameters the result is their product.
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
