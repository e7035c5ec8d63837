"""Replacement for `safetensors` that saves and loads with ckptcore.

Import ``ckptcore_integrations.safetensors``, ``.torch``, ``.numpy`` and ``.flax`` instead of ``safetensors`` and its
modules. Types, errors and helpers are those of the installed library.
"""

from safetensors import SafetensorError, TensorSpec, __version__  # noqa: F401  # a name of the library

from ckptcore_integrations.safetensors.files import deserialize, safe_open, safe_open_handle, serialize, serialize_file

__all__ = ["SafetensorError", "TensorSpec", "deserialize", "safe_open", "serialize", "serialize_file"]

_safe_open_handle = safe_open_handle
"""The name that programs of the library use for file objects."""
