"""Names of steps: formats that turn the number of a step into the name of a directory, and back."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

__all__ = ["StepNameFormat", "StepNames"]

_DIGITS: Final = "0123456789"

_MAX_STEP: Final = 2**63 - 1
"""Frameworks store steps as signed 64-bit integers."""

_MAX_WIDTH: Final = 64


@dataclass(frozen=True, slots=True)
class StepNameFormat:
    """A format for the names of steps: a prefix, then the number in decimal digits.

    Attributes:
        prefix: the text before the number; may be empty. It must be printable, and not contain ``/`` or a backslash,
            begin with ``.`` (such names are hidden) or end in a digit.
        width: minimum number of digits; shorter numbers are padded with zeros. 0 writes no zeros. None also writes no
            zeros, and reads names with any number of zeros.

    Raises:
        ValueError: the prefix or the width is invalid.
    """

    prefix: str = ""
    width: int | None = 0

    def __post_init__(self) -> None:
        prefix, width = self.prefix, self.width
        if (
            not isinstance(prefix, str)
            or not prefix.isprintable()
            or "/" in prefix
            or "\\" in prefix
            or prefix.startswith(".")
            or prefix.endswith(tuple(_DIGITS))
        ):
            raise ValueError(
                f"StepNameFormat(prefix={prefix!r}): give printable text without '/' and '\\' that neither begins "
                "with '.' nor ends in a digit, such as 'step_'"
            )
        if width is not None and (
            isinstance(width, bool) or not isinstance(width, int) or not 0 <= width <= _MAX_WIDTH
        ):
            raise ValueError(
                f"StepNameFormat(width={width!r}): give a number of digits from 0 to {_MAX_WIDTH}, or None to read any"
            )

    @classmethod
    def of(cls, example: str) -> StepNameFormat:
        """Return the format of an example: ``step_00000010`` has the width 8, ``step_10`` the width 0.

        Raises:
            ValueError: the example does not end in digits, or has an invalid prefix.
        """
        prefix, digits = _split(example)
        if not digits:
            raise ValueError(f"the name {example!r} does not end in the number of a step, as 'step_00000010' does")
        return cls(prefix, len(digits) if digits[0] == "0" and digits != "0" else 0)

    def name(self, step: int) -> str:
        """Return the name of a step.

        Raises:
            ValueError: the step is not a whole number from 0 to 2**63 - 1.
        """
        try:
            number = -1 if isinstance(step, bool) else operator.index(step)
        except TypeError:
            number = -1
        if not 0 <= number <= _MAX_STEP:
            raise ValueError(f"step {step!r}: a step is a whole number from 0 to {_MAX_STEP}")
        return f"{self.prefix}{number:0{self.width or 0}d}"

    def parse(self, name: str) -> int | None:
        """Return the step that has a name; None if the name has another format."""
        prefix, digits = _split(name)
        return _number(digits, self.width) if prefix == self.prefix else None


_READ_BY_DEFAULT: Final = (
    StepNameFormat("", None),  # Orbax
    StepNameFormat("step_", None),  # Orbax with a prefix, AXLearn
    StepNameFormat("step-", None),  # torchtitan, Levanter
    StepNameFormat("checkpoint-", None),  # Hugging Face Trainer
    StepNameFormat("checkpoint_", None),  # Flax, T5X, Accelerate
    StepNameFormat("global_step", None),  # DeepSpeed
    StepNameFormat("global_step_", None),  # verl
    StepNameFormat("iter_", None),  # Megatron-LM
    StepNameFormat("step", None),  # OLMo
    StepNameFormat("iter-", None),
    StepNameFormat("global-step-", None),
    StepNameFormat("global-step_", None),
    StepNameFormat("global_step-", None),
    StepNameFormat("ckpt-", None),
    StepNameFormat("ckpt_", None),
)


@dataclass(frozen=True, slots=True)
class StepNames:
    """The names of steps in a directory: one format for writing, several for reading.

    Attributes:
        write: the format of new steps. It is also read.
        read: other formats to read, the preferred ones first. The default has the formats of Orbax, Hugging Face, Flax,
            DeepSpeed, Megatron-LM, torchtitan and OLMo, with ``_``, ``-`` or nothing before the number. Other names,
            such as ``10.orbax-checkpoint-tmp-1``, are not steps.

    Raises:
        TypeError: a format is not a `StepNameFormat`.
    """

    write: StepNameFormat = StepNameFormat()
    read: Sequence[StepNameFormat] = field(default_factory=lambda: _READ_BY_DEFAULT)

    def __post_init__(self) -> None:
        if isinstance(self.read, str) or not isinstance(self.read, Iterable):
            raise TypeError(f"StepNames(read={self.read!r}): give a list of StepNameFormat")
        object.__setattr__(self, "read", tuple(self.read))
        for argument, value in (("write", self.write), *(("read", value) for value in self.read)):
            if not isinstance(value, StepNameFormat):
                raise TypeError(
                    f"StepNames({argument}={value!r}): give a StepNameFormat, such as StepNameFormat('step_', width=8)"
                )

    @classmethod
    def of(cls, example: str) -> StepNames:
        """Return names that are written like an example, such as ``step_00000010``. The default formats are read too.

        Raises:
            ValueError: no format has such names.
        """
        return cls(StepNameFormat.of(example))

    def name(self, step: int) -> str:
        """Return the name of a new step.

        Raises:
            ValueError: the step is not a whole number from 0 to 2**63 - 1.
        """
        return self.write.name(step)

    def parse(self, name: str) -> int | None:
        """Return the step that has a name in any of the formats; None if it is not the name of a step."""
        return next(iter(self.find([name])), None)

    def find(self, names: Iterable[str]) -> Mapping[int, str]:
        """Return the names of steps among some names, by step, ascending.

        If several names belong to one step, the name in the written format is preferred, then the name in the first
        format of `read`, then the shortest name.
        """
        formats: dict[str, list[tuple[int, int | None]]] = {}
        for rank, one in enumerate((self.write, *self.read)):
            formats.setdefault(one.prefix, []).append((rank, one.width))
        found: dict[int, tuple[int, int, str]] = {}
        # No prefix ends in a digit, so a name without its final digits is the only possible prefix.
        for name in names:
            prefix, digits = _split(name)
            for rank, width in formats.get(prefix, ()):
                step = _number(digits, width)
                if step is not None:
                    candidate = (rank, len(name), name)
                    if step not in found or candidate < found[step]:
                        found[step] = candidate
                    break
        return {step: found[step][2] for step in sorted(found)}


def _split(name: str) -> tuple[str, str]:
    """Return a name without its final ASCII digits, and these digits."""
    prefix = name.rstrip(_DIGITS)
    return prefix, name[len(prefix) :]


def _number(digits: str, width: int | None) -> int | None:
    """Return the number of some digits; None if their count does not fit the width, or the number is too large."""
    significant = digits.lstrip("0") or digits[-1:]
    if not significant or len(significant) > len(str(_MAX_STEP)):  # int() refuses text of thousands of digits
        return None
    if width is not None and len(digits) != max(width, len(significant)):
        return None
    number = int(significant)
    return number if number <= _MAX_STEP else None
