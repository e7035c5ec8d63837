"""The machine that reads a pickle as data. It imports nothing and calls nothing.

A pickle is a program for a stack machine, described in ``Lib/pickletools.py`` of CPython. The
machine executes the opcodes of protocols 0 to 5 that data needs. GLOBAL pushes a `Global`;
REDUCE and NEWOBJ push a `Call`, and BUILD sets its state. INST, OBJ, the extension registry and
out-of-band buffers are rejected: no checkpoint uses them.

The machine is a loop without recursion. Its memory is limited to a multiple of the pickle's size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final, TypeAlias, cast

from ckptcore_dcp.pickles.keys import PLAIN_KEYS, KeyCheck
from ckptcore_dcp.pickles.literals import LITERALS, line
from ckptcore_dcp.pickles.values import Call, Global, Persistent, Places, Value, brief, malformed, truncated
from ckptcore_dcp.pickles.windows import Window

__all__ = ["UNSET", "ObjectReader", "RawReader", "read_pickle"]


class _Unset:
    """A memo entry without a value: not set by the pickle, or a part of a `CompactObject`."""

    __slots__ = ()


UNSET: Final = _Unset()
ObjectReader: TypeAlias = Callable[[Global, int, list[Any]], tuple[list[Any], int] | None]
"""Reads objects in one step and adds the memo entries that their opcodes set; None: use the machine.

Receives the class of the object, the offset of EMPTY_TUPLE, NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE,
MARK in the pickle, and the memo, in which no entry was ever replaced. Returns the objects and the
offset after them. Memo entries without a value are `UNSET`; a pickle that refers to one is
rejected.
"""
RawReader: TypeAlias = Callable[[Call, int], tuple[Value, int] | None]
"""Finds bytes between the opcodes of a pickle, as joblib writes them. None: there are none.

Receives an object that was given its state, and the offset after it. Returns the value that takes its
place on the stack, and the offset at which the pickle continues.
"""
_REFUSED: Final = {
    ord("i"): "INST",
    ord("o"): "OBJ",
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
    0x97: "NEXT_BUFFER",
    0x98: "READONLY_BUFFER",
}
_HIGHEST_PROTOCOL: Final = 5
_LITERALS: Final = tuple([LITERALS.get(code) for code in range(256)])
_NEW_WITH_DICT: Final = b"\x81\x94}\x94("
"""NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK: after EMPTY_TUPLE, an object whose attributes follow.
Executed in one step.
"""
_CALL_WITH_IT: Final = b"\x94\x85\x94R\x94"
"""MEMOIZE, TUPLE1, MEMOIZE, REDUCE, MEMOIZE: after TUPLE2, a call with that tuple: a ``torch.Size`` of two axes."""
_CALLABLE: Final[frozenset[object]] = frozenset([Global, Call, Persistent])
"""A class may be a `Persistent`: before torch 1.6 a file had the source of each class of module."""
_UINT2: Final = struct.Struct("<H")
_UINT4: Final = struct.Struct("<I")
_INT4: Final = struct.Struct("<i")
_UINT8: Final = struct.Struct("<Q")


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
        places: receives where texts and bytes are in ``data``; requires bytes or a `Window`.
        raw: finds bytes that follow objects and are not part of the pickle.

    Raises:
        CorruptCheckpointError: it is not a pickle of data, or exceeds a limit that torch's files never
            reach. Its ``stop`` is beyond ``data`` if the pickle is truncated.
    """
    if not 0 <= start <= len(data):
        raise truncated(key, len(data), start)
    if isinstance(data, memoryview):
        value, end = _run(bytes(data[start:]), 0, key, None, None, None)
        return value, start + end
    # A window has the methods of bytes that the machine calls.
    return _run(cast(bytes, data), start, key, objects, places, raw)


def _run(
    data: bytes,
    position: int,
    key: str,
    objects: ObjectReader | None,
    places: Places | None,
    raw: RawReader | None,
) -> tuple[Value, int]:
    # One loop with local variables, with the frequent opcodes of `.metadata` first: it has about 65
    # opcodes per chunk.
    # Values are Any, because the types on the stack are known only after a check.
    begin = position
    stack: list[Any] = []
    outer: list[list[Any]] = []  # one stack per MARK, so that no opcode reaches below a mark
    memo: list[Any] = []
    keys = KeyCheck(key)
    literals = _LITERALS
    unset = UNSET
    starts_with = data.startswith
    plain_keys = PLAIN_KEYS
    uint2, uint4, int4, uint8 = [
        data.unpacker(numbers) if isinstance(data, Window) else numbers.unpack_from
        for numbers in (_UINT2, _UINT4, _INT4, _UINT8)
    ]
    try:
        while True:
            code = data[position]
            position += 1
            if code == 0x68:  # h: BINGET
                item = memo[data[position]]
                if item is unset:
                    raise malformed(key, position, "a memo entry is used before it is set")
                position += 1
                stack.append(item)
            elif code == 0x6A:  # j: LONG_BINGET
                item = memo[uint4(data, position)[0]]
                if item is unset:
                    raise malformed(key, position, "a memo entry is used before it is set")
                position += 4
                stack.append(item)
            elif code < 0x60:
                if code == 0x4B:  # K: BININT1
                    stack.append(data[position])
                    position += 1
                elif code == 0x4D:  # M: BININT2
                    stack.append(uint2(data, position)[0])
                    position += 2
                elif code == 0x4A:  # J: BININT
                    stack.append(int4(data, position)[0])
                    position += 4
                elif code == 0x29:  # ): EMPTY_TUPLE
                    if starts_with(_NEW_WITH_DICT, position) and stack and stack[-1].__class__ is Global:
                        if objects is not None and (found := objects(stack[-1], position - 1, memo)) is not None:
                            stack.pop()
                            values, position = found
                            stack += values
                            continue
                        position += 5
                        item = stack[-1] = Call(stack[-1])
                        item.new = True
                        memo.append(item)
                        item = {}
                        memo.append(item)
                        stack.append(item)
                        outer.append(stack)
                        stack = []
                    else:
                        stack.append(())
                elif code == 0x28:  # (: MARK
                    outer.append(stack)
                    stack = []
                elif code == 0x52:  # R: REDUCE
                    arguments = stack.pop()
                    function = stack[-1]
                    if arguments.__class__ is not tuple or function.__class__ not in _CALLABLE:
                        raise malformed(key, position, f"a call of {brief(function)} with {brief(arguments)}")
                    stack[-1] = Call(function, arguments)
                elif code == 0x58:  # X: BINUNICODE
                    begins = position + 4
                    position = begins + uint4(data, position)[0]
                    if position > len(data):
                        raise truncated(key, begins, position)
                    item = data[begins:position].decode("utf-8", "surrogatepass")
                    if places is not None:
                        places.add(item, begins, position)
                    stack.append(item)
                elif code == 0x5D:  # ]: EMPTY_LIST
                    stack.append([])
                elif code == 0x51:  # Q: BINPERSID
                    stack[-1] = Persistent(stack[-1])
                elif code == 0x2E:  # .: STOP
                    if len(stack) != 1 or outer:
                        raise malformed(key, position, f"it stops with {len(stack)} values and {len(outer)} marks left")
                    return stack[0], position
                elif (literal := literals[code]) is not None:
                    begins = position
                    value, position = literal(data, position, key)
                    if places is not None:
                        if code == 0x53 or code == 0x56:  # STRING and UNICODE are lines with escapes
                            places.add_line(value, begins, position - 1)
                        else:
                            places.add_literal(value, position)
                    stack.append(value)
                elif code == 0x30:  # 0: POP
                    if stack:
                        stack.pop()
                    else:  # the mark itself
                        stack = outer.pop()
                elif code == 0x31:  # 1: POP_MARK
                    stack = outer.pop()
                elif code == 0x32:  # 2: DUP
                    stack.append(stack[-1])
                elif code == 0x50:  # P: PERSID
                    text, position = line(data, position, key)
                    stack.append(Persistent(text.decode("ascii")))
                else:
                    raise _refusal(key, position - 1, code)
            elif code < 0x80:
                if code == 0x75:  # u: SETITEMS
                    items = stack
                    stack = outer.pop()
                    target = stack[-1]
                    if len(items) & 1:
                        raise malformed(key, position, "a key without a value")
                    row = iter(items)
                    if target.__class__ is dict:
                        for name, value in zip(row, row, strict=False):
                            if name.__class__ is not str and name.__class__ not in plain_keys:
                                keys.check(target, (name,), position)
                            target[name] = value
                        if (
                            data[position] == 0x62 and len(stack) > 1
                        ):  # BUILD: the dict is the state of the object below
                            item = stack[-2]
                            if item.__class__ is Call and item.state is None and raw is None:
                                position += 1
                                stack.pop()
                                item.state = target
                    else:
                        _set_pairs(target, zip(row, row, strict=False), key, position)
                elif code == 0x7D:  # }: EMPTY_DICT
                    stack.append({})
                elif code == 0x62:  # b: BUILD
                    state = stack.pop()
                    target = stack[-1]
                    if target.__class__ is not Call or target.state is not None:
                        raise malformed(
                            key,
                            position,
                            f"a state for a {brief(target)}, which cannot have a state or already has one",
                        )
                    target.state = state
                    if raw is not None and (read := raw(target, position)) is not None:
                        stack[-1], position = read
                elif code == 0x71:  # q: BINPUT
                    _put(memo, data[position], stack[-1], position - begin, key)
                    position += 1
                    objects = None  # an `ObjectReader` requires a memo that only grows
                elif code == 0x72:  # r: LONG_BINPUT
                    _put(memo, uint4(data, position)[0], stack[-1], position - begin, key)
                    position += 4
                    objects = None
                elif code == 0x74:  # t: TUPLE
                    item = tuple(stack)
                    stack = outer.pop()
                    stack.append(item)
                elif code == 0x73:  # s: SETITEM
                    value = stack.pop()
                    name = stack.pop()
                    target = stack[-1]
                    if target.__class__ is dict:
                        keys.check(target, (name,), position)
                        target[name] = value
                    else:
                        _set_pairs(target, ((name, value),), key, position)
                elif code == 0x65:  # e: APPENDS
                    items = stack
                    stack = outer.pop()
                    _append(stack[-1], items, key, position)
                elif code == 0x61:  # a: APPEND
                    value = stack.pop()
                    _append(stack[-1], (value,), key, position)
                elif code == 0x63:  # c: GLOBAL
                    module, position = line(data, position, key)
                    text, position = line(data, position, key)
                    stack.append(Global(module.decode("utf-8"), text.decode("utf-8")))
                elif code == 0x6C:  # l: LIST
                    items = stack
                    stack = outer.pop()
                    stack.append(items)
                elif code == 0x64:  # d: DICT
                    items = stack
                    stack = outer.pop()
                    if len(items) % 2:
                        raise malformed(key, position, "a key without a value")
                    keys.check(items, items[::2], position)
                    stack.append(dict(zip(items[::2], items[1::2], strict=True)))
                elif code == 0x67:  # g: GET
                    text, position = line(data, position, key)
                    item = memo[_index(text, key, position)]
                    if item is unset:
                        raise malformed(key, position, "a memo entry is used before it is set")
                    stack.append(item)
                elif code == 0x70:  # p: PUT
                    text, position = line(data, position, key)
                    _put(memo, _index(text, key, position), stack[-1], position - begin, key)
                    objects = None
                else:
                    raise _refusal(key, position - 1, code)
            elif code == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif code == 0x86:  # TUPLE2
                item = stack.pop()
                item = stack[-1] = (stack[-1], item)
                if starts_with(_CALL_WITH_IT, position) and len(stack) > 1 and stack[-2].__class__ is Global:
                    position += 5
                    stack.pop()
                    memo.append(item)
                    arguments = (item,)
                    memo.append(arguments)
                    item = stack[-1] = Call(stack[-1], arguments)
                    memo.append(item)
            elif code == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif code == 0x81:  # NEWOBJ
                arguments = stack.pop()
                function = stack[-1]
                if function.__class__ is Call:
                    function = _nested_class(function)
                if arguments.__class__ is not tuple or not (
                    function.__class__ is Global or function.__class__ is Persistent
                ):
                    raise malformed(key, position, f"a new {brief(function)} with {brief(arguments)}")
                item = stack[-1] = Call(function, arguments)
                item.new = True
            elif code == 0x8C:  # SHORT_BINUNICODE
                begins = position + 1
                position = begins + data[position]
                if position > len(data):
                    raise truncated(key, begins, position)
                item = data[begins:position].decode("utf-8", "surrogatepass")
                if places is not None:
                    places.add(item, begins, position)
                stack.append(item)
                if data[position] == 0x94:  # MEMOIZE
                    position += 1
                    memo.append(item)
            elif code == 0x87:  # TUPLE3
                item = stack.pop()
                second = stack.pop()
                stack[-1] = (stack[-1], second, item)
            elif (literal := literals[code]) is not None:
                value, position = literal(data, position, key)
                if places is not None:
                    places.add_literal(value, position)
                stack.append(value)
            elif code == 0x93:  # STACK_GLOBAL
                name = stack.pop()
                module = stack.pop()
                if name.__class__ is not str or module.__class__ is not str:
                    raise malformed(key, position, f"a global named {brief(name)} of {brief(module)}")
                stack.append(Global(module, name))
            elif code == 0x92:  # NEWOBJ_EX
                keywords = stack.pop()
                arguments = stack.pop()
                stack[-1] = _new_with_keywords(stack[-1], arguments, keywords, key, position)
            elif code == 0x8F:  # EMPTY_SET
                stack.append(set())
            elif code == 0x90:  # ADDITEMS
                items = stack
                stack = outer.pop()
                target = stack[-1]
                if target.__class__ is not set:
                    raise malformed(key, position, f"items for a {brief(target)}, which is not a set")
                keys.check(target, items, position)
                target.update(items)
            elif code == 0x91:  # FROZENSET
                items = stack
                stack = outer.pop()
                keys.check(items, items, position)
                stack.append(frozenset(items))
            elif code == 0x80:  # PROTO
                if data[position] > _HIGHEST_PROTOCOL:
                    raise malformed(
                        key, position, f"it has protocol {data[position]}; the highest supported is {_HIGHEST_PROTOCOL}"
                    )
                position += 1
            elif code == 0x95:  # FRAME: number of bytes a reader may prefetch; all of them are in memory
                (length,) = uint8(data, position)
                position += 8
                if length > len(data) - position:
                    raise truncated(key, position, position + length)
            else:
                raise _refusal(key, position - 1, code)
    except (IndexError, struct.error) as error:
        # Detected here and not before each opcode, which would make reading 50 % slower.
        if position >= len(data) or isinstance(error, struct.error):
            raise truncated(key, position, max(position, len(data)) + 1) from error
        raise malformed(key, position, "it uses a value, a mark or a memo entry that does not exist") from error
    except UnicodeDecodeError as error:
        raise malformed(key, position, f"a text that is not UTF-8 ({error.reason})") from error


def _nested_class(call: Call) -> Value:
    """Return the name of a class within a class, which protocols below 4 store as ``getattr(Outer, "Inner")``."""
    match call.function, call.arguments:
        case Global(module="builtins" | "__builtin__", name="getattr"), (Global() as outer, str() as name):
            return Global(outer.module, f"{outer.name}.{name}")
    return call


def _refusal(key: str, position: int, code: int) -> Exception:
    if code in _REFUSED:
        return malformed(key, position, f"the opcode {_REFUSED[code]}, which no checkpoint needs, is not supported")
    return malformed(key, position, f"{code:#04x} is not an opcode")


def _put(memo: list[Any], index: int, value: Any, read: int, key: str) -> None:
    """Set a memo entry. Writers count up, so an index is at most the number of bytes read."""
    if index == len(memo):
        memo.append(value)
    elif index < len(memo):
        memo[index] = value
    elif index <= read:
        memo.extend([UNSET] * (index - len(memo)))
        memo.append(value)
    else:
        raise malformed(key, read, f"memo entry {index} is set after only {read} bytes")


def _index(text: bytes, key: str, position: int) -> int:
    if not (text.isdigit() and len(text) <= 10):
        raise malformed(key, position, "a memo entry with an invalid number")
    return int(text)


def _append(target: Any, items: Any, key: str, position: int) -> None:
    if target.__class__ is list:
        target.extend(items)
    elif target.__class__ is Call:
        appended = target.appended
        if not isinstance(appended, list):
            appended = target.appended = []
        appended.extend(items)
    else:
        raise malformed(key, position, f"items for a {brief(target)}, which is not a list")


def _set_pairs(target: Any, pairs: Any, key: str, position: int) -> None:
    if target.__class__ is not Call:
        raise malformed(key, position, f"keys and values for a {brief(target)}, which is not a dict")
    found = target.pairs
    if not isinstance(found, list):
        found = target.pairs = []
    found.extend(pairs)


def _new_with_keywords(function: Any, arguments: Any, keywords: Any, key: str, position: int) -> Call:
    if type(function) is not Global or type(arguments) is not tuple or type(keywords) is not dict:
        raise malformed(key, position, f"a new {brief(function)} with {brief(arguments)} and {brief(keywords)}")
    if not all(type(name) is str for name in keywords):
        raise malformed(key, position, f"a new {brief(function)} with keywords that are not strings")
    return Call(function, arguments, keywords=keywords, new=True)
