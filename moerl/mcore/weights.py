"""A family's rules x the parallel layout: fill the model from a Hugging Face folder, stream it out in its names."""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.errors import CheckpointError, ConfigError
from moerl.mcore.model import VOCAB_MULTIPLE, ModelSource, unwrap
from moerl.mcore.parallel import Axis, ParallelState
from moerl.mcore.te_names import local_name
from moerl.mcore.wire import gather_json
from moerl.models.disk import fused_stream
from moerl.models.hf_folder import checked_source
from moerl.models.rules import Rule, match_parameters, shift_indices, shorten
from moerl.models.sharded import open_weights

logger = logging.getLogger(__name__)

DEFAULT_INIT_STD = 0.02
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
BACKBONE = ("embedding.", "decoder.")
"""Megatron names of everything but the output layer start so."""


class _Reader(Protocol):
    """Whole tensors by Hugging Face name."""

    def get(self, name: str) -> Tensor:
        """The tensor, on the CPU."""
        ...


class WeightMap:
    """Which rule each local parameter follows."""

    def __init__(
        self,
        source: ModelSource,
        chunks: Sequence[torch.nn.Module],
        parallel: ParallelState,
        *,
        has_head: bool = True,
        routers_as_stored: bool = False,
    ) -> None:
        """Match every parameter (and balancing bias) of `chunks` with a rule.

        With `routers_as_stored` the routers become float32 where the folder of `source` has them so: rounding them
        changes which experts a token goes to. Only before DDP is around `chunks`, whose hooks know the old type.

        Without `has_head` only those of the embedding and the decoder: what predicts tokens is not part of `chunks`,
        and what they have in its place is not of the family.

        Raises:
            CheckpointError: a parameter that no rule makes, or on a rank that holds the whole model, the reverse.
        """
        self._source = source
        self._parallel = parallel
        rules = source.family.weight_rules(source.hf, vocab_multiple=VOCAB_MULTIPLE)
        self.rules: list[Rule] = [rule for rule in rules if has_head or rule.megatron_name.startswith(BACKBONE)]
        self.local: dict[str, Tensor] = {}
        """Global megatron name -> this rank's part."""
        is_tied = source.kwargs["share_embeddings_and_output_weights"]
        experts = int(source.kwargs.get("num_moe_experts") or 0) // parallel.ep.size * parallel.ep.rank
        for chunk in chunks:
            model = unwrap(chunk)
            layers: Any = model.decoder.layers
            offsets = [layer.layer_number - 1 - i for i, layer in enumerate(layers)]
            biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(".expert_bias")]
            for name, tensor in [*model.named_parameters(), *biases]:
                if not has_head and not name.startswith(BACKBONE):
                    continue
                if is_tied and name == OUTPUT:  # the last stage's copy; megatron adds up the gradients of the two
                    name = EMBEDDING  # noqa: PLW2901
                found = re.match(r"decoder\.layers\.(\d+)\.", name)
                offset = offsets[int(found[1])] if found else 0
                self.local[shift_indices(local_name(name), layers=offset, experts=experts)] = tensor
        is_complete = parallel.pp.size == parallel.ep.size == 1
        match_parameters(self.rules, self.local, is_complete=is_complete)
        if routers_as_stored:
            self._widen_routers()
        self._holders, self._dtypes = self._find_holders()

    def _widen_routers(self) -> None:
        weights = open_weights(self._source.folder, self._source.family, self._source.hf, shards=self._source.shards)
        names = weights.names()
        for rule in self.rules:
            tensor = self.local.get(rule.megatron_name)
            if tensor is None or not _is_router(rule):
                continue
            stored = [weights.dtype(name) for name in rule.hf_names if name in names]  # what lacks is told at loading
            if any(torch.promote_types(dtype, tensor.dtype) != tensor.dtype for dtype in stored):
                tensor.data = tensor.data.float()

    def _find_holders(self) -> tuple[dict[str, list[int]], dict[str, torch.dtype]]:
        """Global name -> the ranks that hold a part of it, and its type."""
        mine = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self.local.items()}
        holders: dict[str, list[int]] = {}
        words: dict[str, str] = {}
        for rank, held in enumerate([mine] if self._parallel.world_size == 1 else gather_json(mine)):
            words |= held
            for name in held:
                holders.setdefault(name, []).append(rank)
        return holders, {name: getattr(torch, word) for name, word in words.items()}

    def _axis(self, rule: Rule) -> Axis:
        return self._parallel.etp if rule.is_expert else self._parallel.tp

    def load_hf(self, source: ModelSource | None = None, *, allowed: Iterable[str] = ()) -> None:
        """Fill every local parameter, in its own type, from the folder (of `source`, of the same shape, if given).

        Routers that are rounded by it are named in a warning.

        `allowed`: regular expressions of names that may be left out.

        Raises:
            CheckpointError: a missing, left-over or mis-shaped tensor; a parameter that is not finite afterwards.
        """
        source = self._source if source is None else source
        weights = open_weights(source.folder, source.family, source.hf, shards=source.shards)
        rounded = self._fill(checked_source(weights, source.family, source.hf, allowed))
        if rounded and self._parallel.dp_cp.rank == self._parallel.tp.rank == 0:  # one rank of every stage
            logger.warning(
                "%s: routers are rounded from the type of their files (%s); tokens whose experts nearly tie go "
                "to others, and what is saved and sent is rounded too. Set precision.params=fp32, or take a model.path "
                "with float32 routers",
                source.folder,
                shorten(rounded),
            )

    def initialize(self, seed: int) -> None:
        """Fresh weights: norms 1, biases 0, everything else normal; the same for every parallel layout."""
        std = float(self._source.hf.get("initializer_range") or DEFAULT_INIT_STD)
        self._fill(_RandomTensors(self.rules, seed, std))

    @torch.no_grad()
    def _fill(self, reader: _Reader) -> list[str]:
        """The names of routers that have been rounded."""
        rounded = []
        for tensor in self.local.values():
            tensor.fill_(float("nan"))
        for rule in self.rules:
            target = self.local.get(rule.megatron_name)
            if target is not None:
                whole = rule.to_megatron({name: reader.get(name) for name in rule.hf_names})
                axis = self._axis(rule)
                part = rule.shard(whole, axis.rank, axis.size)
                target.copy_(part)
                if _is_router(rule) and not torch.equal(part, target.to(part.device, part.dtype)):
                    rounded += rule.hf_names
        broken = [name for name, tensor in self.local.items() if not bool(torch.isfinite(tensor).all())]
        if broken:
            raise CheckpointError(
                f"{self._source.folder}: parameters unfilled or not finite after loading: {shorten(broken)}; "
                "the weights are damaged"
            )
        return rounded

    def parameters(self) -> dict[str, Tensor]:
        """`local` without buffers: what an optimizer may move."""
        return {name: tensor for name, tensor in self.local.items() if isinstance(tensor, torch.nn.Parameter)}

    def gradients(self) -> dict[str, Tensor]:
        """Of `parameters`: float32, as DDP adds them up; 0 of what is not trained."""
        found: dict[str, Tensor] = {}
        for name, tensor in self.parameters().items():
            if tensor.requires_grad:
                found[name] = tensor.main_grad  # pyright: ignore[reportAttributeAccessIssue] set by DDP
            else:
                found[name] = torch.zeros_like(tensor, dtype=torch.float32)
        return found

    def export(self, tensors: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) of every weight, in the order of the rules; every rank gets every tensor.

        `tensors` (global megatron name -> local part, float32) takes the place of the weights: gradients, which
        buffers have not, travel the same way.
        On one process the tensors may be views of live parameters: copy what must outlast the next update.
        """
        family, hf = self._source.family, self._source.hf
        yield from fused_stream(self._export(tensors), family, hf) if family.is_fused_on_disk else self._export(tensors)

    def _export(self, tensors: Mapping[str, Tensor] | None) -> Iterator[tuple[str, Tensor]]:
        local = self.local if tensors is None else tensors
        for rule in self.rules:
            if rule.is_buffer and tensors is not None:
                continue
            part = local.get(rule.megatron_name)
            dtype = self._dtypes[rule.megatron_name] if tensors is None else torch.float32
            whole = self._gather(rule, None if part is None else part.detach(), dtype)
            if whole is not None:
                yield from rule.to_hf(whole).items()

    def _gather(self, rule: Rule, part: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if self._parallel.world_size == 1:
            return None if part is None else rule.gather([part])
        holders = self._holders[rule.megatron_name]
        whole = None
        if part is not None:
            axis = self._axis(rule)
            shards = [torch.empty_like(part) for _ in range(axis.size)]
            dist.all_gather(shards, part.contiguous(), group=axis.group)
            whole = rule.gather(shards).contiguous()
        if len(holders) == self._parallel.world_size:
            return whole
        if whole is None:
            whole = torch.empty(rule.megatron_shape(), dtype=dtype, device=torch.cuda.current_device())
        dist.broadcast(whole, src=holders[0])
        return whole

    def freeze(self, patterns: Sequence[str], *, routers: bool) -> None:
        """Exclude from training what fully matches a pattern (Hugging Face names), and with `routers` the gates.

        Raises:
            ConfigError: a pattern that matches nothing, or only a part of what Megatron fuses into one parameter.
        """
        compiled = {pattern: re.compile(pattern) for pattern in patterns}
        used: set[str] = set()
        for rule in self.rules:
            hits = {p: [n for n in rule.hf_names if regex.fullmatch(n)] for p, regex in compiled.items()}
            used |= {pattern for pattern, names in hits.items() if names}
            covered = {name for names in hits.values() for name in names}
            if covered and covered != set(rule.hf_names):
                raise ConfigError(
                    f"model.freeze covers {sorted(covered)} but Megatron fuses {list(rule.hf_names)} into one "
                    "parameter; freeze all of them or none"
                )
            is_router = routers and ".router." in rule.megatron_name
            tensor = self.local.get(rule.megatron_name)
            if (covered or is_router) and isinstance(tensor, torch.nn.Parameter):
                tensor.requires_grad_(False)
        unused = sorted(set(patterns) - used)
        if unused:
            raise ConfigError(
                f"model.freeze: {unused[0]!r} matches no weight; patterns must match whole Hugging Face names"
            )


class _RandomTensors:
    """Seeded initial values by Hugging Face name."""

    def __init__(self, rules: Sequence[Rule], seed: int, std: float) -> None:
        self._shapes = {n: s for rule in rules for n, s in zip(rule.hf_names, rule.hf_shapes, strict=True)}
        self._seed = seed
        self._std = std

    def get(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape) if _is_norm(name) else torch.zeros(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed}/{name}".encode()))
        return torch.randn(shape, generator=generator) * self._std


def _is_router(rule: Rule) -> bool:
    """Of parameters; the balancing bias is a buffer, and float32 everywhere."""
    return ".router." in rule.megatron_name and not rule.is_buffer


def _is_norm(name: str) -> bool:
    """Of a one-dimensional weight; the others are biases and attention sinks."""
    return "norm" in name and name.endswith("weight")
