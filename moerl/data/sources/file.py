"""Prompts from a file: `.jsonl`, `.jsonl.gz` or `.parquet`, one task a row.

A row holds `prompt` (text) or `messages` (a list of `{role, content}`), and `answer`, or for supervised training
`completion`; every other column is kept as metadata.
"""

from __future__ import annotations

import difflib
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from moerl.data.rows import Row
from moerl.data.sources import prompt_sources
from moerl.errors import DataError

MAX_PROBLEMS = 20
"""So many bad rows are listed in one error; the rest are counted."""

MESSAGES_KEY = "messages"


@dataclass
class FileSourceConfig:
    """Which file and which columns."""

    path: str = MISSING
    format: str = "auto"
    """`jsonl`, `parquet`, or `auto`: by the file's name."""
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    completion_key: str = "completion"


@prompt_sources.register("file", FileSourceConfig)
def read_file(config: FileSourceConfig) -> list[Row]:
    """Every row of the file.

    Raises:
        DataError: no such file, unreadable, or bad rows: up to 20 are listed as `file:line: what is wrong`.
    """
    path = _existing(config.path)
    located = (_parquet_rows if _format_of(path, config.format) == "parquet" else _jsonl_rows)(path)
    rows: list[Row] = []
    problems: list[str] = []
    for where, value in located:
        result = (
            value if isinstance(value, str) else _to_row(value, config, index=len(rows) + len(problems), where=where)
        )
        if isinstance(result, Row):
            rows.append(result)
        else:
            problems.append(f"{where}: {result}")
    if problems:
        shown = "\n  ".join(problems[:MAX_PROBLEMS])
        rest = f"\n  and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        raise DataError(f"{len(problems)} of {len(rows) + len(problems)} rows cannot be used:\n  {shown}{rest}")
    if not rows:
        raise DataError(f"{path}: holds no rows; give a file with at least one prompt")
    return rows


def _existing(name: str) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir():
        raise DataError(f"{path}: is a folder; give one .jsonl, .jsonl.gz or .parquet file in it")
    if not path.parent.is_dir():
        raise DataError(f"{path}: no such prompt file (the folder {path.parent} does not exist)")
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir()], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise DataError(f"{path}: no such prompt file{hint}")


def _format_of(path: Path, wanted: str) -> str:
    if wanted in ("jsonl", "parquet"):
        return wanted
    if wanted != "auto":
        raise DataError(f"{path}: format {wanted!r} is unknown; allowed: auto, jsonl, parquet")
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return "jsonl"
    if path.suffix == ".parquet":
        return "parquet"
    raise DataError(
        f"{path}: cannot tell the format from the name; call it .jsonl, .jsonl.gz or .parquet, or set format: jsonl"
    )


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """(`file:line`, object, or what is wrong with the line); blank lines are passed over but counted."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            for number, raw in enumerate(stream, start=1):
                if raw.strip():
                    yield f"{path}:{number}", _parse_line(raw, first=number == 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); is it whole, and gzip where the name ends in .gz?"
        ) from error


def _parse_line(raw: bytes, *, first: bool) -> dict[str, Any] | str:
    try:
        text = raw.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start} of the line"
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return f"not JSON ({error.msg} at column {error.colno}): {_short(text)}"
    except RecursionError:
        return "JSON nested too deeply"
    if not isinstance(value, dict):
        return f"must be an object {{...}}, is {_kind(value)}: {_short(text)}"
    return value


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=4096):
                for value in batch.to_pylist():
                    number += 1
                    yield f"{path}:row {number}", value
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: is not a readable parquet file ({error})") from error


def _to_row(value: Mapping[str, Any], config: FileSourceConfig, *, index: int, where: str) -> Row | str:
    """The row, or what is wrong with it."""
    prompt = _prompt_of(value, config.prompt_key)
    if isinstance(prompt, _Problem):
        return prompt.text
    answer = value.get(config.answer_key)
    completion = value.get(config.completion_key)
    if answer is None and completion is None:
        return f"lacks {config.answer_key!r} (or {config.completion_key!r}); it has {_fields(value)}"
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if answer is not None and (not isinstance(answer, str) or not answer.strip()):
        return f"{config.answer_key!r} must be a non-empty string or a number, is {_kind(answer)}: {_short(answer)}"
    if completion is not None and (not isinstance(completion, str) or not completion):
        return f"{config.completion_key!r} must be a non-empty string, is {_kind(completion)}: {_short(completion)}"
    used = {config.prompt_key, MESSAGES_KEY, config.answer_key, config.completion_key}
    metadata = {key: item for key, item in value.items() if key not in used}
    return Row(index, prompt, answer, where, completion, metadata)


@dataclass(frozen=True)
class _Problem:
    text: str


def _prompt_of(value: Mapping[str, Any], key: str) -> str | list[dict[str, str]] | _Problem:
    prompt, messages = value.get(key), value.get(MESSAGES_KEY)
    if prompt is not None and messages is not None and key != MESSAGES_KEY:
        return _Problem(f"has both {key!r} and {MESSAGES_KEY!r}; keep one")
    if prompt is None:
        prompt = messages
    if prompt is None:
        return _Problem(f"lacks {key!r} (or {MESSAGES_KEY!r}); it has {_fields(value)}")
    if isinstance(prompt, str):
        return prompt if prompt.strip() else _Problem(f"{key!r} is empty")
    if not isinstance(prompt, list):
        return _Problem(f"{key!r} must be a string or a list of messages, is {_kind(prompt)}: {_short(prompt)}")
    return _messages(prompt)


def _messages(messages: list[Any]) -> list[dict[str, str]] | _Problem:
    if not messages:
        return _Problem(f"{MESSAGES_KEY!r} is empty")
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            return _Problem(f"message {number} must be an object with 'role' and 'content', is {_kind(message)}")
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                return _Problem(f"message {number} needs {name!r} as a string, has {_kind(message.get(name))}")
    if messages[-1]["role"] == "assistant":
        return _Problem("the last message is the assistant's; put its text into 'completion'")
    if not any(message["content"].strip() for message in messages):
        return _Problem("all messages are empty")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _short(value: Any, limit: int = 60) -> str:
    text = value.strip() if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _fields(value: Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name in value) or "no fields"
