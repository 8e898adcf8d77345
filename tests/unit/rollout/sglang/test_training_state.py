"""Random schedules of whole training steps over servers: the buffer that runs ahead, the dispatcher, and real weight
transactions together, with faults, crashes (also amid an update) and resumed runs between.

Every prompt is trained on once or counted as dropped; every token is that of the version which its span names, and none
is older than the bound; what is under way is bounded.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fake_servers import LAYOUT, prompt_of, should_sample
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scheduled_rollouts import Draws

from moerl.array_state import join_arrays, split_arrays
from moerl.checksums import checksum
from moerl.metrics import to_floats
from moerl.rollout.ahead import AheadBuffer, AheadRooms
from moerl.rollout.engine import ServedModel
from moerl.rollout.engines.sglang_engine import SglangEngine, SglangEngineConfig
from moerl.rollout.fake_engine.serving import FakeServer
from moerl.rollout.fake_engine.settings import FakeEngineConfig
from moerl.rollout.loop_thread import LoopThread
from moerl.rollout.plan import PlanSettings
from moerl.types import Completion, Prompt, SamplingParams, Trajectory, WeightBucket
from moerl.weight_sync.servers import SenderPlace
from moerl.weight_sync.transports.disk import DiskConfig, DiskSender
from moerl.weight_sync.transports.tensor import TensorConfig, TensorSender

NUM_SERVERS, SHARE = 2, 4
CFG = FakeEngineConfig(token_seconds=0.002)
RETRIED = st.sampled_from(["drop", "drop_after", "truncate", "status", "hang"])
TEXT = prompt_of(5)
PATIENCE_SECONDS = 60.0
AWAY_SECONDS = 0.05
"""At most, of a server that crashed."""
SENDERS = {
    "disk": lambda place: DiskSender(DiskConfig(check_every=0), place),
    "tensor": lambda place: TensorSender(TensorConfig(check_every=0, keep_copy=True), place),
}


def label_of(version: int) -> str:
    return str(version) if version else "default"


def seed_of(prompt_id: str, place: int) -> int:
    """Of an answer: the prompt's number and its place in the group."""
    return 10 * int(prompt_id.removeprefix("p/")) + place


def trajectory_of(got: Completion) -> Trajectory:
    start = len(TEXT)
    length = start + len(got.token_ids)
    return Trajectory(
        token_ids=np.concatenate([TEXT, got.token_ids]).astype(np.int32),
        loss_mask=np.arange(length) >= start,
        rollout_logprobs=np.concatenate([np.zeros(start), got.logprobs]).astype(np.float32),
        temperature=1.0,
        finish_reason=got.finish_reason,
        version_spans=tuple((start + a, start + b, version) for a, b, version in got.version_spans),
        status="ok",
        error="",
        reward=1.0,
    )


class Side:
    """What one process of a run has: its engine, its thread, its buffer."""

    def __init__(self, folder: Path, servers: list[FakeServer], transport: str, version: int) -> None:
        self.thread = LoopThread()
        cfg = SglangEngineConfig(
            urls=[server.url for server in servers],
            requests_per_server=SHARE,
            request_timeout_seconds=0.5,
            retry_wait_seconds=0.01,
            num_retries=30,
            health_seconds=0.2,
            affinity_slack=0,
        )
        model = ServedModel(folder, folder, 320, LAYOUT, wants_routes=False)
        sender = SENDERS[transport](SenderPlace(folder / "engine_weights", folder))
        self.engine = SglangEngine(cfg, served_model=model, policy_version=version, sender=sender)
        self.source = Draws()

    def make_buffer(self, plan: PlanSettings, group_size: int, budget: int) -> None:
        self.group_size = group_size
        rooms = AheadRooms(self.thread, self.source, self.source.find, self.play, SamplingParams(budget))
        self.buffer = AheadBuffer(rooms, plan, group_size=group_size, max_error_fraction=0.0)

    async def play(
        self, prompt: Prompt, index: int, *, step: int, params: SamplingParams, number: int | None = None
    ) -> Trajectory:
        assert number is not None
        place = number % self.group_size
        asked = SamplingParams(params.max_new_tokens, seed=seed_of(prompt.prompt_id, place))
        got = await self.engine.generate(TEXT, asked, f"{prompt.prompt_id}/{number}#0")
        assert len(got.token_ids) == params.max_new_tokens
        return trajectory_of(got)

    async def publish(self, version: int) -> None:
        named = [(f"w{i}", torch.full((4,), float(version * 10 + i))) for i in range(2)]
        await self.engine.pause()
        try:
            for i, one in enumerate(named):
                await self.engine.update_weights(WeightBucket(version, [one], i == 1, checksum([one])))
        finally:
            await self.engine.resume()

    def close(self) -> None:
        self.thread.close()
        self.engine.close()


class Training(RuleBasedStateMachine):
    """A run of the loop's calls, one after the other, against two servers."""

    @initialize(
        transport=st.sampled_from(list(SENDERS)),
        size=st.integers(1, 2),
        more=st.integers(0, 1),
        staleness=st.integers(1, 2),
        group_size=st.integers(1, 3),
        budget=st.integers(1, 25),
        long_tail=st.sampled_from(["wait", "resume", "drop"]),
    )
    def begin(
        self, transport: str, size: int, more: int, staleness: int, group_size: int, budget: int, long_tail: Any
    ) -> None:
        self.folder = tempfile.TemporaryDirectory()
        (Path(self.folder.name) / "config.json").write_text("{}")
        self.plan = PlanSettings(size, size + more, staleness, 0, long_tail)
        self.transport, self.group_size, self.budget = transport, group_size, budget
        self.step = self.version = 0
        self.trained: list[str] = []
        self.num_dropped = 0
        self.servers = [FakeServer(CFG) for _ in range(NUM_SERVERS)]
        for server in self.servers:
            server.start()
        self.waiter = ThreadPoolExecutor(1)
        self.side = self.made()
        self.side.buffer.published(0)

    def made(self) -> Side:
        side = Side(Path(self.folder.name), self.servers, self.transport, self.version)
        side.make_buffer(self.plan, self.group_size, self.budget)
        self.soon(side.thread.run, side.engine._start())  # a server that is away then is an error
        return side

    def soon(self, call: Any, *args: Any) -> Any:
        """Its result; a wait without an end is a failure."""
        return self.waiter.submit(call, *args).result(PATIENCE_SECONDS)

    @rule()
    def train(self) -> None:
        self.step += 1
        groups, metrics = self.soon(self.side.buffer.take, self.step, self.version)
        for group in groups:
            assert len(group.trajectories) == self.group_size
            for place, trajectory in enumerate(group.trajectories):
                self.check(trajectory, seed_of(group.prompt.prompt_id, place))
        self.trained += [group.prompt.prompt_id for group in groups]
        self.num_dropped += int(to_floats(metrics)["rollout/groups_dropped"])
        self.version += 1
        self.soon(self.side.thread.run, self.side.publish(self.version))
        self.side.buffer.published(self.version)

    def check(self, one: Trajectory, seed: int) -> None:
        """Every sampled token, and its logprob, is that of the version which its span names."""
        start = len(TEXT)
        spans = one.version_spans
        assert (spans[0][0], spans[-1][1]) == (start, len(one.token_ids))
        assert all(end == begin for (_, end, _), (begin, _, _) in itertools.pairwise(spans))
        assert all(self.version - self.plan.max_staleness <= version <= self.version for *_, version in spans)
        for begin, end, version in spans:
            ids, logprobs, _ = should_sample(TEXT, self.budget, seed=seed, label=label_of(version), cfg=CFG)
            rows = slice(begin - start, end - start)
            np.testing.assert_array_equal(one.token_ids[begin:end], ids[rows])
            np.testing.assert_allclose(one.rollout_logprobs[begin:end], logprobs[rows], rtol=1e-6)

    @rule(server=st.integers(0, NUM_SERVERS - 1), kind=RETRIED, times=st.integers(1, 3))
    def fail(self, server: int, kind: str, times: int) -> None:
        self.servers[server].set_faults({"kind": kind, "times": times, "status": 503})

    @rule(server=st.integers(0, NUM_SERVERS - 1), seconds=st.sampled_from([0.0, AWAY_SECONDS]))
    def crash(self, server: int, seconds: float) -> None:
        self.servers[server].restart(seconds)

    @rule(server=st.integers(0, NUM_SERVERS - 1), after=st.integers(0, 1))
    def crash_in_the_next_update(self, server: int, after: int) -> None:
        endpoint = f"/update_weights_from_{self.transport}"
        self.servers[server].set_faults(
            {"kind": "restart", "endpoint": endpoint, "after": after, "seconds": AWAY_SECONDS}
        )

    @rule(seconds=st.sampled_from([0.005, 0.03]))
    def let_run(self, seconds: float) -> None:
        self.soon(self.side.thread.run, asyncio.sleep(seconds))

    @rule()
    def resume(self) -> None:
        """As a run that was stopped and goes on from its checkpoint: all is built anew, but the servers run on."""
        text, arrays = split_arrays(self.side.buffer.state_dict())
        self.side.close()
        self.end_faults()
        self.side = self.made()
        self.side.buffer.load_state_dict(join_arrays(text, arrays))
        if self.version:
            self.soon(self.side.thread.run, self.side.publish(self.version))
        self.side.buffer.published(self.version)

    def end_faults(self) -> None:
        for server in self.servers:
            server.set_faults()
        time.sleep(2 * AWAY_SECONDS)  # a new engine looks at every server first

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "side"):
            return
        state = self.side.buffer.state_dict()
        under_way = [ticket["prompt_id"] for ticket in state["plan"]["tickets"]]
        assert len(under_way) <= (self.plan.max_staleness + 1) * self.plan.started_per_step
        assert len({*self.trained, *under_way}) == len(self.trained) + len(under_way), "a prompt is there twice"
        counted = len(self.trained) + len(under_way) + self.num_dropped + len(state["dropped"])
        assert state["source"]["cursor"] == counted, "a prompt is lost"
        dispatcher = self.side.engine._dispatcher
        if dispatcher is not None:
            assert dispatcher.pool.num_running <= NUM_SERVERS * SHARE
            assert dispatcher.num_in_flight <= len(under_way) * self.group_size

    def teardown(self) -> None:
        if not hasattr(self, "side"):
            return
        try:
            self.end_faults()
            for _ in range(2):  # whatever happened, the run goes on
                self.train()
            self.books_balance()
            labels = {server.state()["label"] for server in self.servers}
            assert label_of(self.version) in labels
        finally:
            self.side.close()
            for server in self.servers:
                server.stop()
            self.waiter.shutdown(wait=False)
            self.folder.cleanup()


Training.TestCase.settings = settings(
    max_examples=12,
    stateful_step_count=14,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a failure may be a wait of a minute: not to be made shorter
)
TestTraining = Training.TestCase
