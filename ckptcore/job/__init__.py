"""Jobs: what the processes of one tell each other, and what they see of each other's files."""
