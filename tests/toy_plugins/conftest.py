"""The toy distributions' own tests run where they are installed: see test_strangers.py."""

collect_ignore_glob = ["toy_*"]
