"""Versions of a policy as Hugging Face folders beside the run, written bucket by bucket.

A version is written beside its final name and renamed when it is whole, so a folder with a version's name is a version.
There are two at most: the last one that was published, which a server started anew loads, and the next.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import torch

from moerl.checksums import checksum
from moerl.errors import CheckpointError, WeightSyncError
from moerl.models.hf_export import copy_settings, write_index
from moerl.tensor_file import Described, TensorFile, TensorFileWriter
from moerl.types import WeightBucket
from moerl.weight_sync.servers import SenderPlace


class VersionFolder:
    """The versions of one run; its calls come one at a time, from any thread."""

    def __init__(self, place: SenderPlace) -> None:
        self._folder = place.folder.absolute()
        self._place = place
        self._files: dict[str, str] = {}
        self._sums: dict[str, tuple[list[str], str]] = {}
        self._elements: Counter[torch.dtype] = Counter()
        self._num_bytes = 0
        self.version: int | None = None
        """Of the last whole version that was published; it lies at `path`."""

    def path(self, version: int) -> Path:
        """Where a whole version lies."""
        return self._folder / str(version)

    def write(self, bucket: WeightBucket, *, with_sum: bool = False) -> None:
        """Add one file to the version that is under way. `with_sum` keeps its checksum for `read_back`.

        Raises:
            WeightSyncError: the file cannot be written.
        """
        staging = self._staging(bucket.version)
        name = f"model-{len(set(self._files.values())) + 1:05d}.safetensors"
        tensors = [(weight, tensor.detach()) for weight, tensor in bucket.tensors]
        described = [Described(weight, tensor.dtype, tuple(tensor.shape)) for weight, tensor in tensors]
        try:
            if not self._files:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir(parents=True)
            # nothing is flushed to the disk: a version need not outlive the machine
            with TensorFileWriter(staging / name, described, is_lasting=False) as file:
                for _, tensor in tensors:
                    file.add(tensor.cpu())
        except OSError as error:
            raise self._unwritable(staging / name, error) from error
        if with_sum:
            self._sums[name] = ([weight for weight, _ in tensors], bucket.checksum or checksum(tensors))
        self._files |= {weight: name for weight, _ in tensors}
        for _, tensor in tensors:
            if tensor.element_size() > 1:  # config.json names the type of what is not quantised
                self._elements[tensor.dtype] += tensor.numel()
            self._num_bytes += tensor.nbytes

    def finish(self, version: int) -> Path:
        """Add configuration, tokenizer and index, and give the folder its name.

        Raises:
            WeightSyncError: it cannot be written.
        """
        staging, final = self._staging(version), self.path(version)
        try:
            copy_settings(self._place.model_path, staging, self._elements, quantisation=self._place.quantisation)
            write_index(staging, self._files, self._num_bytes)
            if final.exists():  # the same version, published again
                shutil.rmtree(final)
            staging.rename(final)
        except OSError as error:
            raise self._unwritable(final, error) from error
        self._files, self._num_bytes = {}, 0
        self._elements.clear()
        return final

    def read_back(self, version: int) -> None:
        """Compare the files of a whole version with what was given to `write`.

        Raises:
            WeightSyncError: a file does not hold it.
        """
        for name, (weights, expected) in self._sums.items():
            path = self.path(version) / name
            try:
                with TensorFile(path) as file:
                    seen = checksum((weight, file.read(weight)) for weight in weights)
            except (CheckpointError, KeyError) as error:
                raise WeightSyncError(f"{path} cannot be read back ({error}); check the disk") from error
            if seen != expected:
                raise WeightSyncError(
                    f"{path} has checksum {seen[:12]} where {expected[:12]} was written; check the disk, or choose "
                    "another folder"
                )
        self._sums.clear()

    def keep(self, version: int | None) -> None:
        """`version` is the one that was published last; the others go. None: all go."""
        self.version = version
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                if path.name != str(version) and (path.name.isdigit() or path.name.startswith("staging-")):
                    shutil.rmtree(path, ignore_errors=True)

    def drop(self) -> None:
        """Forget the version that is under way."""
        self._files, self._num_bytes = {}, 0
        self._elements.clear()
        self._sums.clear()
        self.keep(self.version)

    def close(self) -> None:
        """Remove what was written, and the folder if nothing else is in it."""
        self._files = {}
        self.keep(None)
        if self._folder.is_dir() and not any(self._folder.iterdir()):
            self._folder.rmdir()

    def _staging(self, version: int) -> Path:
        return self._folder / f"staging-{version}"

    @staticmethod
    def _unwritable(path: Path, error: OSError) -> WeightSyncError:
        return WeightSyncError(
            f"{path} cannot be written ({error.strerror}); make room, or set weight_sync.folder to another "
            "folder that trainer and servers share"
        )
