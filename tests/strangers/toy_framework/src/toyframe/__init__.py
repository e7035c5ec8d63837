"""A toy framework: arrays that are nobody else's, a container, and an abstract array."""
