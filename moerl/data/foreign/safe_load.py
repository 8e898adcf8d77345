"""`torch.load` that builds tensors, numpy arrays and plain containers, and nothing else."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy._core import multiarray

from moerl.errors import DataError

_DTYPES = [type(np.dtype(kind)) for kind in ("b1", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8")]
_PLAIN = [
    (multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),  # the name that numpy 1 wrote
    (multiarray.scalar, "numpy.core.multiarray.scalar"),
    multiarray._reconstruct,
    multiarray.scalar,
    np.ndarray,
    np.dtype,
    *_DTYPES,
]


def load_plain(path: str | Path, *, what: str, instead: str) -> Any:
    """Content of a `torch.save` file, on the CPU.

    Args:
        path: the file.
        what: what it should be, for the error.
        instead: how a file that this refuses can be written so that it is read.

    Raises:
        DataError: no such file, damaged, or it holds objects that only arbitrary unpickling would build.
    """
    if not Path(path).is_file():
        raise DataError(f"{path}: there is no such file; give {what}")
    try:
        with torch.serialization.safe_globals(_PLAIN):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise DataError(
            f"{path}: holds objects that could run code when they are read ({_culprit(error)}), so it is refused; "
            f"{instead}"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        lines = str(error).strip().splitlines()
        # Of other bytes torch names the first, as if it were a key.
        reason = lines[0] if lines and not isinstance(error, KeyError) else "it is of another kind"
        raise DataError(f"{path}: is not a whole torch.save file ({reason}); give {what}") from error


def _culprit(error: pickle.UnpicklingError) -> str:
    """The line of torch's long message that names the object."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "GLOBAL" in line or "Unsupported" in line or "WeightsUnpickler" in line]
    return (named or lines or ["unknown"])[0][:160]
