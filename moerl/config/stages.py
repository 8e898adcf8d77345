"""Which layers lie on which pipeline stage: megatron's arithmetic, once for rules, conversion and learner."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

Spell = Callable[[str], str]
"""A field of `ParallelSection` -> how the user wrote it."""


def in_file(field: str) -> str:
    """As a configuration has it."""
    return f"parallel.{field}"


def as_option(field: str) -> str:
    """As `moerl convert import` has it."""
    return f"--{field.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class StageSplit:
    """A pipeline and how unevenly it is cut; every stage holds at least one layer for each of its chunks."""

    pipeline: int = 1
    virtual: int = 1
    """Chunks of every stage; chunk c of the model lies on stage c modulo `pipeline`."""
    first: int | None = None
    """Layers of the first stage; None: as many as those in the middle."""
    last: int | None = None
    """Layers of the last stage, likewise."""

    @property
    def is_even(self) -> bool:
        """Whether no stage was given a number of its own."""
        return self.first is None and self.last is None

    def described(self) -> dict[str, int]:
        """As a checkpoint tells it; nothing of an even cut, which checkpoints of before had."""
        told = {"first_stage_layers": self.first, "last_stage_layers": self.last}
        return {name: count for name, count in told.items() if count is not None}

    def counts(self, layers: int) -> list[int]:
        """Layers of each stage, for a model that `faults` has nothing to say about."""
        rest, others = self._middle(layers)
        each = rest // max(others, 1)
        middle = [each] * others
        return [*self._own(self.first), *middle, *self._own(self.last)]

    def stage_of(self, layer: int, layers: int) -> int:
        """Of a layer, counted from 0."""
        chunks = [count // self.virtual for count in self.counts(layers)] * self.virtual
        return bisect.bisect_right(list(itertools.accumulate(chunks)), layer) % self.pipeline

    def faults(self, layers: int, spell: Spell = in_file) -> Iterator[str]:
        """Why a model of so many layers cannot be cut so, with the sum written out, and what would go."""
        if self.pipeline == 1:
            for field, own in (("first_stage_layers", self.first), ("last_stage_layers", self.last)):
                if own is not None:
                    yield (
                        f"{spell(field)} is {own} with {spell('pipeline')}=1, but it says how many of a pipeline's "
                        "layers one stage holds: leave it out"
                    )
            return
        if self.is_even:
            if not self.fits(layers):
                fault = f"{self._product(spell)}, but must divide the model's {layers} layers"
                yield f"{fault}; {self._way_out(layers, spell)}"
            return
        if self.fits(layers):
            return
        rest, others = self._middle(layers)
        taken = [
            f"{own} in the {name}" for name, own in (("first", self.first), ("last", self.last)) if own is not None
        ]
        cut = " - ".join([str(layers), *taken])
        stages = f"{others} stage{'s' * (others != 1)}"
        left = f"{layers} layers over {self.pipeline} stages: {cut} leave {rest} over {stages}"
        if not others:
            fault = "but two stages are all that there are"
        elif rest < others * self.virtual:
            fault = "but each needs at least one"
            fault += f" for each of {spell('virtual_pipeline')}={self.virtual}" if self.virtual > 1 else ""
        elif rest % others:
            fault = f"which {others} does not divide"
        else:
            fault = f"but {spell('virtual_pipeline')} is {self.virtual} and must divide the layers of each stage"
        yield f"{left}, {fault}; {self._way_out(layers, spell)}"

    def fits(self, layers: int) -> bool:
        """Whether a model of so many layers can be cut so."""
        rest, others = self._middle(layers)
        if rest % others if others else rest:
            return False
        return all(count >= 1 and count % self.virtual == 0 for count in self.counts(layers))

    def _product(self, spell: Spell) -> str:
        if self.virtual == 1:
            return f"{spell('pipeline')} is {self.pipeline}"
        names = f"{spell('pipeline')} x {spell('virtual_pipeline')}"
        return f"{names} = {self.pipeline} x {self.virtual} = {self.pipeline * self.virtual}"

    def _middle(self, layers: int) -> tuple[int, int]:
        """Layers, and stages that share them evenly."""
        own = [*self._own(self.first), *self._own(self.last)]
        return layers - sum(own), self.pipeline - len(own)

    @staticmethod
    def _own(count: int | None) -> list[int]:
        return [] if count is None else [count]

    def _way_out(self, layers: int, spell: Spell) -> str:
        """The nearest split that goes: the shortest longest stage, then the shortest stage that is unlike the others.

        The last stage is the one to change where none was given a number: it has the output layer to compute too.
        """
        if layers % self.virtual:
            return f"set {spell('virtual_pipeline')} to a divisor of {layers}, or leave it out"
        field = "last" if self.first is None else "first"
        choices = [replace(self, **{field: own}) for own in range(self.virtual, layers, self.virtual)]
        choices = [choice for choice in choices if choice.fits(layers)]
        if not choices:
            return f"a stage for each of {layers} layers is the most that there can be, so take fewer"
        best = min(choices, key=lambda choice: (max(choice.counts(layers)), getattr(choice, field)))
        rest, others = best._middle(layers)
        leaves = f", which leaves {rest} over {others}: {rest // others} each" if others else ""
        return f"set {spell(f'{field}_stage_layers')}={getattr(best, field)}{leaves}"
