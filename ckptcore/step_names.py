"""Names of steps: the number of a step as the name of a directory, and back."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

__all__ = ["StepNameFormat", "StepNames", "step_number", "whole_number"]

_DIGITS: Final = "0123456789"

_MOST_STEP: Final = 2**63 - 1
"""Steps are stored as signed 64-bit integers by the frameworks that count them."""

_MOST_WIDTH: Final = 64


@dataclass(frozen=True, slots=True)
class StepNameFormat:
    """One way to name steps: a prefix and then the number in decimal digits.

    Attributes:
        prefix: the text before the number. It may be empty. It has no ``/``, does not begin with ``.`` (such names
            are hidden) and does not end in a digit.
        width: how many digits are written at least, with zeros in front. 0 writes no zeros. None writes none either,
            and reads names with any number of them.

    Raises:
        ValueError: for another prefix or width.
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
            isinstance(width, bool) or not isinstance(width, int) or not 0 <= width <= _MOST_WIDTH
        ):
            raise ValueError(
                f"StepNameFormat(width={width!r}): give a number of digits from 0 to {_MOST_WIDTH}, or None to read any"
            )

    @classmethod
    def of(cls, example: str) -> StepNameFormat:
        """The format of a name: of ``step_00000010`` the prefix ``step_`` and the width 8, of ``step_10`` the width 0.

        Raises:
            ValueError: for a name that does not end in digits, or has a prefix that a format cannot have.
        """
        prefix, digits = _split(example)
        if not digits:
            raise ValueError(f"the name {example!r} does not end in the number of a step, as 'step_00000010' does")
        return cls(prefix, len(digits) if digits[0] == "0" and digits != "0" else 0)

    def name(self, step: int) -> str:
        """The name of a step.

        Raises:
            ValueError: for what is not a whole number from 0 to 2**63 - 1.
        """
        try:
            number = -1 if isinstance(step, bool) else operator.index(step)
        except TypeError:
            number = -1
        if not 0 <= number <= _MOST_STEP:
            raise ValueError(f"step {step!r}: a step is a whole number from 0 to {_MOST_STEP}")
        return f"{self.prefix}{number:0{self.width or 0}d}"

    def parse(self, name: str) -> int | None:
        """The step that a name stands for; None if it is not one of this format."""
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
    """How steps are named in a directory: one format is written and several are read.

    Attributes:
        write: the format of new steps; it is read too.
        read: further formats that are read, the preferred ones first. By default those of Orbax, Hugging Face, Flax,
            DeepSpeed, Megatron-LM, torchtitan and OLMo, with ``_``, ``-`` or nothing before the number. A name of none
            of them, such as ``10.orbax-checkpoint-tmp-1``, is no step.

    Raises:
        TypeError: if one of them is no `StepNameFormat`.
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
        """Names written like an example, ``step_00000010``; all that is read by default is read beside it.

        Raises:
            ValueError: for a name that no format can have.
        """
        return cls(StepNameFormat.of(example))

    def name(self, step: int) -> str:
        """The name under which a step is written.

        Raises:
            ValueError: for what is not a whole number from 0 to 2**63 - 1.
        """
        return self.write.name(step)

    def parse(self, name: str) -> int | None:
        """The step that a name stands for in any of the formats; None if it is no step."""
        return next(iter(self.find([name])), None)

    def find(self, names: Iterable[str]) -> Mapping[int, str]:
        """The steps among the names, ascending, each with its name.

        Where several names stand for one step, that in the written format is found, then that of the first format in
        `read`, then the shortest.
        """
        formats: dict[str, list[tuple[int, int | None]]] = {}
        for rank, one in enumerate((self.write, *self.read)):
            formats.setdefault(one.prefix, []).append((rank, one.width))
        found: dict[int, tuple[int, int, str]] = {}
        # A prefix does not end in a digit, so cutting the digits off leaves the one prefix that a name can have.
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
    """The name without the ASCII digits it ends in, and these."""
    prefix = name.rstrip(_DIGITS)
    return prefix, name[len(prefix) :]


def _number(digits: str, width: int | None) -> int | None:
    """What the digits stand for, where they are as many as the width asks; None if they are not."""
    significant = digits.lstrip("0") or digits[-1:]
    if not significant or len(significant) > len(str(_MOST_STEP)):  # int() refuses text of thousands of digits
        return None
    if width is not None and len(digits) != max(width, len(significant)):
        return None
    number = int(significant)
    return number if number <= _MOST_STEP else None


def step_number(step: object, *, hint: str = "") -> int:
    """A step as an int; NumPy's, PyTorch's and JAX's integers will do.

    Args:
        step: the step.
        hint: more to say where it is none.

    Raises:
        TypeError: for anything else.
    """
    return whole_number("step", step, hint=hint)


def whole_number(name: str, value: object, *, hint: str = "") -> int:
    """A value as an int.

    Args:
        name: of the argument.
        value: what was given for it.
        hint: more to say where it is none.

    Raises:
        TypeError: if it is none; names it.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]  # what has no __index__ is refused below
    except TypeError:
        pass
    raise TypeError(f"{name}={repr(value)[:200]}: expected a whole number, as an int{hint}")
