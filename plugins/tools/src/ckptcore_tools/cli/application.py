"""The group of commands. Each is an entry point, whose module is imported when the command is used or listed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

import click

from ckptcore_tools.cli.command import EXIT_CODE_HELP, ExitCode
from ckptcore_tools.cli.output import error_line

__all__ = ["application"]

_OWN = "ckptcore_tools."


def _commands() -> Mapping[str, EntryPoint]:
    """Return the installed commands by name: our own, then those of other distributions."""
    found = entry_points(group="ckptcore.commands")
    own = {entry.name: entry for entry in found if entry.value.startswith(_OWN)}
    others = {entry.name: entry for entry in sorted(found, key=lambda entry: (entry.name, entry.value))}
    return {**own, **{name: entry for name, entry in others.items() if name not in own}}


def _broken(entry: EntryPoint, error: Exception) -> click.Command:
    """Return a command that reports why the one of an entry point cannot be used."""
    of = f" of {entry.dist.name}" if entry.dist is not None else ""
    message = f"the command {entry.name}{of} cannot be loaded: {type(error).__name__}: {error}"

    def fail() -> None:
        error_line(f"{message}; update or uninstall that distribution")
        click.get_current_context().exit(ExitCode.UNSUPPORTED)

    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(entry.name, anything, fail, short_help="cannot be loaded", add_help_option=False)


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
                return _broken(entry, TypeError(f"{entry.value} is no click command"))
        except Exception as error:  # noqa: BLE001  # of another distribution: the other commands must still work
            return _broken(entry, error)
        return command


@click.group(
    cls=_Commands,
    epilog=EXIT_CODE_HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="ckptcore")
def application() -> None:
    """Look at checkpoints and at the steps of runs; check, compare, copy and convert them, and delete old steps.

    A LOCATION is a directory, a single file that a layout can read on its own (model.safetensors), or a URL. Every
    command reads any checkpoint that an installed layout can read, and prints JSON with --json.
    """
