"""A toy framework: its own arrays, a container, and an abstract array."""
