"""Checkpoints of torch.distributed.checkpoint and files of torch.save, without PyTorch."""
