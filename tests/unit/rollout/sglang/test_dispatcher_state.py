"""Random schedules of requests, faults, pauses, updates and crashes: every request is answered exactly once, and says
which version sampled each of its tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
from fake_servers import EXPECTED, dispatching, prompt_of, should_sample, until
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moerl.errors import RolloutError
from moerl.rollout.fake_engine.serving import FakeServer
from moerl.rollout.fake_engine.settings import FakeEngineConfig
from moerl.rollout.sglang.wire import Expected
from moerl.types import Completion, SamplingParams

NUM_SERVERS, SHARE = 2, 4
CFG = FakeEngineConfig(token_seconds=0.002, weight_version="0")
RETRIED = st.sampled_from(["drop", "drop_after", "truncate", "status", "hang"])
PROMPT = prompt_of(5)


class Schedules(RuleBasedStateMachine):
    """One dispatcher over two servers; its event loop turns only inside rules."""

    @initialize()
    def start(self) -> None:
        self.servers = [FakeServer(CFG) for _ in range(NUM_SERVERS)]
        for server in self.servers:
            server.start()
        self.runner = asyncio.Runner()
        self.stack = contextlib.AsyncExitStack()
        self.version = 0
        self.asked = 0
        self.is_paused = False
        self.tasks: dict[int, tuple[asyncio.Task[Completion], int]] = {}
        self.answered = 0

        async def open_all() -> Any:
            return await self.stack.enter_async_context(
                dispatching(
                    self.servers,
                    watch=True,
                    replay=self.replay,
                    expected=Expected(EXPECTED.layout, 320),
                    requests_per_server=SHARE,
                    request_timeout_seconds=0.5,
                    num_retries=30,
                )
            )

        self.dispatcher = self.runner.run(open_all())

    async def replay(self, client: Any) -> bool:
        self.relabel(self.servers[client.index])
        return True

    def relabel(self, server: FakeServer) -> None:
        version = self.version
        server.call(lambda app: app.state.note_update(b"", str(version)))

    @rule(budget=st.integers(1, 25), count=st.integers(1, 4))
    def ask(self, budget: int, count: int) -> None:
        async def send() -> None:
            for _ in range(count):
                self.asked += 1
                call = self.dispatcher.generate(
                    PROMPT, SamplingParams(budget, seed=self.asked), f"p/{self.asked // 3}#0"
                )
                self.tasks[self.asked] = (asyncio.create_task(call), budget)
            await asyncio.sleep(0.01)

        self.runner.run(send())

    @rule(server=st.integers(0, NUM_SERVERS - 1), kind=RETRIED, times=st.integers(1, 3))
    def fail(self, server: int, kind: str, times: int) -> None:
        self.servers[server].set_faults({"kind": kind, "times": times, "status": 503})

    @rule(server=st.integers(0, NUM_SERVERS - 1), seconds=st.sampled_from([0.0, 0.05]))
    def crash(self, server: int, seconds: float) -> None:
        self.servers[server].restart(seconds)
        self.runner.run(asyncio.sleep(0.02))

    @rule(mode=st.sampled_from(["abort", "retract", "in_place"]))
    def update(self, mode: str) -> None:
        """Pause, publish to those that are fit, resume; the watch replays to the others when they come back."""

        async def publish() -> None:
            try:
                await self.dispatcher.pause(mode)
            except RolloutError:  # no server is fit just now: nothing is published
                return self.dispatcher.pool.open("paused")
            self.version += 1
            for member in self.dispatcher.pool.fit:
                self.relabel(self.servers[member.client.index])
            self.dispatcher.policy_version = self.version
            with contextlib.suppress(RolloutError):
                await self.dispatcher.resume()

        self.runner.run(publish())

    @precondition(lambda self: self.tasks)
    @rule()
    def let_run(self) -> None:
        self.runner.run(asyncio.sleep(0.03))
        self.collect(only_done=True)

    @invariant()
    def memory_is_bounded(self) -> None:
        if not hasattr(self, "dispatcher"):
            return
        pool = self.dispatcher.pool
        assert pool.num_running <= NUM_SERVERS * SHARE
        open_tasks = sum(not task.done() for task, _ in self.tasks.values())
        assert self.dispatcher.num_in_flight <= open_tasks
        assert pool.num_waiting <= open_tasks

    def collect(self, *, only_done: bool) -> None:
        for seed in list(self.tasks):
            task, budget = self.tasks[seed]
            if task.done() or not only_done:
                del self.tasks[seed]
                self.check(task.result(), seed, budget)
                self.answered += 1

    def check(self, got: Completion, seed: int, budget: int) -> None:
        """Every token, logprob and (true) row is that of the version which its span names."""
        assert got.finish_reason == "length"
        assert len(got.token_ids) == len(got.logprobs) == budget
        assert got.version_spans[0][0] == 0
        assert got.version_spans[-1][1] == budget
        assert got.policy_version == got.version_spans[-1][2] <= self.version
        assert got.routed_experts is not None
        rows = got.routed_experts.open()
        assert len(rows) == len(PROMPT) + budget - 1
        for start, end, version in got.version_spans:
            ids, logprobs, _ = should_sample(PROMPT, budget, seed=seed, label=str(version), cfg=CFG)
            np.testing.assert_array_equal(got.token_ids[start:end], ids[start:end])
            np.testing.assert_allclose(got.logprobs[start:end], logprobs[start:end], rtol=1e-6)

    def teardown(self) -> None:
        if not hasattr(self, "dispatcher"):
            return
        for server in self.servers:
            server.set_faults()

        async def finish() -> None:
            await until(lambda: all(task.done() for task, _ in self.tasks.values()), seconds=60.0)

        try:
            self.runner.run(finish())
            self.collect(only_done=False)
            assert self.answered == self.asked == self.dispatcher.counts.completions
            assert self.dispatcher.num_in_flight == self.dispatcher.pool.num_running == 0
        finally:
            self.runner.run(self.stack.aclose())
            self.runner.close()
            for server in self.servers:
                server.stop()


Schedules.TestCase.settings = settings(
    max_examples=8, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSchedules = Schedules.TestCase
