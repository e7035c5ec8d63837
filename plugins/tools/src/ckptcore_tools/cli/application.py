"""The group of commands. Each command is an entry point; its module is imported when the command is run or listed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final

import click

from ckptcore.installed import version_of
from ckptcore.redaction import redacted
from ckptcore.tree.suggestions import NameSuggestions
from ckptcore_tools.cli.command import EXIT_CODE_HELP, ExitCode
from ckptcore_tools.cli.output import error_line

_OWN_PACKAGE: Final = "ckptcore_tools."

_SYNONYMS: Final[Mapping[str, str]] = {
    "check": "verify",
    "compare": "diff",
    "cp": "copy",
    "delete": "gc",
    "export": "consolidate",
    "list": "ls",
    "metadata": "inspect",
    "prune": "gc",
    "rm": "gc",
    "show": "inspect",
    "tree": "inspect",
}
"""Names of other programs' commands, with our equivalent. The error for such a name suggests our command."""


def _commands() -> Mapping[str, EntryPoint]:
    """Return the installed commands by name: our own, then those of other distributions."""
    entries = entry_points(group="ckptcore.commands")
    own = {entry.name: entry for entry in entries if entry.value.startswith(_OWN_PACKAGE)}
    others = {entry.name: entry for entry in sorted(entries, key=lambda entry: (entry.name, entry.value))}
    return {**own, **{name: entry for name, entry in others.items() if name not in own}}


def _broken_command(entry: EntryPoint, error: Exception) -> click.Command:
    """Return a placeholder command that reports why an entry point cannot be loaded."""
    of = f" of {entry.dist.name}" if entry.dist is not None else ""
    message = f"the command {entry.name}{of} cannot be loaded: {type(error).__name__}: {error}"

    def fail() -> None:
        error_line(f"{message}. Update or uninstall that distribution")
        click.get_current_context().exit(ExitCode.UNSUPPORTED)

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(entry.name, settings, fail, short_help="cannot be loaded", add_help_option=False)


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = _commands().get(cmd_name)
        if entry is None:
            return None
        try:
            command = entry.load()
            if not isinstance(command, click.Command):
                return _broken_command(entry, TypeError(f"{entry.value} is not a click command"))
        except Exception as error:  # noqa: BLE001  # code of another distribution: the other commands must still work
            return _broken_command(entry, error)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            name = args[0]
            suggestion = _SYNONYMS.get(name) or NameSuggestions(list(_commands())).nearest(name)
            if suggestion is None or name.startswith("-"):
                raise click.UsageError(redacted(error.format_message()), ctx) from None
            raise click.UsageError(f"No such command {name!r}. Did you mean {suggestion!r}?", ctx) from error


@click.group(
    cls=_Commands,
    epilog=EXIT_CODE_HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(version_of("ckptcore"))
def application() -> None:
    """Inspect, verify, compare, copy and convert checkpoints, and delete old steps of runs.

    A LOCATION is a directory, a URL, or a single file that a layout can read (model.safetensors). Every command reads
    any checkpoint that an installed layout supports, and prints JSON with --json.
    """
