"""Names of steps."""
