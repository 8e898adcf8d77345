"""Runs a stranger's Python program, in a task of the sandbox that is this program's alone.

Nothing here knows what the right output is: what comes back is only what the program printed or returned, and is
compared elsewhere. So a program that takes over its process, and writes the reply itself, can say nothing that it could
not have printed. What fails before `program_starts` raises, and is no fault of the program. Streams are pipes of a
bounded size: no file, no thread, and an endless output ends the program.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from moerl.rewards import sandbox
from moerl.rewards.judges.values import decode, encode

MAX_INPUT_BYTES = 1 << 20
"""An unprivileged pipe holds no more."""
_SET_PIPE_SIZE = 1031

Outcome = dict[str, Any]
"""`{"stdout": text}`, `{"value": encoded}`, or `{"failed": kind, "text": why}`."""


def run_script(program: str, stdin: str, max_output_bytes: int) -> Outcome:
    """What the program prints, given `stdin`."""
    sandbox.narrow_files()
    output = _connect(stdin.encode(), max_output_bytes)
    sandbox.program_starts()
    failure = _guarded(lambda: _execute(program))
    text = _printed(output, max_output_bytes)
    if failure is not None:
        return failure
    return {"failed": "output", "text": f"more than {max_output_bytes} bytes"} if text is None else {"stdout": text}


def call_function(
    program: str, function: str, arguments: list[Any], keywords: list[Any], max_output_bytes: int
) -> Outcome:
    """What `function` of the program returns; `arguments` are encoded, `keywords` pairs of name and encoded value."""
    sandbox.narrow_files()
    _connect(b"", max_output_bytes)
    sandbox.program_starts()
    found: list[Any] = []

    def call() -> None:
        target = _find(_execute(program), function)
        value = target(*[decode(one) for one in arguments], **{name: decode(one) for name, one in keywords})
        found.append(encode(value))

    return _guarded(call) or {"value": found[0]}


def _execute(program: str) -> dict[str, Any]:
    """The names that it leaves behind."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(program, "<program>", "exec"), module.__dict__)
    return module.__dict__


def _find(names: dict[str, Any], function: str) -> Callable[..., Any]:
    """A function, or the method of that name of a class called Solution."""
    if function in names:
        return names[function]
    if "Solution" in names:
        return getattr(names["Solution"](), function)
    raise NameError(f"the program defines no {function}")


def _guarded(work: Callable[[], object]) -> Outcome | None:
    """How `work` failed, or None."""
    try:
        work()
    except SystemExit as error:
        return None if error.code in (None, 0) else {"failed": "exception", "text": f"exit status {error.code!r:.80}"}
    except MemoryError:
        return {"failed": "memory", "text": "MemoryError"}
    except BlockingIOError:
        return {"failed": "output", "text": "more was printed than is allowed"}
    except BaseException as error:  # noqa: BLE001  # whatever a stranger's program raises is how it failed
        return {"failed": "exception", "text": f"{type(error).__name__}: {str(error)[:200]}"}
    return None


def _connect(data: bytes, max_output_bytes: int) -> int:
    """`data` on descriptor 0, and a bounded pipe on 1, whose reading end is returned."""
    reading, filling = os.pipe()
    _resize(filling, len(data))
    os.set_blocking(filling, False)
    if data and os.write(filling, data) < len(data):
        raise OSError(f"an input of {len(data)} bytes does not fit in a pipe of this machine")
    os.close(filling)
    _place(reading, 0)
    output, printing = os.pipe()
    _resize(printing, max_output_bytes)
    os.set_blocking(printing, False)
    _place(printing, 1)
    return output


def _place(descriptor: int, where: int) -> None:
    """Descriptor 0 is closed at the start, so that the first pipe may be given that number."""
    if descriptor != where:
        os.dup2(descriptor, where)
        os.close(descriptor)


def _resize(pipe: int, size: int) -> None:
    if size > 65536:
        fcntl.fcntl(pipe, _SET_PIPE_SIZE, size)


def _printed(output: int, max_output_bytes: int) -> str | None:
    """Everything that is in the pipe; None where it is more than allowed."""
    is_whole = True
    for stream in (sys.stdout, sys.__stdout__):
        try:
            if stream is not None:
                stream.flush()
        except (BlockingIOError, ValueError, AttributeError):
            is_whole = isinstance(sys.exc_info()[1], ValueError) and is_whole
    os.close(1)
    chunks = []
    with contextlib.suppress(OSError):
        while chunk := os.read(output, 1 << 16):
            chunks.append(chunk)
    data = b"".join(chunks)
    return data.decode(errors="replace") if is_whole and len(data) <= max_output_bytes else None
