"""Lets ``python -m ckptcore.cli`` be the ``ckptcore`` command."""

from ckptcore.cli import main

main()
