"""Tasksets of the PyPI package verifiers: prompts, rewards, metrics, and what is refused."""

from __future__ import annotations

import asyncio
import sys
import textwrap

import numpy as np
import pytest

from moerl.data.sources import prompt_sources
from moerl.errors import ConfigError, DataError
from moerl.metrics import to_floats
from moerl.rewards.base import UnscoredError
from moerl.rewards.verifiers import Verifiers, VerifiersRewardConfig
from moerl.types import Prompt

pytest.importorskip("verifiers.v1", reason="verifiers is not installed: pip install 'moerl[verifiers]'")

TASKSET = """
    import asyncio
    import verifiers.v1 as vf

    class Data(vf.TaskData):
        answer: str

    class SumTask(vf.Task[Data]):
        {extra}
        @vf.reward(weight=2.0)
        async def right(self, trace: vf.Trace) -> float:
            if "crash" in trace.last_reply:
                raise KeyError("mine")
            if "late" in trace.last_reply:
                await asyncio.sleep(30)
            if "nan" in trace.last_reply:
                return float("nan")
            return float(trace.last_reply == self.data.answer)

        @vf.reward
        async def short(self, task, trace) -> float:
            assert trace.assistant_messages[-1].content and task.answer
            return 1.0 if len(trace.last_reply) < 4 else 0.25

        @vf.metric
        async def length(self, trace) -> float:
            return float(len(trace.last_reply))

    class Config(vf.TasksetConfig):
        count: int = 3
        system: str | None = None

    class Sums(vf.Taskset[SumTask, Config]):
        {kind}
        def load(self):
            for i in range(self.config.count):
                system = self.config.system
                yield SumTask(Data(prompt={prompt}, system_prompt=system, answer=str(2 * i)), self.config.task)

    __all__ = ["Sums"]
"""


@pytest.fixture
def taskset(tmp_path, monkeypatch):
    """Writes a taskset and gives its rows."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def rows(name, *, extra="pass", kind="pass", prompt='f"{i}+{i}=?"', **config):
        source = textwrap.dedent(TASKSET).replace("{extra}", extra).replace("{kind}", kind).replace("{prompt}", prompt)
        (tmp_path / f"{name}.py").write_text(source)
        plugin, options = prompt_sources.resolve({"name": "verifiers", "taskset": name, **config})
        try:
            return plugin.target(options)
        finally:
            sys.modules.pop(name, None)

    return rows


def score(row, text, reward=None, **config):
    reward = reward or Verifiers(VerifiersRewardConfig(in_process=True, **config), None)
    prompt = Prompt("v/0", np.array([1], np.int32), row.answer, "v", metadata=row.metadata)
    return asyncio.run(reward.score(prompt, text))


def test_tasks_become_rows_and_their_rewards_are_weighed_by_the_task(taskset):
    rows = taskset("sums_plain")
    assert [(row.prompt, row.answer, row.source) for row in rows] == [
        (f"{i}+{i}=?", str(2 * i), f"verifiers:sums_plain#{i}") for i in range(3)
    ]
    reward = Verifiers(VerifiersRewardConfig(in_process=True), None)
    assert [score(rows[2], text, reward) for text in ("4", "5", "long answer")] == [3.0, 1.0, 0.25]
    found = to_floats(reward.take_metrics())
    assert found == pytest.approx({"right": 1 / 3, "short": 0.75, "length": 13 / 3})
    assert reward.take_metrics() == {}


def test_arguments_size_system_prompt_and_messages(taskset):
    rows = taskset("sums_system", arguments={"count": 9, "system": "Be brief."}, size=4)
    assert len(rows) == 4
    assert rows[1].prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1=?"}]
    assert score(rows[1], "2") == 3.0
    said = 'vf.UserMessage(content="hm"), vf.AssistantMessage(content="?"), vf.UserMessage(content="0")'
    rows = taskset("sums_messages", prompt=f"[{said}]")
    assert [one["role"] for one in rows[0].prompt] == ["user", "assistant", "user"]
    assert score(rows[0], "0") == 3.0


@pytest.mark.parametrize(
    ("text", "message"),
    [("crash", "exception: TaskError"), ("late", "timeout: no verdict within 0.2 s"), ("nan", "no number for the sum")],
)
def test_a_failure_is_no_verdict(taskset, text, message):
    with pytest.raises(UnscoredError, match=message):
        score(taskset(f"sums_{text}")[0], text, timeout_seconds=0.2)


def test_a_timeout_of_the_tasks_own_is_not_ours(taskset):
    """verifiers itself makes a TaskError of what a task's functions raise, but a task may score in its own way."""
    extra = "async def score(self, trace, runtime=None): raise TimeoutError('the judge is not there')"
    with pytest.raises(UnscoredError, match="exception: TimeoutError: the judge is not there"):
        score(taskset("sums_unheard", extra=extra)[0], "1")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "setup",
            {"extra": "async def setup(self, trace, runtime): pass"},
            "the task has a setup, which moerl",
        ),
        ("finalize", {"extra": "async def finalize(self, trace, runtime): pass"}, "the task has a finalize"),
        ("container", {"extra": "NEEDS_CONTAINER = True"}, "the task has a container"),
        ("runtime", {"extra": "@vf.reward\n    async def ran(self, runtime): return 1.0\n"}, "ran with a runtime"),
        ("endless", {"kind": "INFINITE = True"}, "never ends; set size"),
        ("wrong", {"arguments": {"cuont": 3}}, "'sums_wrong' cannot be loaded"),
        ("small", {"size": 0}, "size must be at least 1, is 0"),
    ],
)
def test_what_is_not_covered_is_refused(taskset, name, changes, message):
    with pytest.raises(ConfigError, match=message):
        taskset(f"sums_{name}", **changes)


def test_what_cannot_be_asked_is_refused(taskset):
    with pytest.raises(DataError, match="does not end with a message of the user"):
        taskset("sums_silent", prompt="None")
    plugin, options = prompt_sources.resolve({"name": "verifiers", "taskset": "no_such_taskset"})
    with pytest.raises(ConfigError, match="'no_such_taskset' cannot be loaded"):
        plugin.target(options)


def test_other_prompts_are_refused():
    bare = Prompt("d/0", np.array([1], np.int32), "1", "d")
    reward = Verifiers(VerifiersRewardConfig(in_process=True), None)
    assert reward.check([bare]) == ["is of no taskset; the reward verifiers is for prompts of the source verifiers"]
    with pytest.raises(ConfigError, match=r"timeout_seconds=0\.0 must be above 0"):
        Verifiers(VerifiersRewardConfig(in_process=True, timeout_seconds=0.0), None)


def test_it_runs_only_where_that_was_agreed_to():
    with pytest.raises(ConfigError, match=r"not in the sandbox.*in_process: true"):
        Verifiers(VerifiersRewardConfig(), None)
