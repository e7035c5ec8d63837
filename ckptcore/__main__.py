"""``python -m ckptcore``: the command line, which ckptcore-tools adds."""

from __future__ import annotations

import sys

from ckptcore.distributions import import_name
from ckptcore.errors import MissingDistributionError


def run() -> None:
    """Run the command line and exit with its code. Exit with 2 and one line on stderr if it is not installed."""
    try:
        main = import_name("main", purpose="the command line")
    except MissingDistributionError as error:
        sys.stderr.write(f"ckptcore: {error}\n")
        sys.exit(2)
    assert callable(main)
    main()


if __name__ == "__main__":
    run()
