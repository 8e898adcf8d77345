"""Save and restore the learner: weights, optimizer, schedule position, every RNG; sharded, and no pickle.

Every rank writes its share of the boxes that `sharding` describes, see `moerl.shards`. Under the same layout it is
restored bit for bit; under any other, weights and optimizer are the same whole tensors, cut otherwise, and the RNGs are
seeded anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moerl.errors import CheckpointError, NumericsError
from moerl.mcore.optim import Optimizer
from moerl.mcore.optimizer_state import MAIN, ParameterState, finish, num_updates, parameter_states, prepare
from moerl.mcore.parallel import ParallelState
from moerl.mcore.rng import rng_state, seed_from, set_rng_state
from moerl.mcore.sharding import Placement, placements
from moerl.models.rules import shorten
from moerl.shards import Shard, ShardReader, write_rank

logger = logging.getLogger(__name__)

WEIGHTS, REFERENCE, OPTIMIZER = "weights", "reference", "optimizer"
"""Names begin so."""


def begin_save(
    folder: Path,
    *,
    weights: Mapping[str, Tensor],
    optimizer: Optimizer,
    counters: Mapping[str, Any],
    reference: Mapping[str, Tensor] | None = None,
) -> Callable[[], None]:
    """Copy this rank's share to the host; the returned work writes it into `folder`, which exists by then.

    The work touches neither device nor process group, so another thread may do it while training goes on. `counters`
    is plain JSON, `reference` weights that moved.

    Raises:
        NumericsError: a weight of any rank is not finite; nothing was written.
    """
    parallel = optimizer.parallel
    moved = {f"reference {name}": tensor for name, tensor in (reference or {}).items()}
    _refuse_not_finite({**weights, **moved}, parallel)
    places = placements(optimizer.chunks, parallel)
    shards: list[Shard] = []
    for prefix, values in ((WEIGHTS, weights), (REFERENCE, reference or {})):
        for name, value in values.items():
            place = places[id(weights[name])]
            if place.is_writer:
                shards += place.shards(prefix, value.detach())
    for state in parameter_states(optimizer.inner):
        place = places[id(state.parameter)]
        if place.is_original if state.start is not None else place.is_writer:
            shards += _optimizer_shards(state, place)
    copies = _to_host(shards)
    extra: dict[str, Tensor] = {}
    described = {
        "world_size": parallel.world_size,
        "layout": layout_of(parallel),
        "counters": dict(counters),
        "optimizer_updates": num_updates(optimizer.inner),
        "rng": rng_state(extra),
    }
    return lambda: write_rank(folder, parallel.rank, copies, described, extra)


def load_state(
    folder: Path,
    *,
    weights: Mapping[str, Tensor],
    optimizer: Optimizer,
    reference: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Restore `weights`, `optimizer`, `reference` and the RNGs from a checkpoint of any layout; returns the counters.

    Raises:
        CheckpointError: a missing or damaged file, or other weights; nothing was changed then.
    """
    parallel = optimizer.parallel
    places = placements(optimizer.chunks, parallel)
    with _reader(folder, parallel) as reader:
        targets = _weight_targets(WEIGHTS, weights, weights, places)
        targets += _weight_targets(REFERENCE, reference or {}, weights, places)
        updates = max(rank["optimizer_updates"] for rank in reader.ranks)
        with _together(folder, parallel):
            _check_names(reader, weights, places, parallel)
            reader.check([shard for _, _, shards in targets for shard in shards])
            reader.check(list(_ghosts(optimizer.inner, places, _moments(reader) if updates else ())))
        prepare(optimizer.inner, updates)
        _fill(reader, targets)
        _fill(reader, list(_optimizer_targets(optimizer.inner, places)))
        finish(optimizer.inner)
        _restore_rng(reader, parallel)
        return reader.ranks[0]["counters"]


def load_weights(
    folder: Path, *, weights: Mapping[str, Tensor], chunks: Sequence[torch.nn.Module], parallel: ParallelState
) -> None:
    """Restore the weights alone, to start another run from them.

    Raises:
        CheckpointError: as `load_state`.
    """
    places = placements(chunks, parallel)
    with _reader(folder, parallel) as reader:
        targets = _weight_targets(WEIGHTS, weights, weights, places)
        with _together(folder, parallel):
            _check_names(reader, weights, places, parallel)
            reader.check([shard for _, _, shards in targets for shard in shards])
        _fill(reader, targets)


def layout_of(parallel: ParallelState) -> dict[str, int]:
    """Sizes of the axes by their short names, as a checkpoint tells them."""
    axes = {
        "dp": parallel.dp,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "cp": parallel.cp,
        "ep": parallel.ep,
        "etp": parallel.etp,
    }
    sizes = {name: axis.size for name, axis in axes.items()}
    return {**sizes, "virtual_pipeline": parallel.virtual_pipeline or 0, **parallel.split.described()}


@contextmanager
def _reader(folder: Path, parallel: ParallelState) -> Iterator[ShardReader]:
    reader = None
    with _together(folder, parallel):
        reader = ShardReader(folder)
    assert reader is not None
    with reader:
        yield reader


@contextmanager
def _together(folder: Path, parallel: ParallelState) -> Iterator[None]:
    """What one rank cannot read, no rank goes on with."""
    failure = None
    try:
        yield
    except CheckpointError as error:
        failure = error
    if not parallel.all_true(torch.tensor(failure is None, device=torch.cuda.current_device())):
        raise failure or CheckpointError(f"{folder} cannot be used: another rank could not read it, see its message")


_Target = tuple[Tensor, bool, list[Shard]]
"""A local tensor, whether it has rows that fill up, and the views of it to fill."""


def _weight_targets(
    prefix: str, values: Mapping[str, Tensor], weights: Mapping[str, Tensor], places: Mapping[int, Placement]
) -> list[_Target]:
    found = []
    for name, value in values.items():
        place = places[id(weights[name])]
        found.append((value.detach(), place.has_filling, place.shards(prefix, value.detach())))
    return found


def _optimizer_targets(inner: Any, places: Mapping[int, Placement]) -> Iterator[_Target]:
    for state in parameter_states(inner):
        place = places[id(state.parameter)]
        for name, tensor in state.tensors.items():
            yield tensor.detach(), place.has_filling, _state_shards(name, tensor.detach(), state.start, place)


def _optimizer_shards(state: ParameterState, place: Placement) -> list[Shard]:
    shards = []
    for name, tensor in state.tensors.items():
        shards += _state_shards(name, tensor.detach(), state.start, place)
    return shards


def _state_shards(name: str, tensor: Tensor, start: int | None, place: Placement) -> list[Shard]:
    prefix = f"{OPTIMIZER}/{name}"
    return place.shards(prefix, tensor) if start is None else place.flat_shards(prefix, tensor, start)


def _ghosts(inner: Any, places: Mapping[int, Placement], moments: Sequence[str]) -> Iterator[Shard]:
    """What the optimizer's state will be, without its memory."""
    for state in parameter_states(inner):
        ghost = torch.empty(state.main.shape, dtype=torch.float32, device="meta")
        for name in {*moments, *state.tensors}:
            yield from _state_shards(name, ghost, state.start, places[id(state.parameter)])


def _moments(reader: ShardReader) -> list[str]:
    """Names of the moments that the checkpoint has; main weights are none, and only narrow parameters have them."""
    return sorted({name.split("/")[1] for name in reader.entries if name.startswith(f"{OPTIMIZER}/")} - {MAIN})


def _fill(reader: ShardReader, targets: Sequence[_Target]) -> None:
    for tensor, has_filling, shards in targets:
        if has_filling:
            tensor.zero_()
        for shard in shards:
            reader.fill(shard)


def _check_names(
    reader: ShardReader, weights: Mapping[str, Tensor], places: Mapping[int, Placement], parallel: ParallelState
) -> None:
    """Neither the model nor the checkpoint has weights that the other lacks."""
    mine = {shard.name for name, tensor in weights.items() for shard in places[id(tensor)].shards("", tensor)}
    names = {name.removeprefix("/") for name in parallel.union(mine)}
    saved = {name.removeprefix(f"{WEIGHTS}/") for name in reader.entries if name.startswith(f"{WEIGHTS}/")}
    if names != saved:
        odd = shorten(sorted(names ^ saved))
        raise CheckpointError(f"{reader.folder} belongs to another model: it differs in {odd}; check model.path")


def _to_host(shards: Sequence[Shard]) -> list[Shard]:
    """Copies on the host, in memory that the system gets back after the save; pinned memory torch would keep for ever,
    in blocks of powers of two.
    """
    copies = []
    for shard in shards:
        copy = torch.empty(shard.data.shape, dtype=shard.data.dtype, device="cpu")
        copies.append(Shard(shard.name, shard.shape, shard.offset, copy.copy_(shard.data)))
    return copies


def _refuse_not_finite(weights: Mapping[str, Tensor], parallel: ParallelState) -> None:
    """A step is checked by its loss and gradient; an update may still overflow the format of the weights."""
    finite = {name: torch.isfinite(tensor).all() for name, tensor in weights.items()}
    if not parallel.all_true(torch.stack(list(finite.values())).all()):
        broken = shorten(sorted(name for name, is_finite in finite.items() if not bool(is_finite)))
        raise NumericsError(
            f"weights are not finite ({broken or 'on another rank'}), so no checkpoint was written and earlier ones "
            "are untouched; go on from the last one with a smaller optim.lr or optim.clip_grad_norm"
        )


def _restore_rng(reader: ShardReader, parallel: ParallelState) -> None:
    saved = reader.ranks[0]["layout"]
    now = layout_of(parallel)
    described = reader.ranks[0]["rng"]
    has_device = any(key == "cuda" for key, _ in described["map"])
    if saved == now and has_device == torch.cuda.is_available():
        set_rng_state(reader.ranks[parallel.rank]["rng"], reader.extra(parallel.rank))
        return
    seed = seed_from(described, reader.extra(0))
    if parallel.rank == 0:
        logger.warning(
            "%s was written under the layout %s, this run has %s: weights and optimizer are cut anew, and the random "
            "numbers of the learner (dropout) start from seed %d, which follows from the checkpoint",
            reader.folder,
            saved,
            now,
            seed,
        )
