"""Where a step's record goes: `metrics.jsonl` and `samples.jsonl` (always), `load.jsonl`, wandb (optional).

A record is one line, written with one unbuffered write, so that a process killed at any moment leaves at most one torn
line, the last; the next start removes it. Keys are sorted and floats are written so that they read back exactly: two
runs are equal where their files are.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from moerl.analysis.run_folder import LOAD_FILE, METRICS_FILE, PASS_RATES_FILE, SAMPLES_FILE
from moerl.errors import ConfigError, MoerlError
from moerl.protocols import MetricSink
from moerl.types import Prompt, Trajectory

logger = logging.getLogger(__name__)

NON_FINITE = "telemetry/non_finite"
"""Number of values of a record that were NaN or infinite and are `null` in the file; absent where there were none."""
_LINE_ENDS = {ord(mark): f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"}
"""What `str.splitlines` takes for the end of a line and JSON leaves as it is."""


class JsonlSink:
    """`metrics.jsonl` and `samples.jsonl` of a run folder; the source of truth for the report, tests and resume."""

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        """Open for appending.

        Args:
            folder: the run folder; made where it is missing.
            resume_step: first step that will be written again; its records and later ones are removed. None keeps all.

        Raises:
            MoerlError: the disk is full, or `folder` cannot be written.
        """
        self.num_non_finite = 0
        self._metrics = _LineFile(folder / METRICS_FILE, resume_step)
        self._samples = _LineFile(folder / SAMPLES_FILE, resume_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One object: `step`, then the metrics by name; a value that is not finite becomes `null` and is counted.

        Where the step has a record already, the new one takes the place of it and of all later ones.
        """
        record: dict[str, Any] = {name: _plain(values[name]) for name in sorted(values)}
        bad = sum(value is None for value in record.values())
        if bad:
            self.num_non_finite += bad
            record = dict(sorted({**record, NON_FINITE: bad}.items()))
        self._metrics.replace({"step": step, **record})

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """One object per sample (`sample_record`), in the given order."""
        for sample in samples:
            self._samples.write({"step": step, **{key: _plain(value) for key, value in sample.items()}})

    def close(self) -> None:
        """Close both files."""
        self._metrics.close()
        self._samples.close()


class LoadSink:
    """`load.jsonl`: what share of its layer's assignments each expert got, one object per step."""

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        """As `JsonlSink`."""
        self._file = _LineFile(folder / LOAD_FILE, resume_step)

    def log(self, step: int, load: Sequence[Sequence[float]]) -> None:
        """`load[layer][expert]` are shares that add up to 1 in each layer; layers may differ in size."""
        shares = [[_plain(share) for share in layer] for layer in load]
        self._file.write({"step": step, "load": shares})

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class PassRateSink:
    """`pass_rates.jsonl`: how many answers to a prompt passed, one object for every completed group of every step."""

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        """As `JsonlSink`."""
        self._file = _LineFile(folder / PASS_RATES_FILE, resume_step)

    def log(self, step: int, visits: Sequence[tuple[str, int, int]]) -> None:
        """(prompt id, answers with a verdict, those that passed) of the step's groups, in their order."""
        for prompt_id, answers, passed in visits:
            self._file.write({"step": step, "prompt_id": prompt_id, "answers": answers, "passed": passed})

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Nowhere:
    """In place of a file, on ranks that write none."""

    def log(self, step: int, values: Any) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class WandbSink:
    """wandb, imported only here. `offline` needs no account and no network; `wandb sync` uploads later."""

    SAMPLE_INTERVAL_STEPS = 10
    """A wandb table is a file of its own, so samples go there seldom; samples.jsonl has all of them."""

    def __init__(
        self,
        folder: Path,
        *,
        run_name: str,
        config: Mapping[str, Any],
        project: str = "moerl",
        entity: str | None = None,
        mode: str = "offline",
    ) -> None:
        """Start a wandb run that lives in `<folder>/wandb`.

        Raises:
            ConfigError: wandb is not installed, or `mode` is neither `offline` nor `online`.
        """
        if mode not in ("offline", "online"):
            raise ConfigError(f"telemetry.wandb.mode is {mode!r}; allowed: offline, online")
        try:
            import wandb  # pyright: ignore[reportMissingImports]  optional
        except ImportError as error:
            raise ConfigError(
                "telemetry.wandb.enabled is true but wandb is not installed; `pip install wandb` or set it to false"
            ) from error
        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            dir=str(folder),
            name=run_name,
            project=project,
            entity=entity,
            mode=mode,
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One history row; values that are not finite are left out."""
        self._run.log({name: value for name, value in values.items() if math.isfinite(value)}, step=step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """A table, every `SAMPLE_INTERVAL_STEPS` steps."""
        if not samples or step % self.SAMPLE_INTERVAL_STEPS:
            return
        columns = list(samples[0])
        rows = [[str(sample.get(column, "")) for column in columns] for sample in samples]
        self._run.log({"samples": self._wandb.Table(columns=columns, data=rows)}, step=step)

    def close(self) -> None:
        """Finish the wandb run, which flushes it."""
        self._run.finish()


class Sinks:
    """Several sinks as one. One that fails is dropped with a warning: no run dies of its own log.

    Errors that moerl raised on purpose do travel (a full disk): resume and the report read those files.
    """

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        """Records go to every one of `sinks`, in order."""
        self._sinks: list[MetricSink] = list(sinks)

    @property
    def names(self) -> list[str]:
        """Class names of the sinks that are still in use."""
        return [type(sink).__name__ for sink in self._sinks]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One record to every sink."""
        self._each(lambda sink: sink.log(step, values))

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Samples to every sink."""
        self._each(lambda sink: sink.log_samples(step, samples))

    def close(self) -> None:
        """Close every sink, also after one of them failed to."""
        self._each(lambda sink: sink.close())
        self._sinks = []

    def _each(self, action: Callable[[MetricSink], None]) -> None:
        for sink in list(self._sinks):
            try:
                action(sink)
            except MoerlError:
                raise
            except Exception as error:  # noqa: BLE001  whatever a logging service raises costs its sink, not the run
                self._sinks.remove(sink)
                logger.warning("%s failed and is dropped for the rest of the run: %r", type(sink).__name__, error)


def sample_record(prompt: Prompt, trajectory: Trajectory) -> dict[str, Any]:
    """One rollout as a person reads it: the record of samples.jsonl."""
    record: dict[str, Any] = {
        "prompt_id": prompt.prompt_id,
        "prompt": str(prompt.metadata.get("text", "")),
        "response": trajectory.response_text,
        "answer": prompt.answer,
        "reward": trajectory.reward,
        "components": dict(trajectory.reward_components),
        "length": trajectory.response_length,
        "finish_reason": trajectory.finish_reason,
        "status": trajectory.status,
    }
    if trajectory.error:
        record["error"] = trajectory.error
    return record


class _LineFile:
    """A JSONL file that is only ever whole lines."""

    def __init__(self, path: Path, resume_step: int | None) -> None:
        self._path = path
        with _disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._last_step = _repair(path, resume_step)
            self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line; on failure the file is what it was before."""
        text = json.dumps(record, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
        data = memoryview((text + "\n").encode("utf-8", "replace"))
        start = self._file.seek(0, os.SEEK_END)
        with _disk_errors(self._path):
            try:
                while data:
                    data = data[self._file.write(data) :]
            except OSError:
                with suppress(OSError):
                    self._file.truncate(start)
                raise

    def replace(self, record: Mapping[str, Any]) -> None:
        """Append one line, in place of those of its step and of later ones."""
        if record["step"] <= self._last_step:
            with _disk_errors(self._path):
                _repair(self._path, record["step"])
                self._file.close()
                self._file = self._path.open("ab", buffering=0)
        self._last_step = record["step"]
        self.write(record)

    def close(self) -> None:
        self._file.close()


def _repair(path: Path, resume_step: int | None) -> int:
    """Remove a torn last line and, with `resume_step`, the records from there on; the file is replaced in one move.

    Returns the last step that is left, -1 where none is.
    """
    if not path.is_file():
        return -1
    kept: list[bytes] = []
    changed, last = False, -1
    with path.open("rb") as file:
        for line in file:
            step = _step_of(line)
            if step is None or (resume_step is not None and step >= resume_step):
                changed = True
                continue
            last = max(last, step)
            changed |= not line.endswith(b"\n")
            kept.append(line if line.endswith(b"\n") else line + b"\n")
    if not changed:
        return last
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return last


def _step_of(line: bytes) -> int | None:
    """The step of a record; None for a line that is no record."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def _plain(value: Any) -> Any:
    """`value` as JSON has it: floats that are not finite become None, at any depth."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    number = float(value)
    return number if math.isfinite(number) else None


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        folder = path.parent
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise MoerlError(
                f"{path}: cannot be written ({error.strerror}); check the folder and its permissions"
            ) from error
        raise MoerlError(
            f"{path}: the disk is full ({error.strerror}, {_free_mib(folder)} MiB left); the last complete checkpoint"
            f" in {folder} is safe: free space (old runs in {folder.parent}, dumped batches in {folder / 'batches'})"
            " and start the same command again to go on from it"
        ) from error


def _free_mib(folder: Path) -> int:
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    return shutil.disk_usage(existing).free // 2**20
