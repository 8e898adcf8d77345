"""Passes the tests of the prompt: the program in a model's text, run in the sandbox, judged outside of it.

Each test runs the program in a process of its own that knows no expectation, so there is no verdict that it could
print. A program that fails, hangs, prints too much or ends its process fails that test; that is its own fault and a
number. A verifier that cannot run is not, nor a test that is itself broken, nor what fails before the program begins or
because a worker is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moerl.errors import ConfigError
from moerl.metrics import Mean, Metrics, Sum
from moerl.rewards import rewards
from moerl.rewards.base import RewardConfig, UnscoredError, check_choice
from moerl.rewards.code_tests import (
    COMPARISONS,
    CallTest,
    PrintTest,
    Test,
    is_printed,
    is_right,
    last_program,
    read_tests,
)
from moerl.rewards.judges.program import MAX_INPUT_BYTES
from moerl.rewards.judges.values import decode, encode
from moerl.rewards.pool import SandboxPool
from moerl.rewards.worker import PROBE

if TYPE_CHECKING:
    from moerl.types import Prompt

CREDITS = ("all", "fraction")
FAILURES = ("wrong", "exception", "timeout", "crash", "memory", "output")
LAYERS = ("limits", "audit", "seccomp", "landlock", "namespaces")
_PROGRAM, _TEST = "moerl.rewards.judges.program", "moerl.rewards.judges.assertions:check"


@dataclass
class CodeConfig(RewardConfig):
    """Which tests, and how they count."""

    tests: str = "tests"
    """Column of the prompt file that has them (`docs/environments.md` says in which forms)."""
    entry_point: str = "entry_point"
    """Column that names the function which test code calls, where there is one."""
    credit: str = "all"
    """`all`: 1 where every test passes, and the first that fails ends it; `fraction`: the share that passes."""
    compare: str = "lines"
    """Of printed output: `lines`, `tokens` or `exact`."""
    max_tests: int | None = None
    """Run only the first so many."""
    timeout_seconds: float | None = None
    """Of the program in one test; null: `reward.timeout_seconds`."""
    max_output_bytes: int = 65_536
    """Of what the program prints in one test."""
    max_calls: int = 32
    """Calls of the program in one test of code."""
    require: list[str] = field(default_factory=lambda: ["limits", "audit", "seccomp", "landlock"])
    """Layers of the sandbox without which the run does not start."""


@rewards.register("code", CodeConfig)
class Code:
    """The last block of code between fences, in Python."""

    def __init__(self, config: CodeConfig, pool: SandboxPool) -> None:
        """Raises `ConfigError` for a word or a number that is not allowed."""
        check_choice(config.credit, CREDITS, where="reward code: credit")
        check_choice(config.compare, COMPARISONS, where="reward code: compare")
        for layer in config.require:
            check_choice(layer, LAYERS, where="reward code: require")
        if not 1 <= config.max_output_bytes <= MAX_INPUT_BYTES // 8:
            raise ConfigError(
                f"reward code: max_output_bytes={config.max_output_bytes} must be between 1 and {MAX_INPUT_BYTES // 8}"
            )
        for name, value in (("max_tests", config.max_tests), ("max_calls", config.max_calls)):
            if value is not None and value < 1:
                raise ConfigError(f"reward code: {name}={value} must be 1 or more")
        self._config = config
        self._pool = pool
        self._failures: Counter[str] = Counter()
        self._fractions: list[float] = []

    async def score(self, prompt: Prompt, text: str) -> float:
        """0 also where the text has no program. `UnscoredError` where the tests cannot be read or run."""
        try:
            tests = self._tests(prompt)
        except ValueError as error:
            raise UnscoredError("exception", str(error)) from error
        program = last_program(text)
        if program is None:
            self._failures["no_program"] += 1
            return 0.0
        passed = 0
        for test in tests:
            failure = await self._failure(program, test)
            if failure:
                self._failures[failure] += 1
                if self._config.credit == "all":
                    break
            passed += not failure
        fraction = passed / len(tests)
        self._fractions.append(fraction)
        return fraction if self._config.credit == "fraction" else float(passed == len(tests))

    def check(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """Whether the tests can be read. Raises `ConfigError` where this machine lacks a wall that is required."""
        verdict = self._pool.submit(PROBE, {}).result()
        missing = [layer for layer in self._config.require if layer not in (verdict.value or ())]
        if missing:
            raise ConfigError(
                f"reward code: the sandbox of this machine lacks {', '.join(missing)}, and programs that a model wrote "
                "are to run in it. Use a Linux kernel with seccomp and landlock (5.13 or newer), or take the risk by "
                "name: leave it out of the reward's `require`"
            )
        return [self._problem(prompt) for prompt in prompts]

    def take_metrics(self) -> Metrics:
        """Since the last call: `tests_passed` (mean share of an answer), and failed tests by kind."""
        failures, fractions = self._failures, self._fractions
        self._failures, self._fractions = Counter(), []
        metrics: Metrics = {f"failed_{kind}": Sum(float(failures[kind])) for kind in (*FAILURES, "no_program")}
        if fractions:
            metrics["tests_passed"] = Mean(sum(fractions), len(fractions))
        return metrics

    def apart(self) -> Code:
        """With counts of its own."""
        return Code(self._config, self._pool)

    def _problem(self, prompt: Prompt) -> str | None:
        try:
            self._tests(prompt)
        except ValueError as error:
            return str(error)
        return None

    def _tests(self, prompt: Prompt) -> list[Test]:
        config = self._config
        if config.tests not in prompt.metadata:
            raise ValueError(f"has no column {config.tests!r} with tests; name it in the reward's `tests`")
        tests = read_tests(prompt.metadata[config.tests], prompt.metadata.get(config.entry_point))
        return tests if config.max_tests is None else tests[: config.max_tests]

    async def _failure(self, program: str, test: Test) -> str:
        """How it failed, a word of `FAILURES`, or nothing."""
        if isinstance(test, PrintTest):
            outcome = await self._run("run_script", program=program, stdin=test.stdin)
            if "failed" in outcome:
                return outcome["failed"]
            return "" if is_printed(test.expected, outcome["stdout"], self._config.compare) else "wrong"
        if isinstance(test, CallTest):
            call = [test.function, [encode(one) for one in test.arguments], []]
            outcome = await self._called(program, call)
            if "failed" in outcome:
                return outcome["failed"]
            return "" if is_right(test, decode(outcome["value"])) else "wrong"
        recorded: list[Mapping[str, Any]] = []
        while len(recorded) <= self._config.max_calls:
            kwargs = {"source": test.source, "functions": dict(test.functions), "recorded": recorded}
            verdict = await self._pool.run(_TEST, kwargs, timeout_seconds=self._config.timeout_seconds)
            if verdict.error:
                raise UnscoredError(verdict.error, f"the test itself: {verdict.text}")
            if "passed" in verdict.value:
                return _judged(verdict.value, recorded)
            recorded.append(await self._called(program, verdict.value["call"]))
        raise UnscoredError("exception", f"the test calls the program more than {self._config.max_calls} times")

    async def _called(self, program: str, call: Sequence[Any]) -> Mapping[str, Any]:
        function, arguments, keywords = call
        return await self._run(
            "call_function", program=program, function=function, arguments=arguments, keywords=keywords
        )

    async def _run(self, entry: str, **kwargs: Any) -> Mapping[str, Any]:
        """An outcome of the form that `judges/program.py` promises, whatever the program wrote in its place. Raises
        `UnscoredError` where it is not the program that failed.
        """
        kwargs["max_output_bytes"] = self._config.max_output_bytes
        verdict = await self._pool.run(f"{_PROGRAM}:{entry}", kwargs, timeout_seconds=self._config.timeout_seconds)
        if verdict.error and not verdict.in_program:
            raise UnscoredError(verdict.error, f"the sandbox itself: {verdict.text}")
        if verdict.error:
            return {"failed": verdict.error, "text": verdict.text}
        outcome, wanted = verdict.value, "stdout" if entry == "run_script" else "value"
        if not isinstance(outcome, dict):
            return {"failed": "crash", "text": "the process wrote no outcome"}
        if "failed" in outcome:
            kind = outcome["failed"]
            text = str(outcome.get("text", ""))
            return {"failed": kind if kind in FAILURES else "crash", "text": text}
        if not _is_sound(outcome.get(wanted), wanted):
            return {"failed": "crash", "text": "the process wrote no outcome"}
        return {wanted: outcome[wanted]}


def _judged(said: Mapping[str, Any], recorded: Sequence[Mapping[str, Any]]) -> str:
    """How the program failed a test of code that has ended, or nothing.

    Raises:
        UnscoredError: the test itself is broken. It never came to a call of the program, or lacks a module although
            every call was answered.
    """
    if not recorded:
        why = "it ended without a call of the program" if said["passed"] else said["text"]
        raise UnscoredError("exception", f"the test itself: {why}")
    failed = next((one["failed"] for one in recorded if "failed" in one), "")
    if said["lacks_module"] and not failed:
        raise UnscoredError("exception", f"the test itself: {said['text']}")
    return "" if said["passed"] else failed or "wrong"


def _is_sound(value: Any, wanted: str) -> bool:
    if wanted == "stdout":
        return isinstance(value, str)
    try:
        decode(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
