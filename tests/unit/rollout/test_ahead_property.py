"""Random schedules of completions, failures, updates, skipped steps and restarts, against a buffer that runs ahead.

Every prompt is trained on once or counted as dropped, never both; what a checkpoint holds is neither lost nor asked
again; no token is older than the bound, and its span names the version that sampled it; what is under way is bounded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduled_rollouts import Bench, Request, Take, refuse_mixtures, trajectory_of

from moerl.array_state import join_arrays, split_arrays
from moerl.metrics import to_floats
from moerl.rollout.plan import PlanSettings
from moerl.types import RolloutGroup


def drop_some(group: RolloutGroup) -> str | None:
    return "unwanted" if int(group.prompt.prompt_id.partition("/")[2]) % 5 == 3 else None


class Training(RuleBasedStateMachine):
    @initialize(
        size=st.integers(1, 3),
        kind=st.sampled_from(["plain", "plain", "plain", "filtered", "failing", "over-sampled", "everything"]),
        staleness=st.integers(1, 3),
        refills=st.integers(0, 1),
        group_size=st.integers(1, 2),
        long_tail=st.sampled_from(["wait", "resume", "drop"]),
        last_step=st.sampled_from([None, None, 1, 2, 3, 5]),
    )
    def begin(self, size, kind, staleness, refills, group_size, long_tail, last_step):
        more = 2 if kind in ("over-sampled", "everything") else 0
        is_filtered, self.fails = kind in ("filtered", "everything"), kind in ("failing", "everything")
        self.is_plain = kind == "plain"
        self.settings = PlanSettings(size, size + more, staleness, refills, long_tail, last_step)
        self.group_size, self.filter = group_size, drop_some if is_filtered else None
        self.step, self.version = 0, 0
        self.updated_step = 0
        self.take: Take | None = None
        self.trained: list[str] = []
        self.num_dropped = 0
        self.finished: set[int] = set()
        self.seeds: dict[tuple[str, int, int], int] = {}
        self.bench = self.made()
        self.bench.publish(0)

    def made(self) -> Bench:
        return Bench(self.settings, group_size=self.group_size, group_filter=self.filter)

    def end(self, request: Request, *, is_ok: bool = True, versions: Any = None) -> None:
        self.finished.add(request.number)
        answer = trajectory_of(versions or request.versions, status="ok" if is_ok else "error")
        self.bench.finish(request, answer)
        self.look()

    def look(self) -> None:
        """Whether the step that waits has got its groups; what they must be."""
        if self.take is None or not self.take.done():
            return
        groups, metrics = self.take.result()
        self.take = None
        values = to_floats(metrics)
        for group in groups:
            assert len(group.trajectories) == self.group_size
            for trajectory in group.trajectories:
                refuse_mixtures(trajectory)
                assert all(v >= self.version - self.settings.max_staleness for *_, v in trajectory.version_spans)
        ids = [group.prompt.prompt_id for group in groups]
        self.trained += ids
        self.num_dropped += int(values["rollout/groups_dropped"])
        assert len(ids) <= self.settings.prompts_per_step
        if self.is_plain and self.settings.long_tail != "drop":
            assert len(ids) == self.settings.prompts_per_step
            assert values["rollout/groups_dropped"] == 0

    @rule(data=st.data(), is_ok=st.sampled_from([True, True, True, False]))
    def complete(self, data, is_ok):
        waiting = self.bench.waiting()
        if waiting:
            request = data.draw(st.sampled_from(waiting))
            versions = data.draw(st.sampled_from([request.versions, request.versions[-1:], request.versions[:1]]))
            self.end(request, is_ok=is_ok or not self.fails, versions=versions)

    @rule()
    def complete_all(self):
        assert self.take is None or self.bench.waiting(), "a step waits, and nothing is under way"
        waiting = self.bench.waiting()
        self.finished |= {request.number for request in waiting}
        self.bench.finish_several([(request, trajectory_of(request.versions)) for request in waiting])
        self.look()

    @property
    def has_ended(self) -> bool:
        return self.settings.last_step is not None and self.step >= self.settings.last_step

    @precondition(lambda self: self.take is None and not self.has_ended)
    @rule()
    def ask(self):
        self.step += 1
        self.take = Take(self.bench, self.step, self.version)
        self.look()

    @precondition(lambda self: self.take is None and self.step > self.updated_step)
    @rule()
    def update(self):
        """At most one for each step that took groups: a step that trained on nothing has none, and nobody makes up."""
        self.version += 1
        self.updated_step = self.step
        self.bench.publish(self.version)

    @precondition(lambda self: self.take is None)
    @rule(takes=st.integers(1, 3))
    def whole_steps(self, takes):
        for _ in range(takes):
            if self.has_ended:
                return
            self.ask()
            while self.take is not None:
                self.complete_all()
            self.update()

    @precondition(lambda self: self.take is None)
    @rule(more_steps=st.integers(0, 3))
    def restart(self, more_steps):
        """Perhaps as a longer run."""
        text, arrays = split_arrays(self.bench.buffer.state_dict())
        self.bench.close()
        if self.settings.last_step is not None:
            self.settings = replace(self.settings, last_step=self.settings.last_step + more_steps)
        self.bench = self.made()
        self.bench.buffer.load_state_dict(join_arrays(text, arrays))
        again, _ = split_arrays(self.bench.buffer.state_dict())
        assert again == text
        self.bench.publish(self.version)
        asked_again = {request.number for request in self.bench.play.asked}
        assert not asked_again & self.finished, "an episode that a checkpoint holds was asked again"

    @invariant()
    def books_balance(self):
        if not hasattr(self, "bench"):
            return
        state = self.bench.buffer.state_dict()
        tickets = state["plan"]["tickets"]
        bound = (self.settings.max_staleness + 1) * self.settings.started_per_step
        assert len(tickets) <= bound
        assert len(self.bench.play.waiting) <= bound * self.group_size
        under_way = [ticket["prompt_id"] for ticket in tickets]
        assert len({*self.trained, *under_way}) == len(self.trained) + len(under_way), "a prompt is there twice"
        if self.take is None:
            drawn = state["source"]["cursor"]
            assert drawn == len(self.trained) + len(under_way) + self.num_dropped + len(state["dropped"])
        if self.is_plain and self.settings.long_tail == "wait":
            assert self.trained == [f"p/{i}" for i in range(len(self.trained))], "not in the order of the prompts"
        for request in self.bench.play.asked:
            seed = (request.prompt_id, request.step, request.index)
            assert self.seeds.setdefault(seed, request.number) == request.number, "two episodes with one seed"
            assert request.step <= (self.settings.last_step or request.step), "for a step that never comes"

    def teardown(self):
        if not hasattr(self, "bench"):
            return
        while self.take is not None:
            self.complete_all()
        self.books_balance()
        self.bench.close()


Training.TestCase.settings = settings(max_examples=40, stateful_step_count=24)
TestTraining = Training.TestCase
