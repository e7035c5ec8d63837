"""Programs to read and run; each one is run by the test suite."""
