"""What `moerl convert` refuses before it reads anything."""

from __future__ import annotations

import pytest

from moerl.__main__ import main


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--max-shard-size", "inf", "'inf' is no size"),
        ("--max-shard-size", "nan", "'nan' is no size"),
        ("--allow-unmapped", "[", "'[' is no regular expression"),
    ],
)
def test_a_value_that_cannot_be_meant_is_told_in_one_line(option, value, told, capsys):
    with pytest.raises(SystemExit) as left:
        main(["convert", "import", "hf", "out", option, value])
    assert left.value.code == 2
    assert told in capsys.readouterr().err
