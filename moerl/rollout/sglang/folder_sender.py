"""Weights through a folder that trainer and servers share: buckets become safetensors files, servers load the folder.

A version is written beside its final name and renamed when it is whole, so a folder with a version's name is a version.
The last one stays on the disk: a server that was started anew loads it from there.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file

from moerl.errors import MoerlError, WeightSyncError
from moerl.rollout.sglang.client import SglangClient
from moerl.types import WeightBucket

_SIDE_FILES = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "*.jinja", "vocab.*")


class FolderSender:
    """Keeps `WeightSender`; staged."""

    is_staged = True

    def __init__(self, folder: Path, model_path: Path) -> None:
        """`folder` is made here, and seen by the servers under the same path; `model_path` has the configuration."""
        self._folder = folder.absolute()
        self._model_path = model_path
        self._files: dict[str, str] = {}
        self._num_bytes = 0
        self._version: int | None = None

    async def send(self, bucket: WeightBucket, clients: Sequence[SglangClient]) -> Mapping[SglangClient, MoerlError]:
        """Write one file."""
        del clients
        if not self._files:
            await asyncio.to_thread(self._begin, bucket.version)
        name = f"model-{len(set(self._files.values())) + 1:05d}.safetensors"
        await asyncio.to_thread(self._write, self._staging(bucket.version) / name, bucket)
        self._files |= {weight: name for weight, _ in bucket.tensors}
        self._num_bytes += sum(tensor.nbytes for _, tensor in bucket.tensors)
        return {}

    async def commit(self, version: int, clients: Sequence[SglangClient]) -> Mapping[SglangClient, MoerlError]:
        """Name the folder, have every server load it at once, and remove the folder before it."""
        await asyncio.to_thread(self._finish, version)
        results = await asyncio.gather(*(self._load(client, version) for client in clients), return_exceptions=True)
        failures: dict[SglangClient, MoerlError] = {}
        for client, result in zip(clients, results, strict=True):
            if isinstance(result, MoerlError):
                failures[client] = result
            elif isinstance(result, BaseException):
                raise result
        if len(failures) < len(clients):
            old, self._version = self._version, version
            if old not in (None, version):
                await asyncio.to_thread(shutil.rmtree, self._folder / str(old), ignore_errors=True)
        return failures

    async def give_up(self, clients: Sequence[SglangClient]) -> None:
        """Remove what was written since the last commit."""
        del clients
        self._files, self._num_bytes = {}, 0
        if self._folder.is_dir():
            for left in self._folder.glob("staging-*"):
                await asyncio.to_thread(shutil.rmtree, left, ignore_errors=True)

    async def replay(self, client: SglangClient, version: int) -> bool:
        """Load the folder of `version` again, if it is there."""
        if self._version != version:
            return False
        await self._load(client, version)
        return True

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _load(self, client: SglangClient, version: int) -> None:
        await client.update_from_disk(str(self._folder / str(version)), weight_version=version, keep_pause=True)

    def _staging(self, version: int) -> Path:
        return self._folder / f"staging-{version}"

    def _begin(self, version: int) -> None:
        staging = self._staging(version)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        for pattern in _SIDE_FILES:
            for file in self._model_path.glob(pattern):
                shutil.copyfile(file, staging / file.name)

    def _write(self, path: Path, bucket: WeightBucket) -> None:
        """Whole tensors of their own, since safetensors refuses memory that two names share."""
        try:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in bucket.tensors}, path)
        except OSError as error:
            raise WeightSyncError(
                f"{path} cannot be written ({error.strerror}); make room, or choose another folder"
            ) from error

    def _finish(self, version: int) -> None:
        staging, final = self._staging(version), self._folder / str(version)
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": self._files}
        (staging / "model.safetensors.index.json").write_text(json.dumps(index))
        if final.exists():  # the same version, published again
            shutil.rmtree(final)
        staging.rename(final)
        self._files, self._num_bytes = {}, 0
