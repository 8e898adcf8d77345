"""What a fake server knows: its requests, its weights, whether it is paused, and what was asked of it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moerl.rollout.fake_engine.fault_rules import FaultRule
from moerl.rollout.fake_engine.model import FakeModel
from moerl.rollout.fake_engine.running import Running
from moerl.rollout.fake_engine.settings import FakeEngineConfig

_MAX_CACHED, _MAX_CALLS = 4096, 10_000


@dataclass(eq=False)
class ServerState:
    """Of one fake server, until it is restarted."""

    cfg: FakeEngineConfig
    rules: list[FaultRule] = field(default_factory=list)
    running: dict[str, Running] = field(default_factory=dict)
    """By rid; those in the queue too."""
    paused: str = ""
    """The mode; empty: not paused."""
    held: str = ""
    """The same of the scheduler, which a pause by `abort` does not reach."""
    in_update: bool = False
    names: list[str] = field(default_factory=list)
    """Of the weights that this update brought, as far as they are said."""
    groups: set[str] = field(default_factory=set)
    released: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    calls: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_CALLS))
    """Control endpoints, in order."""
    last_answer: bytes = b""
    num_restarts: int = 0

    def __post_init__(self) -> None:
        self.model = FakeModel(self.cfg)
        self.label = self.cfg.weight_version
        self.model_path = "fake"
        self.digest = hashlib.blake2b(self.label.encode(), digest_size=16)
        self.cache: OrderedDict[bytes, str] = OrderedDict()
        self.resumed = asyncio.Event()
        self.resumed.set()
        self.door = asyncio.Lock()
        """What pauses, goes on, or updates while it is paused holds it, for as long as that takes."""

    def restart(self) -> None:
        """As a process that was started anew: only rules, counts and the log of calls stay."""
        for request in self.running.values():
            request.is_aborted = True
            request.changed.set()
        self.running.clear()
        self.paused, self.held, self.in_update, self.model_path = "", "", False, "fake"
        self.door = asyncio.Lock()
        self.label = self.cfg.weight_version
        self.digest = hashlib.blake2b(self.label.encode(), digest_size=16)
        self.names.clear()
        self.groups.clear()
        self.released.clear()
        self.cache.clear()
        self.resumed.set()
        self.num_restarts += 1

    def struck(self, endpoint: str) -> list[FaultRule]:
        """The rules that this call meets; counts it."""
        self.counts[endpoint] += 1
        return [rule for rule in self.rules if rule.strikes(endpoint)]

    def admit(self) -> None:
        """Start what waits, as far as there is room."""
        if self.paused:
            return
        now = time.monotonic()
        free = self.cfg.max_running_requests - sum(request.is_admitted for request in self.running.values())
        for request in self.running.values():
            if free <= 0:
                break
            if not request.is_admitted:
                request.is_admitted, request.label, request.started = True, self.label, now
                request.changed.set()
                free -= 1

    def open(self, rid: str, prompt: list[int], body: dict[str, Any]) -> Running:
        """A new request; it waits until `admit` lets it in."""
        key = b",".join(b"%d" % token for token in prompt)
        cached = self.cache.get(key)
        tokens = len(prompt) - 1 if cached is not None else 0
        rank = body.get("routed_dp_rank")
        request = Running(rid, prompt, body, self.model, self.label, rank or 0, tokens, cached or "")
        self.running[rid] = request
        self.cache.setdefault(key, self.label)
        while len(self.cache) > _MAX_CACHED:
            self.cache.popitem(last=False)
        self.admit()
        return request

    def close(self, request: Running) -> None:
        """It was answered, or its client went away."""
        if self.running.get(request.rid) is request:
            del self.running[request.rid]
            self.admit()

    def settle(self) -> None:
        """Bring every request up to date."""
        now = time.monotonic()
        for request in self.running.values():
            request.settle(now)

    def abort(self, prefix: str, *, everything: bool) -> None:
        """End every request whose rid begins with `prefix`; one that is held in its place ends when it goes on."""
        self.settle()
        for request in self.running.values():
            if (everything or request.rid.startswith(prefix)) and not request.is_done:
                if self.held == "in_place" and request.is_admitted:
                    request.ends_on_resume = True
                    continue
                request.is_aborted = True
                request.changed.set()

    def is_idle(self) -> bool:
        """As SGLang's scheduler sees it: what waits does not count while it is paused, which it is not by `abort`."""
        self.settle()
        if self.held == "retract":
            return True
        left = [request for request in self.running.values() if not request.is_done]
        return not any(request.is_admitted for request in left) if self.held == "in_place" else not left

    def lacks_weights(self) -> bool:
        """Whether what reads or writes weights would reach for memory that is gone."""
        return self.cfg.memory_saver and "weights" in self.released

    def lacks_memory(self) -> bool:
        """Whether what computes now would reach for memory that is gone."""
        return self.cfg.memory_saver and bool(self.released & {"kv_cache", "weights"})

    async def pause(self, mode: str) -> None:
        """As the modes say; returns when nothing is sampled any more.

        By `abort` that is never, where requests are held in place: those need a step of the scheduler to end, and what
        would let them have it waits at the door.
        """
        async with self.door:
            self.settle()
            self.paused = mode
            self.resumed.clear()
            if mode == "abort":
                self.abort("", everything=True)
                while self.running:
                    await asyncio.sleep(0.001)
                return
            self.held = mode
            self._hold(mode)

    def _hold(self, mode: str) -> None:
        for request in self.running.values():
            request.started = None
            if mode == "retract" and not request.is_done:
                request.retract()

    def resume(self) -> None:
        """Go on, by the weights of now."""
        self.paused = self.held = ""
        self.resumed.set()
        now = time.monotonic()
        for request in self.running.values():
            if request.ends_on_resume:
                request.is_aborted = True
                request.changed.set()
            elif request.is_admitted:
                request.started, request.label = now, self.label
                request.changed.set()
        self.admit()

    def note_update(self, content: bytes, label: Any) -> None:
        """Weights came; the label changes with every bucket that carries one."""
        self.settle()
        self.digest.update(content)
        if label is not None:
            self.label = str(label)
            if not self.paused:
                for request in self.running.values():
                    request.label = self.label

    def load_folder(self, path: str) -> str:
        """Take the weights of a folder; returns what is wrong with it, or nothing."""
        files = sorted(Path(path).glob("*.safetensors"))
        if not files:
            return f"Cannot find any model weights with `{path}`"
        self.digest = hashlib.blake2b(digest_size=16)
        for file in files:
            self.digest.update(file.read_bytes())
        self.model_path = path
        return ""

    def described(self) -> dict[str, Any]:
        """For tests and people."""
        return {
            "label": self.label,
            "paused": self.paused,
            "in_update": self.in_update,
            "running": sorted(self.running),
            "counts": dict(self.counts),
            "calls": list(self.calls),
            "names": self.names[-1000:],
            "groups": sorted(self.groups),
            "released": sorted(self.released),
            "num_restarts": self.num_restarts,
            "faults": json.loads(json.dumps([vars(rule) for rule in self.rules])),
        }
