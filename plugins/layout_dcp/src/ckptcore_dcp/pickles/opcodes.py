"""The table of opcodes: each reads its argument and changes the state of the machine.

The opcodes are described in ``Lib/pickletools.py`` of CPython. A large checkpoint has millions of them. So frequent
opcodes call no other function, and every opcode receives the offset as an argument instead of reading an attribute of
the state. With both measures, the table is as fast as one function for all opcodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from ckptcore_dcp.pickles.literals import LITERALS, Literal
from ckptcore_dcp.pickles.state import UNSET, State
from ckptcore_dcp.pickles.values import PLAIN_KEYS, Call, Global, Persistent, Value, brief, malformed, truncated

Opcode: TypeAlias = Callable[[State, int], int]
"""Receives the offset after the opcode; returns the offset after its argument."""
_HIGHEST_PROTOCOL: Final = 5
_BUILD: Final = 0x62
_MEMOIZE: Final = 0x94
_SHORT_TEXT: Final = 0x8C
_NEW_WITH_DICT: Final = b"\x81\x94}\x94("
"""NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK: after EMPTY_TUPLE, an object whose attributes follow.
Executed in one step.
"""
_CALL_WITH_IT: Final = b"\x94\x85\x94R\x94"
"""MEMOIZE, TUPLE1, MEMOIZE, REDUCE, MEMOIZE: after TUPLE2, a call with that tuple: a ``torch.Size`` of two axes."""
_CALLABLE: Final[frozenset[object]] = frozenset([Global, Call, Persistent])
"""Types of values that can be called. A class may be a `Persistent`, because files before torch 1.6 contain the source
of each module class."""


def _byte(state: State, position: int) -> int:
    state.stack.append(state.data[position])
    return position + 1


def _unsigned_short(state: State, position: int) -> int:
    state.stack.append(state.uint2(state.data, position)[0])
    return position + 2


def _signed_integer(state: State, position: int) -> int:
    state.stack.append(state.int4(state.data, position)[0])
    return position + 4


def _short_text(state: State, position: int) -> int:
    data = state.data
    while True:
        begins = position + 1
        stop = state.position = begins + data[position]
        if stop > len(data):
            raise truncated(state.key, begins, stop)
        text = data[begins:stop].decode("utf-8", "surrogatepass")
        if state.places is not None:
            state.places.add(text, begins, stop)
        state.stack.append(text)
        # Execute MEMOIZE too: it follows most short texts, and this saves a step of the machine. The keys that lead to
        # an entry follow one another, and so save another step each.
        if data[stop] != _MEMOIZE:
            return stop
        state.memo.append(text)
        state.position = stop + 1  # for errors
        if data[stop + 1] != _SHORT_TEXT:
            return stop + 1
        position = stop + 2


def _text(state: State, position: int) -> int:
    data = state.data
    begins = position + 4
    stop: int = begins + state.uint4(data, position)[0]
    state.position = stop
    if stop > len(data):
        raise truncated(state.key, begins, stop)
    text = data[begins:stop].decode("utf-8", "surrogatepass")
    if state.places is not None:
        state.places.add(text, begins, stop)
    state.stack.append(text)
    return stop


def _literal(read: Literal) -> Opcode:
    def execute(state: State, position: int) -> int:
        value, stop = read(state.data, position, state.key)
        if state.places is not None:
            state.places.add_literal(value, stop)
        state.stack.append(value)
        return stop

    return execute


def _literal_line(read: Literal) -> Opcode:
    def execute(state: State, position: int) -> int:
        value, stop = read(state.data, position, state.key)
        if state.places is not None:
            state.places.add_line(value, position, stop - 1)
        state.stack.append(value)
        return stop

    return execute


def _mark(state: State, position: int) -> int:
    stack = state.stack
    state.outer.append(stack)
    state.stack = []
    if state.objects is not None and stack and stack[-1].__class__ is dict:
        stop = state.objects(state.stack, position, state.memo)
        return position if stop is None else stop
    return position


def _pop(state: State, position: int) -> int:
    if state.stack:
        state.stack.pop()
    else:  # no value above the last MARK: remove the MARK itself
        state.stack = state.outer.pop()
    return position


def _pop_mark(state: State, position: int) -> int:
    state.pop_mark()
    return position


def _dup(state: State, position: int) -> int:
    state.stack.append(state.stack[-1])
    return position


def _persistent(state: State, position: int) -> int:
    stack = state.stack
    stack[-1] = Persistent(stack[-1])
    return position


def _persistent_line(state: State, position: int) -> int:
    text, stop = state.line(position)
    state.stack.append(Persistent(text.decode("ascii")))
    return stop


def _empty_tuple(state: State, position: int) -> int:
    stack = state.stack
    if not (state.data.startswith(_NEW_WITH_DICT, position) and stack and stack[-1].__class__ is Global):
        stack.append(())
        return position
    memo = state.memo
    if state.objects is not None and (stop := state.objects(stack, position - 1, memo)) is not None:
        return stop
    item = stack[-1] = Call(stack[-1])
    item.new = True
    memo.append(item)
    attributes: dict[Any, Any] = {}
    memo.append(attributes)
    stack.append(attributes)
    state.outer.append(stack)
    state.stack = []
    return position + len(_NEW_WITH_DICT)


def _tuple(state: State, position: int) -> int:
    item = tuple(state.stack)
    stack = state.stack = state.outer.pop()
    stack.append(item)
    return position


def _tuple_of_1(state: State, position: int) -> int:
    stack = state.stack
    stack[-1] = (stack[-1],)
    return position


def _tuple_of_2(state: State, position: int) -> int:
    stack = state.stack
    second = stack.pop()
    item = stack[-1] = (stack[-1], second)
    # Execute the following call too: the ``torch.Size`` of every chunk of a matrix has this form.
    if state.data.startswith(_CALL_WITH_IT, position) and len(stack) > 1 and stack[-2].__class__ is Global:
        stack.pop()
        arguments = (item,)
        call = stack[-1] = Call(stack[-1], arguments)
        state.memo += (item, arguments, call)
        return position + len(_CALL_WITH_IT)
    return position


def _tuple_of_3(state: State, position: int) -> int:
    stack = state.stack
    third = stack.pop()
    second = stack.pop()
    stack[-1] = (stack[-1], second, third)
    return position


def _empty_list(state: State, position: int) -> int:
    state.stack.append([])
    return position


def _empty_dict(state: State, position: int) -> int:
    state.stack.append({})
    return position


def _empty_set(state: State, position: int) -> int:
    state.stack.append(set())
    return position


def _list(state: State, position: int) -> int:
    items = state.pop_mark()
    state.stack.append(items)
    return position


def _dict(state: State, position: int) -> int:
    items = state.pop_mark()
    if len(items) % 2:
        raise malformed(state.key, position, "a key without a value")
    state.keys.check(items, items[::2], position)
    state.stack.append(dict(zip(items[::2], items[1::2], strict=True)))
    return position


def _frozen_set(state: State, position: int) -> int:
    items = state.pop_mark()
    state.keys.check(items, items, position)
    state.stack.append(frozenset(items))
    return position


def _append(state: State, position: int) -> int:
    value = state.stack.pop()
    target = state.stack[-1]
    if target.__class__ is list:
        target.append(value)
    else:
        _extend(state, (value,), position)
    return position


def _appends(state: State, position: int) -> int:
    _extend(state, state.pop_mark(), position)
    return position


def _extend(state: State, items: Any, position: int) -> None:
    target = state.stack[-1]
    if target.__class__ is list:
        target.extend(items)
    elif target.__class__ is Call:
        appended = target.appended
        if not isinstance(appended, list):
            appended = target.appended = []
        appended.extend(items)
    else:
        raise malformed(state.key, position, f"items for a {brief(target)}, which is not a list")


def _add_items(state: State, position: int) -> int:
    items = state.pop_mark()
    target = state.stack[-1]
    if target.__class__ is not set:
        raise malformed(state.key, position, f"items for a {brief(target)}, which is not a set")
    state.keys.check(target, items, position)
    target.update(items)
    return position


def _set_item(state: State, position: int) -> int:
    value = state.stack.pop()
    name = state.stack.pop()
    target = state.stack[-1]
    if target.__class__ is dict:
        state.keys.check(target, (name,), position)
        target[name] = value
    else:
        _set_pairs(state, ((name, value),), position)
    return position


def _set_items(state: State, position: int) -> int:
    items = state.stack
    stack = state.stack = state.outer.pop()
    target = stack[-1]
    if len(items) & 1:
        raise malformed(state.key, position, "a key without a value")
    row = iter(items)
    if target.__class__ is not dict:
        _set_pairs(state, zip(row, row, strict=False), position)
        return position
    plain_keys = PLAIN_KEYS
    for name, value in zip(row, row, strict=False):
        if name.__class__ is not str and name.__class__ not in plain_keys:
            state.keys.check(target, (name,), position)
        target[name] = value
    # Execute BUILD too: the dict is the state of the object below it on the stack.
    if state.data[position] == _BUILD and len(stack) > 1:
        item = stack[-2]
        if item.__class__ is Call and item.state is None and state.raw is None:
            stack.pop()
            item.state = target
            return position + 1
    return position


def _set_pairs(state: State, items: Any, position: int) -> None:
    target = state.stack[-1]
    if target.__class__ is not Call:
        raise malformed(state.key, position, f"keys and values for a {brief(target)}, which is not a dict")
    pairs = target.pairs
    if not isinstance(pairs, list):
        pairs = target.pairs = []
    pairs.extend(items)


def _global(state: State, position: int) -> int:
    module, stop = state.line(position)
    name, stop = state.line(stop)
    state.stack.append(Global(module.decode("utf-8"), name.decode("utf-8")))
    return stop


def _stack_global(state: State, position: int) -> int:
    name = state.stack.pop()
    module = state.stack.pop()
    if name.__class__ is not str or module.__class__ is not str:
        raise malformed(state.key, position, f"a global named {brief(name)} of {brief(module)}")
    state.stack.append(Global(module, name))
    return position


def _reduce(state: State, position: int) -> int:
    arguments = state.stack.pop()
    function = state.stack[-1]
    if arguments.__class__ is not tuple or function.__class__ not in _CALLABLE:
        raise malformed(state.key, position, f"a call of {brief(function)} with {brief(arguments)}")
    state.stack[-1] = Call(function, arguments)
    return position


def _new(state: State, position: int) -> int:
    arguments = state.stack.pop()
    function = state.stack[-1]
    if function.__class__ is Call:
        function = _nested_class(function)
    if arguments.__class__ is not tuple or not (function.__class__ is Global or function.__class__ is Persistent):
        raise malformed(state.key, position, f"a new {brief(function)} with {brief(arguments)}")
    item = state.stack[-1] = Call(function, arguments)
    item.new = True
    return position


def _nested_class(call: Call) -> Value:
    """Return the name of a class within a class, which protocols below 4 store as ``getattr(Outer, "Inner")``."""
    match call.function, call.arguments:
        case Global(module="builtins" | "__builtin__", name="getattr"), (Global() as outer, str() as name):
            return Global(outer.module, f"{outer.name}.{name}")
    return call


def _new_with_keywords(state: State, position: int) -> int:
    keywords = state.stack.pop()
    arguments = state.stack.pop()
    function = state.stack[-1]
    if type(function) is not Global or type(arguments) is not tuple or type(keywords) is not dict:
        raise malformed(state.key, position, f"a new {brief(function)} with {brief(arguments)} and {brief(keywords)}")
    if not all(type(name) is str for name in keywords):
        raise malformed(state.key, position, f"a new {brief(function)} with keywords that are not strings")
    state.stack[-1] = Call(function, arguments, keywords=keywords, new=True)
    return position


def _build(state: State, position: int) -> int:
    value = state.stack.pop()
    target = state.stack[-1]
    if target.__class__ is not Call or target.state is not None:
        raise malformed(
            state.key, position, f"a state for a {brief(target)}, which cannot have a state or already has one"
        )
    target.state = value
    if state.raw is not None and (replacement := state.raw(target, position)) is not None:
        state.stack[-1], position = replacement
    return position


def _get_short(state: State, position: int) -> int:
    item = state.memo[state.data[position]]
    if item is UNSET:
        raise _unset(state, position)
    state.stack.append(item)
    return position + 1


def _get_long(state: State, position: int) -> int:
    item = state.memo[state.uint4(state.data, position)[0]]
    if item is UNSET:
        raise _unset(state, position)
    state.stack.append(item)
    return position + 4


def _get_line(state: State, position: int) -> int:
    index, stop = _index(state, position)
    item = state.memo[index]
    if item is UNSET:
        raise _unset(state, stop)
    state.stack.append(item)
    return stop


def _unset(state: State, position: int) -> Exception:
    return malformed(state.key, position, "a memo entry is used before it is set")


def _memoize(state: State, position: int) -> int:
    state.memo.append(state.stack[-1])
    return position


def _put_short(state: State, position: int) -> int:
    _put(state, state.data[position], position)
    return position + 1


def _put_long(state: State, position: int) -> int:
    _put(state, state.uint4(state.data, position)[0], position)
    return position + 4


def _put_line(state: State, position: int) -> int:
    index, stop = _index(state, position)
    _put(state, index, stop)
    return stop


def _index(state: State, position: int) -> tuple[int, int]:
    text, stop = state.line(position)
    if not (text.isdigit() and len(text) <= 10):
        raise malformed(state.key, stop, "a memo entry with an invalid number")
    return int(text), stop


def _put(state: State, index: int, position: int) -> None:
    # Writers count up, so an index is at most the number of bytes read.
    memo = state.memo
    value = state.stack[-1]
    if index == len(memo):
        memo.append(value)
    elif index < len(memo):
        memo[index] = value
    elif index <= position - state.begin:
        memo.extend([UNSET] * (index - len(memo)))
        memo.append(value)
    else:
        read = position - state.begin
        raise malformed(state.key, read, f"memo entry {index} is set after only {read} bytes")
    state.objects = None  # an `ObjectReader` requires a memo that only grows


def _protocol(state: State, position: int) -> int:
    protocol = state.data[position]
    if protocol > _HIGHEST_PROTOCOL:
        reason = f"it has protocol {protocol}; the highest supported is {_HIGHEST_PROTOCOL}"
        raise malformed(state.key, position, reason)
    return position + 1


def _frame(state: State, position: int) -> int:
    # The length tells a reader how many bytes it can read ahead. Here it is only checked.
    (length,) = state.uint8(state.data, position)
    start = position + 8
    if length > len(state.data) - start:
        raise truncated(state.key, start, start + length)
    return start


OPCODES: Final[Mapping[int, Opcode]] = {
    **{code: _literal(read) for code, read in LITERALS.items()},
    ord("("): _mark,  # MARK
    ord(")"): _empty_tuple,  # EMPTY_TUPLE
    ord("0"): _pop,  # POP
    ord("1"): _pop_mark,  # POP_MARK
    ord("2"): _dup,  # DUP
    ord("J"): _signed_integer,  # BININT
    ord("K"): _byte,  # BININT1
    ord("M"): _unsigned_short,  # BININT2
    ord("P"): _persistent_line,  # PERSID
    ord("Q"): _persistent,  # BINPERSID
    ord("R"): _reduce,  # REDUCE
    ord("S"): _literal_line(LITERALS[ord("S")]),  # STRING
    ord("V"): _literal_line(LITERALS[ord("V")]),  # UNICODE
    ord("X"): _text,  # BINUNICODE
    ord("]"): _empty_list,  # EMPTY_LIST
    ord("a"): _append,  # APPEND
    ord("b"): _build,  # BUILD
    ord("c"): _global,  # GLOBAL
    ord("d"): _dict,  # DICT
    ord("e"): _appends,  # APPENDS
    ord("g"): _get_line,  # GET
    ord("h"): _get_short,  # BINGET
    ord("j"): _get_long,  # LONG_BINGET
    ord("l"): _list,  # LIST
    ord("p"): _put_line,  # PUT
    ord("q"): _put_short,  # BINPUT
    ord("r"): _put_long,  # LONG_BINPUT
    ord("s"): _set_item,  # SETITEM
    ord("t"): _tuple,  # TUPLE
    ord("u"): _set_items,  # SETITEMS
    ord("}"): _empty_dict,  # EMPTY_DICT
    0x80: _protocol,  # PROTO
    0x81: _new,  # NEWOBJ
    0x85: _tuple_of_1,  # TUPLE1
    0x86: _tuple_of_2,  # TUPLE2
    0x87: _tuple_of_3,  # TUPLE3
    0x8C: _short_text,  # SHORT_BINUNICODE
    0x8F: _empty_set,  # EMPTY_SET
    0x90: _add_items,  # ADDITEMS
    0x91: _frozen_set,  # FROZENSET
    0x92: _new_with_keywords,  # NEWOBJ_EX
    0x93: _stack_global,  # STACK_GLOBAL
    0x94: _memoize,  # MEMOIZE
    0x95: _frame,  # FRAME
}
"""Opcodes by code. STOP ends the loop of the machine."""
