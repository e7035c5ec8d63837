"""Parts of checkpoints: open checkpoints, stored arrays, and indices of them."""
