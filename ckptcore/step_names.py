"""Names of steps: formats that turn the number of a step into the name of a directory, and back."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Final

from ckptcore.records import dataclass

__all__ = ["StepNameFormat", "StepNames", "numbered"]

_DIGITS: Final = "0123456789"

_MAX_STEP: Final = 2**63 - 1
"""Largest step, because frameworks store steps as signed 64-bit integers."""

_MAX_WIDTH: Final = 64


_EXTENSIONS: Final = re.compile(r"(?:\.[A-Za-z][A-Za-z0-9]*)+")
_COUNTED: Final = (re.compile(r"(?<![A-Za-z])step=([0-9]+)"), re.compile(r"(?<![A-Za-z])epoch=([0-9]+)"))
"""Patterns of named numbers. The first pattern that matches gives the step."""
_FRACTION: Final = re.compile(r"[0-9]\.\Z")
_VALUE: Final = re.compile(r"=[-+]?[0-9]+(?:\.[0-9]+)?")


def _split(name: str) -> tuple[str, str]:
    """Return a name without its final ASCII digits, and the digits."""
    prefix = name.rstrip(_DIGITS)
    return prefix, name[len(prefix) :]


def _number(digits: str, width: int | None) -> int | None:
    """Return the value of decimal digits; None if their count does not fit the width, or the value is too large."""
    significant = digits.lstrip("0") or digits[-1:]
    if not significant or len(significant) > len(str(_MAX_STEP)):  # int() refuses text of thousands of digits
        return None
    if width is not None and len(digits) != max(width, len(significant)):
        return None
    number = int(significant)
    return number if number <= _MAX_STEP else None


def _is_part(text: object) -> bool:
    """Return True if a text can be a part of a name."""
    return isinstance(text, str) and text.isprintable() and "/" not in text and "\\" not in text


def _width(digits: str) -> int:
    """Return the width that an example number implies: its number of digits if it has leading zeros, otherwise 0."""
    return len(digits) if digits[0] == "0" and digits != "0" else 0


@dataclass(frozen=True, slots=True)
class StepNameFormat:
    """A format for the names of steps: a prefix, then the number in decimal digits, and a suffix.

    ``*`` in the prefix or the suffix matches any text. A format with ``*`` or a suffix is only for reading steps of
    other software.

    Attributes:
        prefix: the text before the number; may be empty. It must be printable, and not contain ``/`` or a backslash,
            begin with ``.`` (such names are hidden), or end in a digit or ``*``.
        width: minimum number of digits; shorter numbers are padded with zeros. 0 writes no zeros. None also writes no
            zeros, and reads names with any number of zeros.
        suffix: the text after the number, such as ``.ckpt``; may be empty. It must be printable, and not contain ``/``
            or a backslash, or begin with a digit or ``*``.

    Raises:
        ValueError: the prefix, the width or the suffix is invalid.
    """

    prefix: str = ""
    width: int | None = 0
    suffix: str = ""

    def __post_init__(self) -> None:
        prefix, width, suffix = self.prefix, self.width, self.suffix
        if not _is_part(prefix) or prefix.startswith(".") or prefix.endswith((*_DIGITS, "*")):
            raise ValueError(
                f"StepNameFormat(prefix={prefix!r}): give printable text without '/' and '\\' that neither begins "
                "with '.' nor ends in a digit, such as 'step_'"
            )
        if not _is_part(suffix) or suffix.startswith((*_DIGITS, "*")):
            raise ValueError(
                f"StepNameFormat(suffix={suffix!r}): give printable text without '/' and '\\' that does not begin with "
                "a digit, such as '.ckpt'"
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

        The step is the number named ``step``, or else ``epoch``, as in ``epoch=1-step=10.ckpt``. The format then allows
        any other numbers after ``=``. If no number has such a name, the step is the last number before the extensions
        of the file, as in ``model_10.pt``.

        Raises:
            ValueError: the example has no such number, or the text before or after the number is invalid.
        """
        for counted in _COUNTED:
            if matches := list(counted.finditer(example)):
                start, stop = matches[-1].span(1)
                before, after = (_VALUE.sub("=*", part) for part in (example[:start], example[stop:]))
                return cls(before, _width(example[start:stop]), after)
        extensions = next((match for match in _EXTENSIONS.finditer(example) if match.end() == len(example)), None)
        suffix = extensions[0] if extensions is not None else ""
        prefix, digits = _split(example.removesuffix(suffix))
        if not digits or (suffix and _FRACTION.search(prefix)):
            raise ValueError(f"the name {example!r} does not end in the number of a step, as 'step_00000010' does")
        return cls(prefix, _width(digits), suffix)

    @property
    def is_written(self) -> bool:
        """True if new steps can be named in this format."""
        return not self.suffix and "*" not in self.prefix

    def name(self, step: int) -> str:
        """Return the name of a step.

        Raises:
            ValueError: the step is not a whole number from 0 to 2**63 - 1, or the format has ``*``.
        """
        if "*" in self.prefix + self.suffix:
            raise ValueError(f"{self}: '*' matches any text, so that no name can be made")
        try:
            number = -1 if isinstance(step, bool) else operator.index(step)
        except TypeError:
            number = -1
        if not 0 <= number <= _MAX_STEP:
            raise ValueError(f"step {step!r}: a step is a whole number from 0 to {_MAX_STEP}")
        return f"{self.prefix}{number:0{self.width or 0}d}{self.suffix}"

    def parse(self, name: str) -> int | None:
        """Return the step for a name; None if the name has another format."""
        if not name.endswith(self.suffix.rpartition("*")[2]):
            return None
        if "*" in self.prefix + self.suffix:
            before, after = (".*".join(map(re.escape, part.split("*"))) for part in (self.prefix, self.suffix))
            match = re.fullmatch(f"{before}([0-9]+){after}", name)
            return None if match is None else _number(match[1], self.width)
        prefix, digits = _split(name.removesuffix(self.suffix))
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
    StepNameFormat("*step=", None, ".ckpt"),  # Lightning
)


@dataclass(frozen=True, slots=True)
class StepNames:
    """The names of steps in a directory: one format for writing, several for reading.

    Attributes:
        write: the format of new steps. It is also read.
        read: other formats to read, the preferred formats first. The default has the formats of Orbax, Hugging Face,
            Flax, DeepSpeed, Megatron-LM, Lightning, torchtitan and OLMo, with ``_``, ``-`` or nothing before the
            number. Other names, such as ``10.orbax-checkpoint-tmp-1``, are not steps. With the default, a run that has
            no such step is searched for checkpoints with other names: see `finds_others`.

    Raises:
        TypeError: a format is not a `StepNameFormat`.
        ValueError: the format to write has a suffix or ``*``.
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

        if not self.write.is_written:
            raise ValueError(
                f"StepNames(write={self.write!r}): the name of a new step does not end in the number of a step; to "
                "read such steps, use read=[...]"
            )

    @property
    def finds_others(self) -> bool:
        """True if `read` begins with the default formats. A run without such steps is then searched for other names.

        If the names of all checkpoints in the run are one prefix and a number, such as ``ppo_networks_100``, the
        checkpoints are its steps. Otherwise an error explains how to read them.
        """
        return self.read[: len(_READ_BY_DEFAULT)] == _READ_BY_DEFAULT

    @classmethod
    def of(cls, example: str) -> StepNames:
        """Return names that are written like an example, such as ``step_00000010``.

        The default formats are read too, and names with the prefix of the example and any number of zeros.

        Raises:
            ValueError: the example has no step number, or new steps cannot be named in its format.
        """
        write = StepNameFormat.of(example)
        any_width = replace(write, width=None)
        return cls(write, _READ_BY_DEFAULT if any_width in _READ_BY_DEFAULT else (*_READ_BY_DEFAULT, any_width))

    def name(self, step: int) -> str:
        """Return the name of a new step.

        Raises:
            ValueError: the step is not a whole number from 0 to 2**63 - 1.
        """
        return self.write.name(step)

    def parse(self, name: str) -> int | None:
        """Return the step for a name in any of the formats; None if it is not the name of a step."""
        return next(iter(self.find([name])), None)

    def find(self, names: Iterable[str]) -> Mapping[int, str]:
        """Return the names that are names of steps, by step, in ascending order of steps.

        If several names belong to one step, the name in the written format is preferred, then the name in the first
        format of `read`, then the shortest name.
        """
        preferred: dict[int, tuple[int, int, str]] = {}
        formats = list(enumerate((self.write, *self.read)))
        for name in names:
            parsed = ((rank, form.parse(name)) for rank, form in formats)
            rank, step = next((pair for pair in parsed if pair[1] is not None), (0, None))
            if step is not None:
                candidate = (rank, len(name), name)
                preferred[step] = min(preferred.get(step, candidate), candidate)
        return {step: preferred[step][2] for step in sorted(preferred)}


def numbered(names: Iterable[str]) -> Mapping[str, Mapping[int, str]]:
    """Return the names that end in a number, by prefix and then by number. Prefixes and numbers are sorted."""
    by_prefix: dict[str, dict[int, str]] = {}
    for name in sorted(names, key=len, reverse=True):  # the last of equal numbers is kept: the shortest name
        prefix, digits = _split(name)
        number = _number(digits, None)
        if number is not None:
            by_prefix.setdefault(prefix, {})[number] = name
    return {prefix: dict(sorted(by_prefix[prefix].items())) for prefix in sorted(by_prefix)}
