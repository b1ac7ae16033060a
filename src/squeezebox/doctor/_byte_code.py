"""Whether byte code is what its source makes. Also a program that imports the standard library only.

It reads lines of JSON, ``[source, byte code, level of optimisation]``, and answers each with a line: what is
wrong, or nothing. Damaged byte code may end the interpreter that reads it, so that is one of its own.
"""

from __future__ import annotations

import importlib.util
import json
import marshal
import os
import struct
import sys
from types import CodeType
from typing import Any

_HEADER = 16  # bytes before the code (PEP 552)
_MOST_MEMORY = 4 << 30
_COMPARED = (
    "co_name",
    "co_argcount",
    "co_posonlyargcount",
    "co_kwonlyargcount",
    "co_flags",
    "co_code",
    "co_names",
    "co_varnames",
    "co_freevars",
    "co_cellvars",
    "co_firstlineno",
    "co_exceptiontable",
)


def same_code(one: CodeType, other: CodeType) -> bool:
    """Whether two code objects do the same: equal in everything but the name of their file."""
    if any(getattr(one, name, None) != getattr(other, name, None) for name in _COMPARED):
        return False
    return bool(_comparable(one.co_consts) == _comparable(other.co_consts))


def _comparable(constant: Any) -> Any:
    """Equal only for equal constants of equal types: 1 is neither 1.0 nor True, and 0.0 not -0.0."""
    if isinstance(constant, tuple):
        return (tuple, *map(_comparable, constant))
    if isinstance(constant, frozenset):
        return (frozenset, frozenset(map(_comparable, constant)))
    if isinstance(constant, CodeType):
        fields = tuple(getattr(constant, name, None) for name in _COMPARED)
        return (CodeType, *fields, _comparable(constant.co_consts))
    if isinstance(constant, slice):
        return (slice, *map(_comparable, (constant.start, constant.stop, constant.step)))
    if isinstance(constant, float | complex):
        return (type(constant), repr(constant))
    return (type(constant), constant)


def what_is_wrong(source: str, byte_code: str, optimisation: int) -> str:
    """What it is instead of the source's; "" if it is that, or out of date and would not be loaded."""
    with open(byte_code, "rb") as file:
        data = file.read()
    with open(source, "rb") as file:
        text = file.read()
    if data[:4] != importlib.util.MAGIC_NUMBER:
        return "of another Python, under this one's name"
    if not _is_loaded(data, text, source):
        return ""
    expected = compile(text, source, "exec", dont_inherit=True, optimize=optimisation)
    if marshal.dumps(expected) == data[_HEADER:]:
        return ""  # mostly; else the two may still differ in what they share only
    try:
        found = marshal.loads(data[_HEADER:])
    except (EOFError, TypeError, ValueError) as error:
        return f"cannot be read ({error})"
    if not isinstance(found, CodeType):
        return f"holds a {type(found).__name__} instead of code"
    return "" if same_code(expected, found) else "another code than the source's"


def _is_loaded(data: bytes, text: bytes, source: str) -> bool:
    """Whether an import would take it rather than compile the source again."""
    flags, first, second = struct.unpack("<III", data[4:_HEADER])
    if flags & 0b1:
        checked = bool(flags & 0b10)
        return not checked or bytes(importlib.util.source_hash(text)) == data[8:_HEADER]
    status = os.stat(source)
    return (first, second) == (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)


def _main() -> None:
    _limit_memory()
    for line in sys.stdin:
        try:
            wrong = what_is_wrong(*json.loads(line))
        except (OSError, SyntaxError, ValueError, MemoryError, struct.error) as error:
            wrong = f"cannot be compared ({type(error).__name__}: {error})"
        sys.stdout.write(json.dumps(wrong) + "\n")
        sys.stdout.flush()


def _limit_memory() -> None:
    """Damaged byte code may ask for any amount."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    _main()
