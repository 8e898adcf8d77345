"""Programs against tests: what passes, what fails and why, and what is no verdict."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from datetime import date

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import ADD, SUMS, prompt, scored

from moerl.errors import ConfigError
from moerl.metrics import to_floats
from moerl.rewards.base import UnscoredError
from moerl.rewards.code import Code, CodeConfig
from moerl.rewards.code_tests import is_printed, is_returned, last_program, read_tests
from moerl.rewards.judges.values import decode, encode
from moerl.rewards.pool import SandboxPool
from moerl.types import Prompt


@pytest.fixture(scope="module")
def pool():
    pool = SandboxPool(num_workers=1, timeout_seconds=20.0, memory_bytes=1_000_000_000)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "program",
    [
        ADD,
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
        "print(sum(map(int, open(0).read().split())))",
        "import os\nos.write(1, str(sum(map(int, os.read(0, 99).split()))).encode())",
        "import sys\nsys.stdout.buffer.write(b'%d' % sum(map(int, sys.stdin.buffer.readline().split())))",
        "def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()\n    exit(0)",
    ],
)
def test_every_way_of_reading_and_printing(pool, program):
    assert scored(pool, program, SUMS) == (1.0, {})


def test_credit_and_kinds_of_failure(pool):
    wrong = "a, b = map(int, input().split())\nprint(abs(a) + abs(b))"
    assert scored(pool, wrong, SUMS) == (0.0, {"wrong": 1.0})
    assert scored(pool, wrong, SUMS, credit="fraction") == (0.5, {"wrong": 1.0})
    assert scored(pool, wrong, SUMS, max_tests=1) == (1.0, {})
    for program, kind in (
        ("1/0", "exception"),
        ("print(3", "exception"),
        ("exit(1)", "exception"),
        ("while True: pass", "timeout"),
        ("import time\ntime.sleep(99)", "timeout"),
        ("x = [0] * 10**10", "memory"),
        ("while True: print('x' * 1000)", "output"),
        ("import os\nos._exit(0)", "crash"),
        ("import os\nos.abort()", "crash"),
    ):
        assert scored(pool, program, SUMS, timeout_seconds=1.0) == (0.0, {kind: 1.0}), program
    assert scored(pool, ADD, SUMS) == (1.0, {})


def test_a_text_without_a_program_is_zero_and_counted(pool):
    reward = Code(CodeConfig(), pool)
    assert asyncio.run(reward.score(prompt(SUMS), "I cannot.")) == 0.0
    assert to_floats(reward.take_metrics())["failed_no_program"] == 1.0
    assert to_floats(reward.take_metrics())["failed_no_program"] == 0.0


def test_large_input_and_output_pass_through_pipes(pool):
    data = "7 " * 400_000
    assert scored(pool, "print(len(input().split()))", [{"input": data, "output": "400000"}]) == (1.0, {})
    long = [{"input": "", "output": "x" * 60_000}]
    assert scored(pool, "print('x' * 60000)", long) == (1.0, {})
    assert scored(pool, "print('x' * 60000)", long, max_output_bytes=50_000) == (0.0, {"output": 1.0})


@pytest.mark.parametrize(
    ("program", "test", "entry_point"),
    [
        ("def add(a, b): return a + b", {"function": "add", "arguments": [1, 2], "output": 3}, None),
        ("def pair(a): return (a, [a])", {"function": "pair", "arguments": [1], "output": [1, [1]]}, None),
        (
            "class Solution:\n    def f(self, x): return {x: 1}",
            {"function": "f", "arguments": ["k"], "output": {"k": 1}},
            None,
        ),
        ("def add(a, b): return a + b", "assert add(1, 2) == 3 and add(2, 2) == 4", None),
        ("def both(x): return {x, -x}", "assert both(1) == {1, -1}", None),
        ("def half(x): return x / 2", "import math\nassert math.isclose(half(x=1), 0.5)", None),
        ("def half(x): return x / 2", "def check(candidate):\n    assert candidate(4) == 2\n", "half"),
        (
            "def root(x):\n    if x < 0: raise ValueError('neg')",
            "try:\n    root(-1)\n    assert 0\nexcept ValueError: pass",
            None,
        ),
    ],
)
def test_functions_and_assertions(pool, program, test, entry_point):
    entry = {"entry_point": entry_point} if entry_point else {}
    assert scored(pool, program, [test], **entry) == (1.0, {})
    value, failed = scored(pool, "def unrelated(): pass", [test], **entry)
    assert (value, sum(failed.values())) == (0.0, 1.0)


def test_a_run_without_the_walls_does_not_start():
    class Bare:
        def submit(self, function, kwargs):
            from concurrent.futures import Future

            from moerl.rewards.pool import Verdict

            future = Future()
            future.set_result(Verdict(["limits", "audit"]))
            return future

    with pytest.raises(ConfigError, match=r"lacks seccomp, landlock, and programs .* leave it out of .*`require`"):
        Code(CodeConfig(), Bare()).check([prompt(SUMS)])
    assert Code(CodeConfig(require=["limits"]), Bare()).check([prompt(SUMS)]) == [None]


def test_this_machine_has_the_walls(pool):
    assert Code(CodeConfig(), pool).check([prompt(SUMS)]) == [None]


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([], "a list that is not empty"),
        ([{"input": "1"}], "test 0 has the keys ['input']; give input and output"),
        ([{"input": 1, "output": "1"}], "test 0: input and output must be text"),
        ([{"input": "x" * (2**20 + 1), "output": ""}], "test 0: an input of more than 1048576 bytes"),
        (["assert ("], "test 0 is not Python"),
        (["assert 1 == 1"], "test 0 calls no function of the program"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        (3, "a list that is not empty, not 3"),
        ("null", "a list that is not empty, not None"),
        ([None], "test 0 must be code or a mapping, not None"),
        ([5], "test 0 must be code or a mapping, not 5"),
        ([{"code": 5}], "test 0: code must be text, not 5"),
        ([{"input": "1", "output": None}], "test 0: input and output must be text"),
        ([{"function": "f", "arguments": "abc", "output": 1}], "test 0: arguments must be a list, not 'abc'"),
        ([{"function": 5, "output": 1}], "test 0: function must be a name, not 5"),
        ([{"function": "A().f", "output": 1}], "a function's name or Solution().name, not 'A().f'"),
        ([{"function": "f", "arguments": [date(2026, 1, 1)], "output": 1}], "test 0: a value of type date cannot"),
        ({"inputs": "12", "outputs": "34"}, "inputs and outputs must be lists"),
        ({"inputs": ["1"], "outputs": None}, "inputs and outputs must be lists"),
        ({"inputs": ["a"], "outputs": [1], "fn_name": "f"}, "test 0: arguments must be a list, not 'a'"),
        ("[" * 100_000, "tests are nested too deeply"),
        (["a" + "(" * 10_000], "test 0 is not Python"),
        (["from solution import *\nassert f(1) == 2"], "test 0 has `from solution import *`, which hides"),
        (["s = Stack()\ns.push(1)"], "test 0 makes an object of the program's Stack, and plain values alone"),
    ],
)
def test_tests_that_cannot_be_read_are_found_at_the_start(pool, tests, message):
    (problem,) = Code(CodeConfig(), pool).check([prompt(tests)])
    assert message in problem
    with pytest.raises(UnscoredError, match="exception: "):
        asyncio.run(Code(CodeConfig(), pool).score(prompt(tests), "```\n1\n```"))


def test_a_row_without_tests_names_the_column(pool):
    bare = Prompt("c/0", np.array([1], np.int32), None, "c")
    assert Code(CodeConfig(tests="cases"), pool).check([bare]) == [
        "has no column 'cases' with tests; name it in the reward's `tests`"
    ]


def test_other_forms_of_tests():
    pairs = read_tests(json.dumps({"inputs": ["1", "2"], "outputs": ["3", "4"]}), None)
    assert [(one.stdin, one.expected) for one in pairs] == [("1", "3"), ("2", "4")]
    (call,) = read_tests({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}, None)
    assert (call.function, call.arguments, call.expected) == ("add", (1, 2), 3)
    (code,) = read_tests("import math\nassert math.sqrt(f(1)) == len(g(x=2))", None)
    assert list(code.functions) == ["f", "g"]


def test_a_table_gives_every_row_the_keys_of_all():
    rows = [
        {"input": "1", "output": "2", "function": None, "arguments": None, "code": None},
        {"input": None, "output": None, "function": "f", "arguments": None, "code": None},
        {"input": None, "output": None, "function": None, "arguments": None, "code": "assert f(1)"},
    ]
    printed, called, code = read_tests(rows, None)
    assert (printed.stdin, printed.expected) == ("1", "2")
    assert (called.function, called.arguments, called.expected) == ("f", (), None)
    assert list(code.functions) == ["f"]


@pytest.mark.parametrize(
    ("outputs", "program", "value"),
    [
        ([3], "def add(a, b): return a + b", 1.0),
        ([[3]], "def add(a, b): return a + b", 1.0),
        ([[3]], "def add(a, b): return [a + b]", 1.0),
        ([[3]], "def add(a, b): return 4", 0.0),
        ([[3, 4]], "def add(a, b): return [a + b, 4]", 1.0),
        ([[[3]]], "def add(a, b): return a + b", 0.0),
        ([[]], "def add(a, b): return []", 1.0),
        ([[]], "def add(a, b): return 0", 0.0),
    ],
)
def test_apps_wraps_what_a_function_returns_or_not(pool, outputs, program, value):
    tests = {"inputs": [[1, 2]], "outputs": outputs, "fn_name": "add"}
    assert scored(pool, program, tests)[0] == value
    assert scored(pool, "class Solution:\n    " + program.replace("(a", "(self, a"), tests)[0] == value


def test_apps_has_texts_as_lists_of_lines(pool):
    tests = {"inputs": [["1", "2"]], "outputs": [["3", "done"]]}
    assert scored(pool, "print(int(input()) + int(input()))\nprint('done')", tests)[0] == 1.0


METHODS = "class Solution:\n    def two(self, x): return 2 * x\n    def three(self, x): return 3 * x"


@pytest.mark.parametrize(
    ("test", "entry_point"),
    [
        ("def check(candidate):\n    assert candidate(x=2) == 4", "Solution().two"),
        ("from typing import *\nassert Solution().two(2) == 4\nassert Solution().three(1) == 3", None),
        ("s = Solution()\nassert s.two(s.three(1)) == 6", ""),
        ("assert Solution().three(1) == 3", "Solution().two"),
        ({"function": "Solution().two", "arguments": [2], "output": 4}, None),
    ],
)
def test_a_test_may_call_methods_of_solution(pool, test, entry_point):
    assert scored(pool, METHODS, [test], entry_point=entry_point) == (1.0, {})
    assert scored(pool, METHODS.replace(" * ", " - "), [test], entry_point=entry_point) == (0.0, {"wrong": 1.0})
    assert scored(pool, "x = 1", [test], entry_point=entry_point) == (0.0, {"exception": 1.0})


@pytest.mark.parametrize("entry_point", ["two words", "Solution.two", "A().two", 5, "f("])
def test_an_entry_point_that_is_none_is_told(entry_point):
    with pytest.raises(ValueError, match=re.escape(f"a function's name or Solution().name, not {entry_point!r}")):
        read_tests(["assert candidate(1)"], entry_point)


def test_tests_that_never_end_are_no_verdict(pool):
    test = "while True: add(1, 2)"
    with pytest.raises(UnscoredError, match="more than 3 times"):
        scored(pool, "def add(a, b): return 3", [test], max_calls=3)
    with pytest.raises(UnscoredError, match="timeout: the test itself"):
        scored(pool, "def add(a, b): return 3", ["add(1, 2)\nwhile True: pass"], timeout_seconds=1.0)


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("import pandas_not_here\nassert add(1, 2) == 3", "ModuleNotFoundError: No module named 'pandas_not_here'"),
        ("expected = {}\nassert expected['x'] == add(1, 2)", "KeyError: 'x'"),
        ("assert not_there.x\nadd(1, 2)", "NameError: name 'not_there' is not defined"),
        ("assert False\nadd(1, 2)", "AssertionError: "),
        ("if __name__ == '__main__': assert add(1, 2) == 3", "it ended without a call of the program"),
        ("def check(candidate): pass", "it ended without a call of the program"),
    ],
)
@pytest.mark.parametrize("program", ["def add(a, b): return a + b", "def add(a, b): return 0"])
def test_a_test_that_is_itself_broken_is_no_verdict(pool, test, message, program):
    with pytest.raises(UnscoredError, match=f"exception: the test itself: {re.escape(message)}"):
        scored(pool, program, [test], entry_point="add")


def test_nor_is_one_that_lacks_a_module_after_right_answers(pool):
    test = "assert add(1, 2) == 3\nimport pandas_not_here"
    with pytest.raises(UnscoredError, match="the test itself: ModuleNotFoundError"):
        scored(pool, "def add(a, b): return a + b", [test])
    assert scored(pool, "def add(a, b): return 0", [test]) == (0.0, {"wrong": 1.0})


def test_a_program_that_lacks_a_module_is_at_fault_itself(pool):
    program = "import pandas_not_here\ndef add(a, b): return a + b"
    assert scored(pool, program, ["assert add(1, 2) == 3"]) == (0.0, {"exception": 1.0})
    assert scored(pool, "def add(a, b): return 0", ["assert add(1, 2) == 3"]) == (0.0, {"wrong": 1.0})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"credit": "some"}, "credit is 'some'; allowed: all, fraction"),
        ({"compare": "fuzzy"}, "compare is 'fuzzy'; allowed: lines, tokens, exact"),
        ({"require": ["magic"]}, "require is 'magic'; allowed: limits"),
        ({"max_output_bytes": 0}, "max_output_bytes=0 must be between 1 and 131072"),
        ({"max_tests": 0}, "max_tests=0 must be 1 or more"),
        ({"max_calls": 0}, "max_calls=0 must be 1 or more"),
    ],
)
def test_wrong_arguments_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Code(CodeConfig(**wrong), None)


def test_the_last_closed_fence_is_the_program():
    assert last_program("```python\na\n```\ntext\n```py\nb\n```") == "b\n"
    assert last_program("```python\na\n```\n```python\nb") == "a\n"
    assert last_program("```\na = '''x'''\n```") == "a = '''x'''\n"
    assert last_program("no fence ``` here") is None


def test_comparisons():
    assert is_printed("1 \n2\n\n", "1\n2", "lines")
    assert not is_printed("1\n2", "1 2", "lines")
    assert is_printed("1\n2", "1  2", "tokens")
    assert not is_printed("1\n", "1", "exact")
    assert is_returned([1, 2.0], (1, 2))
    assert not is_returned(True, 1)
    assert not is_returned(1, True)
    assert not is_returned([1], [1, 2])
    assert not is_returned(None, 0)
    assert is_returned({"1": "x"}, {1: "x"})


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.sets(st.integers())
        | st.frozensets(st.text())
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_values_come_back_with_their_types(value):
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value
    assert type(back) is type(value)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_whatever_a_program_writes_never_ends_the_reader(value):
    with contextlib.suppress(TypeError, ValueError):
        decode(value)
