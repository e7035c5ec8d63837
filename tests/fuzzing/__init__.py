"""Fuzzing: every kind of file that ckptcore reads, changed by a coverage-guided fuzzer. See `__main__`."""
