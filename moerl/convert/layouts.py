"""How a layout cuts a model into ranks: the boxes that each of them holds, without a process or a model.

The order of ranks is megatron's: tensor fastest, then data (experts: expert tensor, then expert), pipeline slowest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from moerl.config.stages import StageSplit, as_option
from moerl.errors import ConfigError
from moerl.models.rules import Rule
from moerl.models.sharded import Piece, ShardedNames


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the axes. Any reader lays a checkpoint out anew; in its own layout a rank reads the fewest files."""

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


def pieces_by_rank(rules: Sequence[Rule], layout: Layout) -> Iterator[list[Piece]]:
    """What each rank writes, in the order of ranks; every box of the model once.

    Raises:
        ConfigError: sizes that do not divide what they cut.
    """
    layers = 1 + max((rule.layer for rule in rules if rule.layer is not None), default=-1)
    experts = 1 + max((rule.expert for rule in rules if rule.expert is not None), default=-1)
    _check(layout, layers, experts)
    names = ShardedNames(rules)
    for rank in range(layout.world_size):
        stage, inner = divmod(rank, layout.stage_ranks)
        held: list[Piece] = []
        for rule in rules:
            if _stage_of(rule, layout, layers) != stage:
                continue
            if rule.expert is None:
                share, size, is_mine = inner % layout.tensor, layout.tensor, inner < layout.tensor
                is_mine = is_mine if rule.tensor_axis is not None else inner == 0
            else:
                share, size = inner % layout.expert_tensor, layout.expert_tensor
                owner = rule.expert // (experts // layout.expert)
                is_mine = inner // layout.expert_tensor == owner
                is_mine = is_mine and (rule.tensor_axis is not None or share == 0)
            if is_mine:
                held += names.pieces(rule, share, size)
        yield held


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
