"""Layouts for torch.distributed.checkpoint directories and torch.save files. Does not import PyTorch."""
