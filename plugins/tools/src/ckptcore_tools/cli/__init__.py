"""The ``ckptcore`` command: inspects, verifies, compares, copies and converts checkpoints, and deletes old steps.

- `application`: the group of commands, found by the entry point group ``ckptcore.commands``
- `inspect`, `ls`, `steps`, `verify`, `diff`, `copies`, `gc`, `plugins`: one module per command
- `command`: exit codes, errors and options that all commands share
- `output`: text, JSON and progress bars; `locations`: locations given by the user
- `comparison`, `elements`: comparison of two checkpoints, used by `diff`
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process with an `ExitCode`.

    Args:
        arguments: the arguments after the program's name. None: ``sys.argv[1:]``.
    """
    # A late import: importing another module of this package does not need click.
    from ckptcore_tools.cli.application import application
    from ckptcore_tools.cli.command import ExitCode, discard_unwritable_output
    from ckptcore_tools.cli.output import error_line, prepare_streams

    prepare_streams()
    try:
        application.main(args=arguments, prog_name="ckptcore")
    except OSError as error:  # click cannot write its help
        discard_unwritable_output()
        error_line(str(error))
        sys.exit(ExitCode.FAILED)
