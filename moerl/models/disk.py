"""Which tensors a family's files hold: those of its rules, or fused ones that several of them are parts of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from moerl.models.family import FusedSlice, HFConfig, ModelFamily
from moerl.models.rules import Rule, Shape


@dataclass(frozen=True, slots=True)
class DiskTensor:
    """One tensor of a file."""

    name: str
    shape: Shape
    rule: Rule
    """Of its first part."""
    parts: tuple[str, ...] = ()
    """Names of the rules' tensors that are stacked along its first axis; empty: it is the rule's own."""

    def make(self, get: Callable[[str], Tensor]) -> Tensor:
        """From the rules' tensors by name; of parts one exists at a time, beside the whole."""
        if not self.parts:
            return get(self.name)
        first = get(self.parts[0])
        whole = first.new_empty((len(self.parts), *first.shape))
        whole[0] = first
        del first
        for i, part in enumerate(self.parts[1:], 1):
            whole[i] = get(part)
        return whole

    @property
    def first(self) -> str:
        """A name of the rules that has its type."""
        return self.parts[0] if self.parts else self.name


def disk_tensors(family: ModelFamily, hf: HFConfig) -> Iterator[DiskTensor]:
    """In the order of the rules; a fused one where its first part is."""
    slices = family.fused_slices(hf) if family.is_fused_on_disk else {}
    parts: dict[str, list[tuple[int, str]]] = {}
    for part, place in slices.items():
        parts.setdefault(place.name, []).append((_expert(place), part))
    for rule in family.weight_rules(hf):
        for name, shape in zip(rule.hf_names, rule.hf_shapes, strict=True):
            place = slices.get(name)
            if place is None:
                yield DiskTensor(name, shape, rule)
            elif _expert(place) == 0:
                ordered = tuple(part for _, part in sorted(parts[place.name]))
                yield DiskTensor(place.name, (len(ordered), *shape), rule, ordered)


def fused_stream(
    stream: Iterable[tuple[str, Tensor]], family: ModelFamily, hf: HFConfig
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of rules -> of files; a fused tensor comes when its last part has come, and is a copy."""
    whole = {part: tensor for tensor in disk_tensors(family, hf) for part in tensor.parts}
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stream:
        if name not in whole:
            yield name, tensor
            continue
        held = waiting.setdefault(whole[name].name, {})
        held[name] = tensor
        if len(held) == len(whole[name].parts):
            yield whole[name].name, whole[name].make(waiting.pop(whole[name].name).__getitem__)


def _expert(place: FusedSlice) -> int:
    assert place.expert is not None  # nothing is stored under one name and written under another
    return place.expert
