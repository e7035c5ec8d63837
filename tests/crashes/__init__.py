"""What is there after a save was killed, lost power, met a full disk or another save."""
