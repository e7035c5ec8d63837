"""The ``ckptcore`` command: look at checkpoints and runs, check, compare, copy, convert, collect. Needs ``ckptcore[cli]``.

- `application`: the group of commands, which imports each one when it is used
- `inspect`, `ls`, `steps`, `verify`, `diff`, `copy`, `convert`, `consolidate`, `gc`, `plugins`: one command each
- `exits`: the exit codes and what leads to them
- `documents`: what ``--json`` prints
- `command`: what all commands share; `options`: of storages; `locating`, `survey`, `members`, `comparison`, `files_comparison`, `collection`, `treeview`, `table`,
  `amounts`, `console`, `progress`: their parts
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with one of the codes of `ckptcore.cli.exits`.

    Args:
        arguments: what stands behind the program's name; None for those of this process.
    """
    try:
        import click  # noqa: F401  # imported to learn whether it is there
        import rich  # noqa: F401
    except ModuleNotFoundError as missing:
        if missing.name not in ("click", "rich"):
            raise
        sys.stderr.write(f"ckptcore: the command line needs {missing.name}: run pip install 'ckptcore[cli]'\n")
        sys.exit(5)
    from ckptcore.cli.application import application

    application.main(args=arguments, prog_name="ckptcore")
