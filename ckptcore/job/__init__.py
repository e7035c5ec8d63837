"""Jobs: agreement between processes, exchanges of data, and checks that they share a directory."""
