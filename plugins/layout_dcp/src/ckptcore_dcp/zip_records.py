"""Records of zip files, numbered as in PKWARE APPNOTE 6.3.10: little endian, signature first."""

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
"""Fixed part of a local header, before the member's name (4.3.7)."""
DIRECTORY_ENTRY: Final = struct.Struct("<4s6H3I5H2I")
"""Fixed part of a directory entry, before the member's name (4.3.12)."""
END64: Final = struct.Struct("<4sQ2H2I4Q")
"""Zip64 end of directory record, for numbers that need 8 bytes (4.3.14)."""
LOCATOR: Final = struct.Struct("<4sIQI")
"""Zip64 end of directory locator: the position of `END64` (4.3.15)."""
END: Final = struct.Struct("<4s4H2IH")
"""End of directory record, the last record (4.3.16)."""

STORED: Final = 0
DEFLATED: Final = 8
MOST_INFLATED: Final = 1100
"""Maximum compression ratio; deflate reaches at most 1032 (https://zlib.net/zlib_tech.html)."""
DESCRIPTOR_FOLLOWS: Final = 1 << 3
"""Flag: sizes and checksum follow the content of a member (4.4.4)."""
FULL16: Final = 0xFFFF
FULL32: Final = 0xFFFFFFFF
"""Value of a field whose number is in an 8-byte field elsewhere."""
