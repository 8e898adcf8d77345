"""What a path holds: a Hugging Face folder, a sharded checkpoint, or a checkpoint of a run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moerl.analysis.run_folder import CONFIG_FILE
from moerl.config.load import read_values
from moerl.convert.building import DESPITE
from moerl.errors import CheckpointError, ConfigError
from moerl.manifest import HF_MANIFEST, MANIFEST, PARTS_SUM, read_manifest
from moerl.models.carried import NOTHING_CARRIED, Carried, missing_warning, open_carried
from moerl.models.family import PREDICTION, HFConfig, ModelFamily, family_of
from moerl.models.hf_folder import HFFolder, WeightSource, checked_source, read_config, weight_files
from moerl.models.quantised import cache_scales, quantisation_of
from moerl.models.repeated import repeated_in
from moerl.models.sharded import open_weights
from moerl.shards import has_shards

STEP_NAME = re.compile(r"step_(\d{6,})")
LEARNER = "learner"
WITHOUT_MANIFEST = (
    "of this model it also says what was trained since and what is a copy of what, so --skip-checksums does not help: "
    "use another copy, or move the manifest away to take all tensors as they are, equally old"
)
"""What to do about a damaged manifest that says more than sums."""


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
    begins_from_weights: bool = True
    """False: a checkpoint of a run with `model.init` random, which has nothing of the weights in `settings`."""

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
        if not self.begins_from_weights:
            return dataclasses.replace(NOTHING_CARRIED, folder=self.carried_folder)
        return open_carried(self.carried_folder, self.family, self.hf, allowed)

    def repeated(self, allowed: Iterable[str] = ()) -> dict[str, str]:
        """Name of a tensor that a Hugging Face folder of this model has as a copy -> name of its original.

        `allowed`: regular expressions of names that are left out.

        Raises:
            CheckpointError: a damaged file or manifest.
        """
        if not self.begins_from_weights:
            return {}
        try:
            return repeated_in(self.carried_folder, self.family, self.hf, allowed)
        except CheckpointError as error:
            if not has_shards(self.carried_folder):
                raise
            raise CheckpointError(f"{error}; {WITHOUT_MANIFEST}") from error

    def cache_scales(self) -> frozenset[str]:
        """Names of scales of a key-value cache in a quantised folder, which no reader shows.

        Raises:
            CheckpointError: a missing or damaged file.
        """
        if self.form != "huggingface" or quantisation_of(self.hf) is None:
            return frozenset()
        return cache_scales(HFFolder(self.weights).names())

    @property
    def carried_folder(self) -> Path:
        """Where `carried` and `repeated` look."""
        return self.settings if self.form == "run" else self.weights

    @property
    def is_trained(self) -> bool:
        """Whether its weights were trained after its carried tensors that age; so says a manifest, or being of a run.

        Raises:
            CheckpointError: a damaged manifest, without which nothing says it.
        """
        if self.form == "run" or self.manifest is None or not self._predicts:
            return self.form == "run"
        return bool(self._read_manifest(self.manifest).get("carried_is_older"))

    def carried_warning(self, carried: Carried) -> str | None:
        """What to say of `carried`, or of its absence, beside weights that were trained on; None: nothing.

        Raises:
            CheckpointError: a damaged manifest.
        """
        if not self.is_trained:
            return None
        if carried.kinds:
            return carried.age_warning()
        if self.begins_from_weights:
            return missing_warning(carried, self.family, self.hf)
        if not self._predicts:
            return None
        return (
            f"config.json speaks of {PREDICTION}, and the run began from random weights (model.init), to which none of "
            f"{self.settings} belongs; none was written, so engines cannot decode speculatively with it"
        )

    @property
    def _predicts(self) -> bool:
        """Whether config.json speaks of layers of multi-token prediction."""
        return bool(self.family.carried_names(self.hf).get(PREDICTION))

    def _read_manifest(self, path: Path) -> dict[str, Any]:
        """Of a folder that a conversion made."""
        try:
            return read_manifest(path, 0)
        except CheckpointError as error:
            says_copies = self.form == "megatron" and bool(self.family.repeated_names(self.hf))
            remedy = WITHOUT_MANIFEST if self._predicts or says_copies else DESPITE
            raise CheckpointError(f"{error}; {remedy}") from error

    def files(self) -> list[Path]:
        """The files that hold weights."""
        if self.form == "huggingface":
            return weight_files(self.weights)
        return sorted([*self.weights.glob("rank_*"), *self.weights.glob("carried*")])

    def summed_files(self) -> dict[Path, dict[str, Any]]:
        """Files of tensors whose sums a reader has by and by -> their entries in the manifest; of a run none.

        Raises:
            CheckpointError: a damaged manifest.
        """
        if self.form == "run" or self.manifest is None:
            return {}
        files = self._read_manifest(self.manifest)["files"]
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
        model = _model_of(step)
        folder = Path(settings) if settings is not None else _settings_of(step, model)
        hf = read_config(folder)
        chosen = str(model.get("family", family)) if family == "auto" else family
        begins_from_weights = model.get("init", "weights") != "random"
        return Place(path, "run", step / LEARNER, folder, hf, family_of(hf, chosen), begins_from_weights)
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


def _config_of(step: Path) -> Path:
    return Path(os.path.realpath(step)).parents[1] / CONFIG_FILE


def _model_of(step: Path) -> Mapping[str, Any]:
    """Section `model` of the run's configuration; empty where the run lost it."""
    config = _config_of(step)
    model = read_values(config).get("model") if config.is_file() else None
    return model if isinstance(model, Mapping) else {}


def _settings_of(step: Path, model: Mapping[str, Any]) -> Path:
    """The model folder that the run started from."""
    config = _config_of(step)
    if not config.is_file():
        raise CheckpointError(
            f"{config} does not exist, so nothing says which model {step} is a checkpoint of; name the Hugging Face "
            "folder that the run started from with --settings"
        )
    folder = Path(str(model.get("path")))
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{config}: model.path is {folder}, which has no config.json (a relative path starts at the current "
            "folder); name the Hugging Face folder that the run started from with --settings"
        )
    return folder
