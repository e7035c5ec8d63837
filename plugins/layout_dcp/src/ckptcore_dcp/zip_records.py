"""The records of a zip file, as its specification numbers them (PKWARE APPNOTE 6.3.10): little endian, signature first."""

from __future__ import annotations

import struct
from typing import Final

__all__ = [
    "DEFLATED",
    "DESCRIPTOR_FOLLOWS",
    "DIRECTORY_ENTRY",
    "END",
    "END64",
    "FULL16",
    "FULL32",
    "LOCAL_HEADER",
    "LOCATOR",
    "MOST_INFLATED",
    "STORED",
]

LOCAL_HEADER: Final = struct.Struct("<4s5H3I2H")
"""What stands before the name of a member in front of its bytes (4.3.7)."""
DIRECTORY_ENTRY: Final = struct.Struct("<4s6H3I5H2I")
"""What stands before the name of a member in the directory (4.3.12)."""
END64: Final = struct.Struct("<4sQ2H2I4Q")
"""Behind a directory that needs 8 bytes for some number (4.3.14)."""
LOCATOR: Final = struct.Struct("<4sIQI")
"""Where `END64` is (4.3.15)."""
END: Final = struct.Struct("<4s4H2IH")
"""The last record (4.3.16)."""

STORED: Final = 0
DEFLATED: Final = 8
MOST_INFLATED: Final = 1100
"""Deflate makes at most 1032 times as many bytes (https://zlib.net/zlib_tech.html)."""
DESCRIPTOR_FOLLOWS: Final = 1 << 3
"""The flag that says that sizes and checksum stand behind the bytes of a member (4.4.4)."""
FULL16: Final = 0xFFFF
FULL32: Final = 0xFFFFFFFF
"""What stands in a field whose number is in one of 8 bytes elsewhere."""
