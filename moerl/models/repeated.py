"""Tensors that a folder holds twice, under two names: the head of a tied model, which some files repeat.

No parameter is made of the copy. It must be the original bit for bit, since some readers take it for the head and some
do not; and it is written again wherever the folder came with it, made of what is written under the first name.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from moerl.manifest import MANIFEST, read_manifest
from moerl.models.family import HFConfig, ModelFamily
from moerl.models.hf_folder import HFFolder, has_weights, kept_repeats
from moerl.shards import has_shards

RECORD = "repeated"
"""In a manifest: name of the copy -> name of what it is a copy of. Shards hold no copy, so this is all they know."""


def repeated_in(folder: Path, family: ModelFamily, hf: HFConfig, allowed: Iterable[str] = ()) -> dict[str, str]:
    """Name of the copy -> name of its original: those that a Hugging Face folder has, or that shards came with.

    `allowed`: regular expressions of names that are left behind.

    Raises:
        CheckpointError: a damaged file or manifest.
    """
    known = kept_repeats(family.repeated_names(hf), allowed)
    if not known:
        return {}
    if not has_shards(folder):
        stored = HFFolder(folder).names() if has_weights(folder) else frozenset()
        return {name: original for name, original in known.items() if name in stored}
    if not (folder / MANIFEST).is_file():
        return {}
    recorded = read_manifest(folder / MANIFEST, 0).get(RECORD, {})
    return {name: original for name, original in known.items() if recorded.get(name) == original}
