"""How a layout cuts a model into ranks: the boxes that they hold, without a process or a model.

The order of ranks is megatron's: tensor fastest, then data (experts: expert tensor, then expert), pipeline slowest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from moerl.config.stages import StageSplit, as_option
from moerl.errors import ConfigError
from moerl.models.rules import Rule
from moerl.models.sharded import Piece, ShardedNames


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the axes. Any reader lays a checkpoint out anew; in its own layout a rank reads few files."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if size is not None and size < 1:
                raise ConfigError(f"{as_option(name)} is {size}; it must be at least 1")
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ConfigError("--virtual-pipeline cuts the stages of a pipeline, and --pipeline is 1; leave it out")

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return math.lcm(self.tensor, self.expert * self.expert_tensor)

    @property
    def world_size(self) -> int:
        """Ranks that hold the model once, some of its dense parameters possibly more often."""
        return self.pipeline * self.stage_ranks

    def described(self) -> dict[str, int]:
        """As a checkpoint tells it."""
        data = self.stage_ranks // self.tensor
        axes = {"dp": data, "tp": self.tensor, "pp": self.pipeline, "cp": 1, "ep": self.expert}
        virtual = self.virtual_pipeline if self.virtual_pipeline > 1 else 0
        return {**axes, "etp": self.expert_tensor, "virtual_pipeline": virtual, **self.split.described()}

    @property
    def split(self) -> StageSplit:
        """Which layers lie on which stage."""
        return StageSplit(
            pipeline=self.pipeline,
            virtual=self.virtual_pipeline,
            first=self.first_stage_layers,
            last=self.last_stage_layers,
        )


def pieces_by_ranks(rules: Sequence[Rule], layout: Layout) -> dict[tuple[int, ...], list[Piece]]:
    """Ranks that share parameters among them -> all boxes of these; every box of the model once.

    Parameters come in the order of `rules`, and the boxes of one together, as they lie in it, so that whoever writes
    them one after another reads its tensors once. Of ranks that hold the same, only the first are named.

    Raises:
        ConfigError: sizes that do not divide what they cut.
    """
    layers = 1 + max((rule.layer for rule in rules if rule.layer is not None), default=-1)
    experts = 1 + max((rule.expert for rule in rules if rule.expert is not None), default=-1)
    _check(layout, layers, experts)
    names = ShardedNames(rules)
    found: dict[tuple[int, ...], list[Piece]] = {}
    for rule in rules:
        first = _stage_of(rule, layout, layers) * layout.stage_ranks
        size = layout.tensor
        if rule.expert is not None:
            size = layout.expert_tensor
            first += rule.expert // (experts // layout.expert) * size
        shares = range(size) if rule.tensor_axis is not None else (0,)
        boxes = [piece for share in shares for piece in names.pieces(rule, share, size)]
        found.setdefault(tuple(range(first, first + size)), []).extend(sorted(boxes, key=lambda piece: piece.start))
    return found


def _stage_of(rule: Rule, layout: Layout, layers: int) -> int:
    if rule.layer is None:
        return 0 if rule.megatron_name.startswith("embedding.") else layout.pipeline - 1
    return layout.split.stage_of(rule.layer, layers)


def _check(layout: Layout, layers: int, experts: int) -> None:
    faults = list(layout.split.faults(layers, as_option))
    if faults:
        raise ConfigError(*faults)
    if not experts and layout.expert * layout.expert_tensor > 1:
        raise ConfigError(
            f"--expert is {layout.expert} and --expert-tensor {layout.expert_tensor}, but the model has no experts; "
            "leave both out"
        )
    if experts % layout.expert:
        raise ConfigError(f"--expert is {layout.expert}, but must divide the model's {experts} experts")
