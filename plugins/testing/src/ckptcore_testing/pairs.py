"""Pairwise covering arrays: few combinations that contain each pair of values of two parameters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

__all__ = ["covering_pairs"]


def covering_pairs(*parameters: Sequence[str]) -> list[tuple[str, ...]]:
    """Return combinations that contain each pair of values of two parameters at least once.

    Most defects depend on one or two values, and a full product of four parameters is many times longer. Equal
    arguments give equal combinations. With two parameters the result is their product.
    """
    if len(parameters) <= 2 or not all(parameters):
        return list(itertools.product(*parameters))
    missing = dict.fromkeys(
        ((first, one), (second, two))
        for first, second in itertools.combinations(range(len(parameters)), 2)
        for one, two in itertools.product(parameters[first], parameters[second])
    )
    rows: list[tuple[str, ...]] = []
    while missing:
        row = dict(next(iter(missing)))
        for position, values in enumerate(parameters):
            if position not in row:
                gains = [
                    sum(tuple(sorted([(position, value), chosen])) in missing for chosen in row.items())
                    for value in values
                ]
                # Break ties differently in each row, which also varies the pairs with later parameters.
                order = [(len(rows) + number) % len(values) for number in range(len(values))]
                row[position] = values[max(order, key=gains.__getitem__)]
        for pair in itertools.combinations(sorted(row.items()), 2):
            missing.pop(pair, None)
        rows.append(tuple(row[position] for position in range(len(parameters))))
    return rows
