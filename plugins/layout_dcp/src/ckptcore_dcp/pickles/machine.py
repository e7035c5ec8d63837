"""The machine that reads a pickle as data. It imports nothing and calls nothing.

A pickle is a program for a stack machine, described in ``Lib/pickletools.py`` of CPython. The
machine executes the opcodes of protocols 0 to 5 that data needs. GLOBAL pushes a `Global`;
REDUCE and NEWOBJ push a `Call`, and BUILD sets its state. INST, OBJ, the extension registry and
out-of-band buffers are rejected: no checkpoint uses them.

The machine is a loop without recursion. Its memory is limited to a multiple of the pickle's size.
"""

from __future__ import annotations

import struct
from typing import Final, cast

from ckptcore_dcp.pickles.literals import Window
from ckptcore_dcp.pickles.opcodes import OPCODES, Opcode
from ckptcore_dcp.pickles.state import ObjectReader, RawReader, State
from ckptcore_dcp.pickles.values import Places, Value, malformed, truncated

_REFUSED: Final = {
    ord("i"): "INST",
    ord("o"): "OBJ",
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
    0x97: "NEXT_BUFFER",
    0x98: "READONLY_BUFFER",
}
_STOP: Final = ord(".")


def _refuse(code: int) -> Opcode:
    """Return the function for an opcode that is not in the table."""
    if code in _REFUSED:
        reason = f"the opcode {_REFUSED[code]}, which no checkpoint needs, is not supported"
    else:
        reason = f"{code:#04x} is not an opcode"

    def execute(state: State, position: int) -> int:
        raise malformed(state.key, position - 1, reason)

    return execute


_OPCODES: Final = tuple([OPCODES.get(code) or _refuse(code) for code in range(256)])


def read_pickle(
    data: bytes | memoryview | Window,
    *,
    key: str,
    start: int = 0,
    objects: ObjectReader | None = None,
    places: Places | None = None,
    raw: RawReader | None = None,
) -> tuple[Value, int]:
    """Read the pickle that begins at byte ``start``. Return its value and the offset after it.

    Several pickles may follow one another. Objects that the pickle shares are shared in the value
    and may contain themselves. Texts may contain lone surrogates. A Python 2 string that is not
    UTF-8 becomes bytes.

    Args:
        data: the data; a memoryview is copied from ``start`` on. Long literals of a `Window` become `OutOfLine`.
        key: the object that contains the data, for errors.
        objects: reads common objects of ``data`` in one step; requires bytes.
        places: receives the byte ranges of texts and bytes in ``data``; requires bytes or a `Window`.
        raw: finds bytes that follow objects and are not part of the pickle.

    Raises:
        CorruptCheckpointError: it is not a pickle of data, or exceeds a limit that torch's files never
            reach. The error's ``stop`` is beyond ``data`` if the pickle is truncated.
    """
    if not 0 <= start <= len(data):
        raise truncated(key, len(data), start)
    if isinstance(data, memoryview):
        value, end = _run(State(bytes(data[start:]), 0, key))
        return value, start + end
    # A window has the methods of bytes that opcodes call.
    return _run(State(cast(bytes, data), start, key, objects=objects, places=places, raw=raw))


def _run(state: State) -> tuple[Value, int]:
    data = state.data
    opcodes = _OPCODES
    position = state.begin
    try:
        while True:
            code = data[position]
            position += 1
            if code == _STOP:
                return _result(state, position), position
            position = opcodes[code](state, position)
    except (IndexError, struct.error) as error:
        # Detect it here, because a check before each opcode would make reading 50 % slower.
        position = max(position, state.position)
        if position >= len(data) or isinstance(error, struct.error):
            raise truncated(state.key, position, max(position, len(data)) + 1) from error
        raise malformed(state.key, position, "it uses a value, a mark or a memo entry that does not exist") from error
    except UnicodeDecodeError as error:
        position = max(position, state.position)
        raise malformed(state.key, position, f"a text that is not UTF-8 ({error.reason})") from error


def _result(state: State, position: int) -> Value:
    if len(state.stack) != 1 or state.outer:
        problem = f"it stops with {len(state.stack)} values and {len(state.outer)} marks left"
        raise malformed(state.key, position, problem)
    value: Value = state.stack[0]
    return value
