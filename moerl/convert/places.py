"""What a path holds: a Hugging Face folder, a sharded checkpoint, or a checkpoint of a run."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moerl.analysis.run_folder import CONFIG_FILE
from moerl.config.load import read_values
from moerl.errors import CheckpointError, ConfigError
from moerl.manifest import HF_MANIFEST, MANIFEST, PARTS_SUM, read_manifest
from moerl.models.carried import Carried, open_carried
from moerl.models.family import HFConfig, ModelFamily, family_of
from moerl.models.hf_folder import INDEX_FILE, SINGLE_FILE, WeightSource, checked_source, read_config
from moerl.models.repeated import repeated_in
from moerl.models.sharded import open_weights
from moerl.shards import has_shards

STEP_NAME = re.compile(r"step_(\d{6,})")
LEARNER = "learner"


@dataclass(frozen=True)
class Place:
    """A model on disk."""

    path: Path
    """As it was given."""
    form: Literal["huggingface", "megatron", "run"]
    weights: Path
    """Folder with the weights' files."""
    settings: Path
    """Folder with config.json and the tokenizer."""
    hf: HFConfig
    family: ModelFamily

    @property
    def manifest(self) -> Path | None:
        """The manifest that has the files' checksums, where there is one."""
        folder = self.weights.parent if self.form == "run" else self.weights
        path = folder / (MANIFEST if self.form != "huggingface" else HF_MANIFEST)
        return path if path.is_file() else None

    def open(self, allowed: Iterable[str] = ()) -> WeightSource:
        """Its weights, once it is sure that the family reads all of them and lacks none.

        `allowed`: regular expressions of names that may be left out.

        Raises:
            CheckpointError: a missing or damaged file, an unfilled parameter, an unmapped tensor.
        """
        weights = open_weights(self.settings, self.family, self.hf, shards=self.weights)
        return checked_source(weights, self.family, self.hf, allowed)

    def carried(self, allowed: Iterable[str] = ()) -> Carried:
        """The tensors that go with the model as they are stored; of a checkpoint of a run, those of its `settings`.

        `allowed`: regular expressions of names that may be left out.

        Raises:
            CheckpointError: a missing or damaged file.
        """
        return open_carried(self.carried_folder, self.family, self.hf, allowed)

    def repeated(self, allowed: Iterable[str] = ()) -> dict[str, str]:
        """Name of a tensor that a Hugging Face folder of this model has as a copy -> name of its original.

        `allowed`: regular expressions of names that are left out.

        Raises:
            CheckpointError: a damaged file or manifest.
        """
        return repeated_in(self.carried_folder, self.family, self.hf, allowed)

    @property
    def carried_folder(self) -> Path:
        """Where `carried` and `repeated` look."""
        return self.settings if self.form == "run" else self.weights

    @property
    def is_trained(self) -> bool:
        """Whether its weights were trained after its carried tensors; so says a manifest, or being of a run."""
        if self.form == "run" or self.manifest is None:
            return self.form == "run"
        return bool(read_manifest(self.manifest, 0).get("carried_is_older"))

    def files(self) -> list[Path]:
        """The files that hold weights."""
        if self.form == "huggingface":
            single = self.weights / SINGLE_FILE
            indexed = (self.weights / INDEX_FILE).is_file() or not single.is_file()
            return sorted(self.weights.glob("*.safetensors")) if indexed else [single]
        return sorted([*self.weights.glob("rank_*"), *self.weights.glob("carried*")])

    def summed_files(self) -> dict[Path, dict[str, Any]]:
        """Files of tensors whose sums a reader has by and by -> their entries in the manifest; of a run none.

        Raises:
            CheckpointError: a damaged manifest.
        """
        if self.form == "run" or self.manifest is None:
            return {}
        files = read_manifest(self.manifest, 0)["files"]
        return {self.weights / name: entry for name, entry in files.items() if PARTS_SUM in entry}

    def identity(self) -> dict[str, object]:
        """What tells this content from another, as far as names, sizes and times do."""
        others = self.carried().files if self.form == "run" else ()
        stats = [(path.name, path.stat()) for path in (*self.files(), *others)]
        files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
        config = hashlib.sha256(json.dumps(self.hf, sort_keys=True).encode()).hexdigest()  # decides how they are cut
        return {"path": str(self.weights.absolute()), "files": files, "config": config}


def find(path: str | Path, *, settings: str | Path | None = None, family: str = "auto") -> Place:
    """What `path` holds; `settings`: config.json and tokenizer for a checkpoint whose run lost its own.

    Raises:
        CheckpointError: nothing that is known, or a run without checkpoints.
        ConfigError: `settings` beside a Hugging Face folder.
        DataError: config.json is missing or not JSON.
    """
    path = Path(path)
    try:
        path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened ({error.strerror}); give a folder that exists") from error
    if not has_settings(path):
        step = _step_folder(path)
        if step is None:
            raise CheckpointError(
                f"{path} is no model: it has neither config.json (a Hugging Face folder, or a converted checkpoint) "
                "nor checkpoints/step_000010 (a run) nor learner/ (a checkpoint of one)"
            )
        folder = Path(settings) if settings is not None else _settings_of(step)
        hf = read_config(folder)
        return Place(path, "run", step / LEARNER, folder, hf, family_of(hf, family))
    if settings is not None:
        raise ConfigError(f"--settings is for checkpoints of runs; {path} has its own config.json, leave it out")
    hf = read_config(path)
    form = "megatron" if has_shards(path) else "huggingface"
    return Place(path, form, path, path, hf, family_of(hf, family))


def has_settings(path: Path) -> bool:
    """Whether `path` has a configuration of its own, so that `find` takes no `settings` for it."""
    return (path / "config.json").is_file()


def newest_step(path: Path) -> Path | None:
    """The newest checkpoint inside a run or its `checkpoints`; `path` itself where it is one; None where none is."""
    path = Path(os.path.realpath(path))  # `Path.resolve` raises another class of error on a circle of links
    if STEP_NAME.fullmatch(path.name):
        return path
    folders = [folder for folder in (path, path / "checkpoints") if folder.is_dir()]
    inside = [entry for folder in folders for entry in folder.iterdir()]
    steps = {int(name[1]): entry for entry in inside if (name := STEP_NAME.fullmatch(entry.name))}
    return steps[max(steps)] if steps else None


def _step_folder(path: Path) -> Path | None:
    if has_shards(path / LEARNER):
        return Path(os.path.realpath(path))
    step = newest_step(path)
    if step is None and (path / CONFIG_FILE).is_file():
        raise CheckpointError(f"{path} is a run without a complete checkpoint; train it, or give another path")
    return step


def _settings_of(step: Path) -> Path:
    """The model folder that the run started from."""
    config = Path(os.path.realpath(step)).parents[1] / CONFIG_FILE
    if not config.is_file():
        raise CheckpointError(
            f"{config} does not exist, so nothing says which model {step} is a checkpoint of; name the Hugging Face "
            "folder that the run started from with --settings"
        )
    folder = Path(str(read_values(config).get("model", {}).get("path")))
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{config}: model.path is {folder}, which has no config.json (a relative path starts at the current "
            "folder); name the Hugging Face folder that the run started from with --settings"
        )
    return folder
