"""Replacement for `torch.distributed.checkpoint` that saves and loads with ckptcore."""
