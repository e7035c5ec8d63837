"""The group of commands; each command's module is imported when the command is used or listed."""

from __future__ import annotations

import importlib

import click

from ckptcore_tools.cli.exits import EXIT_CODE_HELP

__all__ = ["application"]

_COMMANDS = ("inspect", "ls", "steps", "verify", "diff", "copy", "convert", "consolidate", "gc", "plugins")


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = importlib.import_module(f"ckptcore_tools.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command


@click.group(
    cls=_LazyGroup,
    epilog=EXIT_CODE_HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="ckptcore")
def application() -> None:
    """Look at checkpoints and at the steps of runs; check, compare, copy and convert them, and delete old steps.

    A LOCATION is a directory, a single file that a layout can read on its own (model.safetensors), or a URL. Every
    command reads any checkpoint that an installed layout can read, and prints JSON with --json.
    """
