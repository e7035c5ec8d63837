"""Tools for checkpoints: the command line (`ckptcore_tools.cli`)."""
