"""The servers of a run on several nodes: each node's first process starts its own, and does so when rank 0 says.

Both sides talk over a board, texts under keys that every process of the run sees (the launcher's store): what rank 0
orders, numbered, what came of it, and which servers have ended. Nothing secret is written there; the key that all
servers ask for comes another way. A node's servers end with its first process, whatever ends that (`keeper.py`).
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from moerl.errors import MoerlError, RolloutError
from moerl.rollout.sglang.processes import KEEPER_SECONDS
from moerl.rollout.sglang.servers import LOOK_SECONDS, PORT_SECONDS, Server

logger = logging.getLogger(__name__)

ASK_SECONDS = 0.2
"""Between two looks at the board for an order, or for what came of one."""
MARGIN_SECONDS = 30.0
"""Beyond what a start takes at most, for the board and a busy machine."""
START, RESTART, STOP = "start", "restart", "stop"


class Board(Protocol):
    """Texts under keys, the same for every process. Any thread may call."""

    def put(self, key: str, text: str) -> None:
        """Write it, over what was there."""
        ...

    def look(self, key: str) -> str | None:
        """What is there; None: nothing yet. At once."""
        ...


class Launched(Protocol):
    """Servers that a run starts itself: of one node (`SglangServers`), or of all (`Fleet`)."""

    servers: tuple[Server, ...]

    @property
    def start_seconds(self) -> float:
        """How long one may take to start."""
        ...

    def start(self) -> None:
        """Start all and wait until every one of them is healthy; on any failure none is left."""
        ...

    def restart(self, index: int) -> None:
        """End one, start it anew at the same URL and wait for it."""
        ...

    def dead(self) -> dict[int, str]:
        """Servers that have ended although nobody stopped them -> why."""
        ...

    def stop(self) -> None:
        """End all of them."""
        ...

    def close(self) -> None:
        """End all of them for good."""
        ...


@dataclass(frozen=True)
class Elsewhere:
    """What rank 0 knows of the servers of a run's other nodes."""

    key: str = field(repr=False)
    """That all of them ask for, and those of its own node too."""
    nodes: tuple[FarNode, ...]


class NodeHost:
    """One node's side, in its first process: does what is ordered, and tells which servers have ended, until closed."""

    def __init__(self, servers: Launched, board: Board, name: str) -> None:
        """Begins at once. `name`: of this node on the board."""
        self._servers = servers
        self._board = board
        self._name = name
        self._is_closed = threading.Event()
        self._telling = threading.Lock()
        self._told = ""
        self._threads = [
            threading.Thread(target=self._until_closed, args=(work,), name=f"servers-{name}", daemon=True)
            for work in (self._obey, self._report)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the servers and both threads."""
        self._is_closed.set()
        self._servers.close()
        for thread in self._threads:
            thread.join()

    def _until_closed(self, work: Any) -> None:
        try:
            work()
        except RuntimeError as error:  # of the store, whose process has ended: the run is over, or about to be
            if not self._is_closed.is_set():
                logger.warning("the servers of this node end: the launcher's store does not answer (%s)", error)
            self._servers.close()

    def _obey(self) -> None:
        number = 0
        while not self._is_closed.wait(ASK_SECONDS):
            while (text := self._board.look(f"{self._name}/order/{number}")) is not None:
                fault = self._carry_out(json.loads(text))
                self._tell_dead()  # before: whoever hears that one was started anew must not read that it is dead
                self._board.put(f"{self._name}/outcome/{number}", json.dumps({"fault": fault}))
                number += 1

    def _carry_out(self, order: dict[str, Any]) -> str | None:
        """What went wrong, or None."""
        try:
            if order["what"] == START:
                self._servers.start()
            elif order["what"] == RESTART:
                self._servers.restart(order["index"])
            else:
                self._servers.stop()
        except (MoerlError, OSError) as error:
            return str(error)
        return None

    def _report(self) -> None:
        while not self._is_closed.wait(LOOK_SECONDS):
            if self._board.look(f"{self._name}/close") is not None:
                self._servers.close()
                return
            self._tell_dead()

    def _tell_dead(self) -> None:
        with self._telling:
            dead = json.dumps({str(index): why for index, why in self._servers.dead().items()})
            if dead != self._told:
                self._board.put(f"{self._name}/dead", dead)
                self._told = dead


class FarNode:
    """Rank 0's side of one other node."""

    def __init__(self, board: Board, name: str, host: str, servers: tuple[Server, ...]) -> None:
        """`name`: of the node on the board; `host`: for messages."""
        self.servers = servers
        self._board = board
        self._name = name
        self._host = host
        self._lock = threading.Lock()
        self._number = 0
        self._is_closed = threading.Event()

    def order(self, what: str, index: int | None = None) -> int:
        """Have the node do it after what it was told before; the order's number."""
        with self._lock:
            number, self._number = self._number, self._number + 1
        self._board.put(f"{self._name}/order/{number}", json.dumps({"what": what, "index": index}))
        return number

    def wait(self, number: int, seconds: float) -> None:
        """For what comes of an order.

        Raises:
            RolloutError: it failed there, nothing came in time, or the servers were closed.
        """
        end = time.monotonic() + seconds
        while (text := self._board.look(f"{self._name}/outcome/{number}")) is None:
            if self._is_closed.wait(ASK_SECONDS):
                raise RolloutError("the servers were closed; nothing is started any more")
            if time.monotonic() > end:
                raise RolloutError(f"the servers of {self._host} did not start within {seconds:g} s; see their logs")
        if (fault := json.loads(text)["fault"]) is not None:
            raise RolloutError(f"on {self._host}: {fault}")

    def dead(self) -> dict[int, str]:
        """As the node told last."""
        told = json.loads(self._board.look(f"{self._name}/dead") or "{}")
        return {int(index): f"on {self._host}: {why}" for index, why in told.items()}

    def close(self) -> None:
        """Have the node end its servers for good; whoever waits is told."""
        self._is_closed.set()
        self._board.put(f"{self._name}/close", "")


class Fleet:
    """Keeps `Launched` over all nodes of a run."""

    def __init__(self, own: Launched, far: Sequence[FarNode]) -> None:
        """`own`: of this node."""
        self._own = own
        self._far = tuple(far)
        self._node_of = {server.index: node for node in far for server in node.servers}
        self.servers = (*own.servers, *(server for node in far for server in node.servers))

    @property
    def start_seconds(self) -> float:
        """How long one may take to start."""
        return self._own.start_seconds

    @property
    def _patience(self) -> float:
        """For a far node: one start, that of another server which is under way there, and what ends before each."""
        return 2 * (self.start_seconds + PORT_SECONDS + KEEPER_SECONDS) + MARGIN_SECONDS

    def start(self) -> None:
        """On all nodes at once.

        Raises:
            RolloutError: one did not come up; the others are ended.
        """
        is_well = False
        try:
            orders = [(node, node.order(START)) for node in self._far]
            self._own.start()
            for node, number in orders:
                node.wait(number, self._patience)
            is_well = True
        finally:
            if not is_well:
                self.stop()

    def restart(self, index: int) -> None:
        """Where it is.

        Raises:
            RolloutError: it did not come up, or the servers were closed.
        """
        node = self._node_of.get(index)
        if node is None:
            self._own.restart(index)
        else:
            node.wait(node.order(RESTART, index), self._patience)

    def dead(self) -> dict[int, str]:
        """Of all nodes."""
        found = self._own.dead()
        for node in self._far:
            found |= node.dead()
        return found

    def stop(self) -> None:
        """End all of them. Other nodes do so after what they are at, and are not waited for."""
        try:
            for node in self._far:
                node.order(STOP)
        finally:  # the board may be gone
            self._own.stop()

    def close(self) -> None:
        """End all of them for good."""
        try:
            for node in self._far:
                node.close()
        finally:
            self._own.close()


def node_address(head: str) -> str:
    """This node's address on the way to `head`, the run's first one. Sends nothing.

    Raises:
        RolloutError: nobody knows that name, or no way leads there.
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(head, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return probe.getsockname()[0]
    except OSError as error:
        raise RolloutError(f"no way from this node to the run's first one, {head} ({error.strerror})") from error
