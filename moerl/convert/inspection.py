"""What a model on disk is, without loading it: parameters by kind, types, layout, checksums."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moerl.convert.building import DESPITE
from moerl.convert.imports import left_out
from moerl.convert.places import STEP_NAME, Place
from moerl.errors import CheckpointError
from moerl.manifest import HF_MANIFEST, MANIFEST, check_file, check_size, read_manifest
from moerl.models.carried import Carried, kinds_of
from moerl.models.quantised import quantisation_of
from moerl.shards import ShardReader
from moerl.world import World

KINDS = {
    "norm": r"norm",
    "embedding": r"^embedding\.",
    "output": r"^output_layer\.",
    "router": r"\.router\.",
    "shared experts": r"\.shared_experts\.",
    "experts": r"\.experts\.",
    "attention": r"\.self_attention\.",
    "dense MLP": r"\.mlp\.",
    "value head": r"^value_head\.",
}
"""Kind -> pattern of its megatron names; the first that fits."""


def kind_of(megatron_name: str) -> str:
    """What a weight belongs to, by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, megatron_name)), "other")


def inspect_model(
    place: Place, *, verify: bool = True, threads: int = 1, allowed: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Everything that is known of a model, as plain JSON; damage under `damage`.

    Raises:
        CheckpointError: its files cannot be read, or are not what config.json implies.
    """
    damage = damaged_files(place, threads) if verify else []
    source, carried = place.open(allowed), place.carried(allowed)
    rules = place.family.weight_rules(place.hf)
    settings = place.family.transformer_kwargs(place.hf)
    kinds, dtypes, tensors, active = Counter(), Counter(), {}, 0.0
    used = settings.get("moe_router_topk", 0) / max(1, settings.get("num_moe_experts") or 1)
    for rule in rules:
        for name, shape in zip(rule.hf_names, rule.hf_shapes, strict=True):
            count, dtype = math.prod(shape), str(source.dtype(name)).removeprefix("torch.")
            tensors[name] = {"shape": list(shape), "dtype": dtype}
            kinds[kind_of(rule.megatron_name)] += count
            dtypes[dtype] += count
            active += count * (used if rule.is_expert else 1)
    held = "damaged" if damage else "verified" if verify else "skipped"
    checked = "none recorded" if place.manifest is None else held
    found: dict[str, Any] = {
        "path": str(place.path),
        "form": place.form,
        "architecture": (place.hf.get("architectures") or ["unknown"])[0],
        "family": type(place.family).__name__,
        "quantised": None if place.form != "huggingface" else quantisation_of(place.hf),
        "parameters": sum(kinds.values()),
        "active_parameters": round(active),
        "parameters_by_kind": dict(kinds.most_common()),
        "parameters_by_dtype": dict(dtypes.most_common()),
        "files": {path.name: path.stat().st_size for path in place.files()},
        "checksums": checked,
        "damage": damage,
        "left_out": left_out(place, source, carried, allowed),
        "repeated": place.repeated(allowed),
        "carried": _carried(place, carried),
        "tensors": tensors,
    }
    if place.form != "huggingface":
        with ShardReader(place.weights) as reader:
            found["layout"] = reader.ranks[0]["layout"]
    return found


def _carried(place: Place, carried: Carried) -> dict[str, Any]:
    plain = carried.plain()
    kinds = kinds_of(sorted(plain.names()), place.family, place.hf)
    counts: Counter[str] = Counter()
    for name, kind in kinds.items():
        counts[kind] += math.prod(plain.shape(name))
    return {
        "from": str(carried.folder) if carried.kinds else None,
        "is_older": bool(carried.kinds) and place.is_trained,
        "parameters_by_kind": dict(counts),
        "tensors": {
            name: {
                "shape": list(carried.stored.shape(name)),
                "dtype": str(carried.stored.dtype(name)).removeprefix("torch."),
            }
            for name in carried.names
        },
    }


def damaged_files(
    place: Place,
    threads: int = 1,
    later: Collection[Path] = (),
    world: World = World(),  # noqa: B008  frozen
) -> list[str]:
    """What is wrong with the files that the manifest lists, one sentence each; nothing where there is no manifest.

    Of a checkpoint of a run, also of the files that hold what it carries, where those have a manifest. `later`: files
    of which only the size is looked at. `world`: of several processes each tells of its share of the files.
    """
    inside = f"{place.weights.name}/" if place.form == "run" else ""
    found = _damaged(place, place.manifest, lambda name: name.startswith(inside), threads, later, world)
    if place.form != "run":
        return found
    try:
        names = {path.name for path in place.carried().files}
    except CheckpointError as error:
        return [*found, str(error)]
    others = (place.carried_folder / name for name in (MANIFEST, HF_MANIFEST))
    manifest = next((path for path in others if path.is_file()), None) if names else None
    return found + _damaged(None, manifest, names.__contains__, threads, world=world)


def _damaged(
    place: Place | None,
    path: Path | None,
    is_asked: Callable[[str], bool],
    threads: int,
    later: Collection[Path] = (),
    world: World = World(),  # noqa: B008  frozen
) -> list[str]:
    if path is None:
        return []
    step = STEP_NAME.fullmatch(path.parent.name) if place is not None and place.form == "run" else None
    try:
        manifest = read_manifest(path, int(step[1]) if step else 0)
    except CheckpointError as error:
        return [str(error)]
    files: Mapping[str, Mapping[str, Any]] = manifest["files"]

    def judge(name: str) -> str | None:
        file = path.parent / name
        try:
            (check_size if file in later else check_file)(file, files[name])
        except CheckpointError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(max_workers=threads) as pool:
        sizes = {name: 0 if path.parent / name in later else files[name]["bytes"] for name in files if is_asked(name)}
        found = list(pool.map(judge, _share(sizes, world)))
    return [fault for fault in found if fault is not None]


def _share(sizes: Mapping[str, int], world: World) -> list[str]:
    """Names of the files that are this process's to read: the largest first, each to who has least."""
    loads, mine = [0] * world.size, set()
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = min(range(world.size), key=loads.__getitem__)
        loads[rank] += sizes[name]
        if rank == world.rank:
            mine.add(name)
    return [name for name in sizes if name in mine]


def refuse_damage(
    place: Place,
    threads: int = 1,
    *,
    is_held_later: bool = False,
    world: World = World(),  # noqa: B008  frozen
) -> None:
    """Before anything is read; `is_held_later`: who reads will hold `Place.summed_files` (`Options.holds_sums`).

    Of several processes each looks at its share. One that is done with it shows up at the conversion (`Building`),
    which puts nothing in place before all have.

    Raises:
        CheckpointError: a file is not what its manifest says.
    """
    summed = place.summed_files()  # a manifest that is damaged has a remedy of its own
    damage = damaged_files(place, threads, summed if is_held_later else (), world)
    if damage:
        raise CheckpointError(f"{damage[0]}; {DESPITE}")
