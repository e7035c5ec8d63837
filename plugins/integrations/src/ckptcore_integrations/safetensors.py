"""Replacement for `safetensors` that saves and loads with ckptcore."""
