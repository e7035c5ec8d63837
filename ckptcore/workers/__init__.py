"""What the workers of a single controller are sent to do."""
