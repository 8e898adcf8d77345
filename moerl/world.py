"""The processes of a run, as the launcher started them, and the team that one process alone is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from moerl.errors import ConfigError

LOOPBACK = "127.0.0.1"
SPEAKING_SECONDS = 15.0
"""Of a process that has imported little and has a fault to tell."""


@dataclass(frozen=True, slots=True)
class World:
    """This process among those that torchrun started; one process without it."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Among those of this node."""
    local_size: int = 1
    launch: str = ""
    """Equal in the processes of one launch, another one's is different; "" where no launcher says it."""
    head: str = LOOPBACK
    """Name or address of rank 0's node, as the launcher says it to all."""

    @property
    def is_alone(self) -> bool:
        """One process."""
        return self.size == 1

    @property
    def num_nodes(self) -> int:
        """Nodes with equally many processes."""
        return self.size // self.local_size


def launched_world(environment: Mapping[str, str] = os.environ) -> World:
    """What torchrun says in the environment of a process.

    Raises:
        ConfigError: a part of it is missing or no number.
    """
    if "WORLD_SIZE" not in environment:
        return World()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    wrong = [f"{name}={environment.get(name)!r}" for name in names if not environment.get(name, "").isdigit()]
    if wrong:
        raise ConfigError(
            f"the environment has {', '.join(wrong)}, but WORLD_SIZE is set as if a launcher had started this process; "
            "start several processes with torchrun, and one with WORLD_SIZE unset"
        )
    said = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    launch = " ".join(environment[name] for name in said if name in environment)
    rank, size, local_rank, local_size = (int(environment[name]) for name in names)
    return World(rank, size, local_rank, local_size, launch, environment.get("MASTER_ADDR", LOOPBACK))


def let_the_first_speak(world: World) -> None:
    """Of a fault that every rank of a node finds, its first one tells; the others must not end before it has.

    The launcher ends all ranks as soon as one ends, so they wait for that.
    """
    if world.local_rank:
        time.sleep(SPEAKING_SECONDS)


class Alone:
    """Keeps `Team` where there is one process: it has everything already."""

    rank = 0
    size = 1
    is_leader = True

    def begin(self, step: int) -> None:
        """Nobody asks."""

    def phase(self, name: str) -> None:
        """Nobody asks."""

    def meet(self) -> None:
        """At once."""

    def any(self, flag: bool) -> bool:
        """`flag`."""
        return flag

    def spread(self, data: bytes | None) -> bytes:
        """`data`."""
        assert data is not None
        return data

    def deliver(self, part_of: Callable[[int], bytes]) -> bytes:
        """Nothing."""
        del part_of
        return b""

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nobody is told."""
