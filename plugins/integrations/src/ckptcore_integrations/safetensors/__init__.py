"""Replacement for `safetensors` that saves and loads with ckptcore.

Import ``ckptcore_integrations.safetensors``, ``.torch``, ``.numpy`` and ``.flax`` instead of ``safetensors`` and its
modules. Types, errors and helpers are those of the installed library.
"""

from safetensors import SafetensorError, TensorSpec, __version__  # noqa: F401  # a name of the library

from ckptcore_integrations.safetensors.files import deserialize, safe_open, serialize, serialize_file
from ckptcore_integrations.safetensors.files import safe_open_handle as _safe_open_handle  # a name of the library

__all__ = [
    "SafetensorError",
    "TensorSpec",
    "_safe_open_handle",
    "deserialize",
    "safe_open",
    "serialize",
    "serialize_file",
]
