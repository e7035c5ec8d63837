"""Trees: values taken apart into skeletons and leaves, described, and put together again."""
