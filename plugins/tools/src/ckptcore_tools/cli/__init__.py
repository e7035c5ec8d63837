"""The ``ckptcore`` command: look at checkpoints and runs, check, compare, copy, convert, collect.

- `application`: the group of commands, which are entry points of the group ``ckptcore.commands``
- `inspect`, `ls`, `steps`, `verify`, `diff`, `copies`, `gc`, `plugins`: the commands
- `command`: what all commands share, the exit codes among it; `output`, `locations`: text, JSON and progress, locations
- `comparison`, `elements`: how two checkpoints differ
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process with one of the codes of `ckptcore_tools.cli.exits`.

    Args:
        arguments: what follows the program's name; None for those of this process.
    """
    # Imported here, because importing a module of this package need not wait for click.
    from ckptcore_tools.cli.application import application

    application.main(args=arguments, prog_name="ckptcore")
