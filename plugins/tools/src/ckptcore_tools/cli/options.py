"""Options of storages on the command line, and the Context in which a command works."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

import click

from ckptcore.context import Context, default_context
from ckptcore.model.tree import JSON

__all__ = ["begin_context", "command_context"]

_OPTION: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+-]*)\.([^=.]+)=(.*)", re.DOTALL)
_KEY: Final = "ckptcore.context"


def command_context() -> Context:
    """The Context of the command that runs on this thread; the default one where none says otherwise."""
    running = click.get_current_context(silent=True)
    found = None if running is None else running.meta.get(_KEY)
    return found if isinstance(found, Context) else default_context()


def begin_context(options: Sequence[str]) -> None:
    """Let the command that runs on this thread open storages with these options.

    Args:
        options: each as ``SCHEME.NAME=VALUE``. A value that is JSON is taken as such, any other as text.

    Raises:
        click.BadParameter: one is not written so.
    """
    if not options:
        return
    storage: dict[str, dict[str, JSON]] = {}
    for option in options:
        matched = _OPTION.fullmatch(option)
        if matched is None:
            raise click.BadParameter(
                f"{option!r}: give SCHEME.NAME=VALUE, such as s3.endpoint=http://127.0.0.1:9000", param_hint="--option"
            )
        storage.setdefault(matched[1].lower(), {})[matched[2]] = _value(matched[3])
    click.get_current_context().meta[_KEY] = Context(storage=storage)


def _value(text: str) -> JSON:
    try:
        value: JSON = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value
