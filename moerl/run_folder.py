"""The run folder: made, taken over, or set aside, before anything is written into it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from moerl.analysis.run_folder import (
    CONFIG_FILE,
    LOAD_FILE,
    METRICS_FILE,
    OLD_TRACE_FILE,
    PASS_RATES_FILE,
    REPORT_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
    TRACE_FILE,
)
from moerl.checkpoint import Checkpoint, CheckpointStore
from moerl.config.load import as_dict, read_values, resolved_yaml
from moerl.config.resume import check_resume
from moerl.config.schema import RunConfig
from moerl.errors import CheckpointError, ConfigError
from moerl.models.hf_folder import read_config
from moerl.models.quantised import without_quantisation

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
ENGINE_WEIGHTS = "engine_weights"

_RECORDS = frozenset({CONFIG_FILE, METRICS_FILE, SAMPLES_FILE, LOAD_FILE, PASS_RATES_FILE, TRACE_FILE, OLD_TRACE_FILE})
"""What a run writes before its first checkpoint, and the same run writes again."""
_SERVER_LOG = re.compile(r"sglang-\d+\.log")
"""And what the servers that it launches do."""


def folder_of(cfg: RunConfig) -> Path:
    """`<run.output_dir>/<run.name>`."""
    return Path(cfg.run.output_dir) / cfg.run.name


def versions_folder(cfg: RunConfig) -> Path:
    """Where a run's weights lie on their way to servers: nobody else's, and the same one when the run is started again.

    Two runs that share `weight_sync.folder`, even of one name, must not see each other's versions, and none can remove
    what a killed run left under a name that nobody knows. So the name is made of the run folder's path and of a word
    in its lock file, which a folder of that path on another machine has not.
    """
    folder = folder_of(cfg)
    if not cfg.weight_sync.folder:
        return folder / ENGINE_WEIGHTS
    mark = hashlib.sha256(f"{folder.absolute()} {_word(_lock_file(folder))}".encode()).hexdigest()[:8]
    return Path(cfg.weight_sync.folder) / f"{folder.name}-{mark}"


def model_id(path: str) -> str:
    """Digest of what makes two checkpoints compatible: the architecture, not where it came from."""
    config = read_config(path)
    ignored = {"torch_dtype", "dtype", "transformers_version", "_name_or_path", "use_cache"}
    kept = {key: value for key, value in without_quantisation(config).items() if key not in ignored}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def config_id(cfg: RunConfig) -> str:
    """SHA-256 of the run's `config.yaml`, which a checkpoint carries to say what it was made with."""
    return hashlib.sha256(resolved_yaml(cfg).encode()).hexdigest()


def find_checkpoint(cfg: RunConfig, store: CheckpointStore) -> Checkpoint | None:
    """The checkpoint to go on from, its configuration held against `cfg`; None to start anew. Writes nothing.

    Raises:
        ConfigError: the run was made with settings that may not change.
        CheckpointError: `run.resume=required` without a checkpoint, or a damaged one.
    """
    folder = folder_of(cfg)
    if cfg.run.resume == "never":
        return None
    if not store.steps():
        if cfg.run.resume == "required":
            raise CheckpointError(f"run.resume=required, but {store.folder} has no complete checkpoint")
        return None
    if (folder / CONFIG_FILE).is_file():
        check_resume(read_values(folder / CONFIG_FILE), as_dict(cfg))
    return store.latest(on_corrupt=cfg.checkpoint.on_corrupt)


def prepare(cfg: RunConfig, *, resumes: bool) -> Path:
    """Make the run folder and write its config.yaml; an earlier run that does not go on is set aside, not deleted.

    Save one: the same run, killed before its first checkpoint, is begun again in its place, as it would leave one more
    folder for every kill. A run that goes on loses its summary, which speaks of its earlier end. Weights that were on
    their way to servers go in any case: they are as large as the model, and the next ones come whole.
    """
    folder = folder_of(cfg)
    for path in {versions_folder(cfg), folder / ENGINE_WEIGHTS}:  # weight_sync.folder may be new
        shutil.rmtree(path, ignore_errors=True)
    if not resumes and folder.is_dir() and any(folder.iterdir()):
        if cfg.run.resume == "auto" and _is_false_start(folder, cfg):
            logger.warning("%s was stopped before its first checkpoint; it begins again", folder)
            for path in [path for path in folder.iterdir() if _is_record(path.name)]:
                path.unlink()
        else:
            _set_aside(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY_FILE).unlink(missing_ok=True)
    temporary = folder / f"{CONFIG_FILE}.tmp"
    temporary.write_text(resolved_yaml(cfg))
    temporary.replace(folder / CONFIG_FILE)
    return folder


def is_finished(cfg: RunConfig) -> bool:
    """Whether what the end of a run leaves behind is there: a kill may have come between the last step and it."""
    folder = folder_of(cfg)
    wanted = [SUMMARY_FILE, REPORT_FILE] if cfg.telemetry.report else [SUMMARY_FILE]
    return all((folder / name).is_file() for name in wanted)


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the run folder: two processes in one folder would tear each other's files. The lock dies with the process.

    Raises:
        ConfigError: another process holds it, or a file is in its place.
    """
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(
                f"the run folder {folder} cannot be made, as {path} is a file; choose another run.name or "
                "run.output_dir"
            )
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = _lock_file(folder)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"{folder} is in use by another moerl process; wait for it or choose another run.name"
            ) from error
        yield
    finally:
        os.close(handle)


def _is_false_start(folder: Path, cfg: RunConfig) -> bool:
    """Nothing but the records of the same configuration: no checkpoint, dump, export, report or file of a person."""
    config = folder / CONFIG_FILE
    if not config.is_file() or config.read_text() != resolved_yaml(cfg):
        return False
    if (folder / CHECKPOINTS).is_dir() and any((folder / CHECKPOINTS).iterdir()):
        return False
    return all(path.name == CHECKPOINTS or _is_record(path.name) for path in folder.iterdir())


def _is_record(name: str) -> bool:
    return name in _RECORDS or _SERVER_LOG.fullmatch(name) is not None


def _lock_file(folder: Path) -> Path:
    """Beside the folder, which may be set aside while it is held."""
    return folder.parent / f".{folder.name}.lock"


def _word(path: Path) -> str:
    """What `path` holds; drawn where that is nothing yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        file.seek(0)
        found = file.read()
        if not found:
            found = secrets.token_hex(8)
            file.write(found)
        return found


def _set_aside(folder: Path) -> None:
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    target = folder.with_name(f"{folder.name}.before-{stamp}")
    while target.exists():  # twice within a second
        target = target.with_name(f"{target.name}x")
    folder.rename(target)
    logger.warning("an earlier run in %s was set aside as %s", folder, target.name)
