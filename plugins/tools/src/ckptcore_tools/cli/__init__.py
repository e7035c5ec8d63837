"""The ``ckptcore`` command: look at checkpoints and runs, check, compare, copy, convert, collect.

- `application`: the group of commands, which imports each one when it is used
- `inspect`, `ls`, `steps`, `verify`, `diff`, `copy`, `convert`, `consolidate`, `gc`, `plugins`: one command each
- `exits`: the exit codes and what leads to them
- `documents`: what ``--json`` prints
- `command`: what all commands share; `options`: of storages; `locating`, `survey`, `members`, `comparison`,
  `files_comparison`, `collection`, `treeview`, `table`, `console`, `progress`: their parts
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
