"""What loading and verifying do with checkpoints whose files were damaged or forged."""
