"""Fuzzing of every kind of file that ckptcore reads, with a coverage-guided fuzzer. See `__main__`."""
