"""Programs to read and run. The tests run all of them."""
