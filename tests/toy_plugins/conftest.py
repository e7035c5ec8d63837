"""Excludes the tests of the toy distributions, which run only where these are installed: see test_toy_plugins.py."""

collect_ignore_glob = ["toy_*"]
