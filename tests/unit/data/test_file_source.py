"""Prompt files: what is read, and that every bad row is named by file and line."""

from __future__ import annotations

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from moerl.data.sources import prompt_sources
from moerl.errors import ConfigError, DataError

ROWS = [
    {"prompt": "1+1=", "answer": "2", "level": 3},
    {"messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}], "answer": 4},
    {"prompt": "3+3=", "completion": "3+3=6", "source": "book"},
]


def read(path, **options):
    plugin, config = prompt_sources.resolve({"name": "file", "path": str(path), **options})
    return plugin.target(config)


def write_lines(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def summary(rows):
    return [(r.index, r.text, r.answer, r.completion, dict(r.metadata)) for r in rows]


EXPECTED = [
    (0, "1+1=", "2", None, {"level": 3}),
    (1, "Add.\n2+2=", "4", None, {}),
    (2, "3+3=", None, "3+3=6", {"source": "book"}),
]


def test_jsonl_and_its_gzip(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", *ROWS)
    zipped = tmp_path / "a.jsonl.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    assert summary(read(path)) == summary(read(zipped)) == EXPECTED
    assert [row.source for row in read(path)] == [f"{path}:{n}" for n in (1, 2, 3)]


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [{"prompt": "1+1=", "answer": "2", "level": 3}, {"prompt": "2+2=", "answer": "4", "level": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    found = read(path)
    assert summary(found) == [(0, "1+1=", "2", None, {"level": 3}), (1, "2+2=", "4", None, {"level": None})]
    assert found[1].source == f"{path}:row 2"


def test_columns_can_have_other_names(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"question": "q", "gold": "g", "text": "t"})
    row = read(path, prompt_key="question", answer_key="gold", completion_key="text")[0]
    assert (row.prompt, row.answer, row.completion, dict(row.metadata)) == ("q", "g", "t", {})


def test_blank_lines_and_a_byte_order_mark_are_passed_over_but_lines_are_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "p", "answer": "1"}\n\n  \n{"prompt": "q", "answer": "2"}\n')
    assert [row.source for row in read(path)] == [f"{path}:1", f"{path}:4"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("nope", "not JSON (Expecting value at column 1): nope"),
        ("[1, 2]", "must be an object {...}, is a list: [1, 2]"),
        ('{"answer": "1"}', "lacks 'prompt' (or 'messages'); it has 'answer'"),
        ('{"prompt": "p", "anwser": "1"}', "lacks 'answer' (or 'completion'); it has 'prompt', 'anwser'"),
        ('{"prompt": "  ", "answer": "1"}', "'prompt' is empty"),
        ('{"prompt": 5, "answer": "1"}', "'prompt' must be a string or a list of messages, is a number: 5"),
        ('{"prompt": "p", "answer": true}', "'answer' must be a non-empty string or a number, is a boolean: True"),
        ('{"prompt": "p", "answer": ""}', "'answer' must be a non-empty string or a number, is a string"),
        ('{"prompt": "p", "completion": ["x"]}', "'completion' must be a non-empty string, is a list"),
        ('{"prompt": "p", "messages": [], "answer": "1"}', "has both 'prompt' and 'messages'; keep one"),
        ('{"messages": [], "answer": "1"}', "'messages' is empty"),
        ('{"messages": ["hi"], "answer": "1"}', "message 0 must be an object with 'role' and 'content', is a string"),
        ('{"messages": [{"role": "user"}], "answer": "1"}', "message 0 needs 'content' as a string, has null"),
        (
            '{"messages": [{"role": "assistant", "content": "x"}], "answer": "1"}',
            "the last message is the assistant's; put its text into 'completion'",
        ),
    ],
)
def test_bad_line_is_named(tmp_path, line, problem):
    path = write_lines(tmp_path / "a.jsonl", ROWS[0], line)
    with pytest.raises(DataError) as caught:
        read(path)
    assert f"1 of 2 rows cannot be used:\n  {path}:2: {problem}" in str(caught.value)


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "p", "answer": "1"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not UTF-8 at byte 12"):
        read(path)


def test_twenty_problems_are_listed_and_the_rest_counted(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ROWS[0], *["nope"] * 23)
    with pytest.raises(DataError) as caught:
        read(path)
    lines = str(caught.value).splitlines()
    assert lines[0] == "23 of 24 rows cannot be used:"
    assert len(lines) == 22
    assert lines[-1] == "  and 3 more"


def test_bad_parquet_row_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "p", "answer": "1"}, {"prompt": None}]), path)
    with pytest.raises(DataError, match=r"a\.parquet:row 2: lacks 'prompt'"):
        read(path)


def test_files_that_cannot_be_read(tmp_path):
    write_lines(tmp_path / "train.jsonl", ROWS[0])
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "a.csv").touch()
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    whole = gzip.compress(json.dumps(ROWS[0]).encode() * 50)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-10])
    cases = {
        "trian.jsonl": r"no such prompt file; did you mean 'train\.jsonl'\?",
        "empty.jsonl": "holds no rows",
        "a.csv": "cannot tell the format",
        "bad.parquet": "is not a readable parquet file",
        "cut.jsonl.gz": "cannot be read",
        "": "is a folder",
        "nowhere/a.jsonl": r"the folder .*nowhere does not exist",
    }
    for name, message in cases.items():
        with pytest.raises(DataError, match=message):
            read(tmp_path / name)
    with pytest.raises(DataError, match="format 'json' is unknown"):
        read(tmp_path / "train.jsonl", format="json")


def test_reasoning_gym_source():
    def tasks(**options):
        plugin, config = prompt_sources.resolve({"name": "reasoning_gym", **options})
        return plugin.target(config)

    rows = tasks(task="chain_sum", size=3, seed=5, config={"max_terms": 3})
    again = tasks(task="chain_sum", size=3, seed=5, config={"max_terms": 3})
    other = tasks(task="chain_sum", size=3, seed=6, config={"max_terms": 3})
    assert [r.prompt for r in rows] == [r.prompt for r in again] != [r.prompt for r in other]
    entry = rows[0].metadata["entry"]
    assert (rows[0].prompt, rows[0].answer) == (entry["question"], entry["answer"])
    assert max(row.metadata["entry"]["metadata"]["num_terms"] for row in rows) <= 3
    assert rows[2].source == "reasoning_gym:chain_sum#2"
    with pytest.raises(ConfigError, match="has no task 'chain_sun'; did you mean chain_sum"):
        tasks(task="chain_sun")
    with pytest.raises(ConfigError, match=r"chain_sum: config {'terms': 1} is refused"):
        tasks(task="chain_sum", config={"terms": 1})
    with pytest.raises(ConfigError, match="size must be at least 1"):
        tasks(task="chain_sum", size=0)
