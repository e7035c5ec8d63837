"""What is stored: a checkpoint that is opened to be read, of whatever it is made."""
