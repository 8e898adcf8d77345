"""A window of steps under torch's profiler: one chrome trace per rank in the run folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

logger = logging.getLogger(__name__)


class ProfileWindow:
    """Profiles whole steps from `start_step` on; open the trace in chrome://tracing or ui.perfetto.dev."""

    def __init__(self, folder: Path, *, rank: int, start_step: int, num_steps: int) -> None:
        """Nothing is recorded where `num_steps` is 0."""
        self.path = folder / f"profile_steps_{start_step:06d}_{start_step + num_steps - 1:06d}_rank_{rank:05d}.json.gz"
        self._steps = range(start_step, start_step + num_steps)
        self._running: profile | None = None

    def begin(self, step: int) -> None:
        """A step starts. A run that goes on inside the window records what is left of it."""
        if step not in self._steps or self._running is not None:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._running = profile(activities=activities, record_shapes=True)
        self._running.start()

    def end(self, step: int) -> None:
        """A step is done; after the last one of the window the trace is written."""
        if step + 1 not in self._steps:
            self.close()

    def close(self) -> None:
        """Write what was recorded, also where the run ends inside the window."""
        running, self._running = self._running, None
        if running is None:
            return
        running.stop()
        running.export_chrome_trace(str(self.path))
        logger.info("profile written to %s; open it in chrome://tracing or ui.perfetto.dev", self.path)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block has a name of its own in the trace."""
        if self._running is None:
            yield
            return
        with record_function(f"phase/{name}"):
            yield
