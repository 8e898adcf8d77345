"""The exceptions that moerl raises for what a user or a machine did. `assert` is for what no input could cause."""

from __future__ import annotations

import errno

DISK_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EIO,
)
"""`errno` of what a disk or a folder refuses with: a person can mend it, and wants no traceback."""


class MoerlError(Exception):
    """Root of every error that moerl raises on purpose. The message says what was seen, what is allowed, what to do."""


class ConfigError(MoerlError, ValueError):
    """A configuration that is misspelt, of the wrong type, or impossible."""

    def __init__(self, *faults: str) -> None:
        """One message for each of `faults`, all of them in one error."""
        listed = "".join(f"\n  - {fault}" for fault in faults)
        super().__init__(faults[0] if len(faults) == 1 else f"{len(faults)} faults in the configuration:{listed}")
        self.faults = faults


class DataError(MoerlError, ValueError):
    """A prompt file, tokenizer or sample that cannot be used; names the file and line where there is one."""


class RewardError(MoerlError, RuntimeError):
    """A verifier that cannot run at all (not one bad answer, which only marks its trajectory)."""


class RolloutError(MoerlError, RuntimeError):
    """An engine that failed or broke its protocol."""


class WeightSyncError(MoerlError, RuntimeError):
    """Weights that did not arrive whole at an engine."""


def is_lost(error: BaseException) -> bool:
    """Whether it speaks against a server, which did not answer or broke, rather than telling of a refusal.

    `is_suspect` of it, or of the error that it was made of, says so.
    """
    return any(getattr(one, "is_suspect", False) is True for one in (error, error.__cause__))


class CheckpointError(MoerlError, RuntimeError):
    """A checkpoint that is missing, damaged, or made by another model or configuration."""


class NumericsError(MoerlError, ArithmeticError):
    """A loss, gradient or weight that is not finite; raised on every rank, before an update or a checkpoint is made."""


class PeerError(MoerlError, RuntimeError):
    """Another rank failed and said why; this one ends without a word, with the same exit status."""

    def __init__(self, status: int) -> None:
        """`status` is the exit status of the rank that failed."""
        super().__init__("another rank failed, and said why")
        self.status = status


class Interrupted(MoerlError, KeyboardInterrupt):  # noqa: N818  it is a signal, not an error
    """Ctrl-C after the state was saved; `moerl` exits with status 130."""


EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def exit_status(error: BaseException) -> int:
    """What `moerl` exits with after `error`."""
    if isinstance(error, PeerError):
        return error.status
    if isinstance(error, ConfigError | DataError):
        return EXIT_USAGE
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_FAILED
