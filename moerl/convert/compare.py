"""Two models on disk, whatever form each has: every tensor bit by bit, then what they say about random tokens."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moerl.convert.building import Show
from moerl.convert.imports import left_out
from moerl.convert.places import Place
from moerl.convert.transformers_model import transformers_model
from moerl.errors import ConfigError
from moerl.models.hf_folder import WeightSource

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_PROBES = 4096
"""Tokens of the vocabulary whose logprobs are compared after each position."""


@dataclass(frozen=True)
class Difference:
    """One way in which two models differ."""

    name: str
    what: str


@dataclass(frozen=True)
class Forward:
    """What two models said about the same tokens."""

    logprob_gap: float
    """Largest difference, relative to 1 + |logprob|."""
    num_logprobs: int
    routes_differing: int
    num_routes: int
    by: tuple[str, str]
    """Which code ran each."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of `compare`."""

    differences: list[Difference]
    num_tensors: int
    num_bytes: int
    forward: Forward | None = None
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Path -> tensors that no parameter is made of and that are not carried."""
    num_carried: int = 0
    """Of `num_tensors`: those that no parameter is made of and that go with the model."""


def compare_weights(
    first: Place, second: Place, *, threads: int = 1, show: Show | None = None, allowed: tuple[str, ...] = ()
) -> Verdict:
    """Every tensor of two models under its Hugging Face name, carried ones too: presence, shape, type, and bits.

    Raises:
        CheckpointError: either cannot be read whole.
    """
    settings = [place.family.transformer_kwargs(place.hf) for place in (first, second)]
    odd = sorted(k for k in settings[0] | settings[1] if settings[0].get(k) != settings[1].get(k))
    found = [Difference(f"config.json: {key}", f"{settings[0].get(key)!r} and {settings[1].get(key)!r}") for key in odd]
    sources = first.open(allowed), second.open(allowed)
    rules = [
        {name for rule in place.family.weight_rules(place.hf) for name in rule.hf_names} for place in (first, second)
    ]
    found += [Difference(name, f"only in {first.path}") for name in sorted(rules[0] - rules[1])]
    found += [Difference(name, f"only in {second.path}") for name in sorted(rules[1] - rules[0])]
    carried = first.carried(allowed), second.carried(allowed)
    plain = carried[0].plain(), carried[1].plain()
    for names, place in zip(_only(plain), (first, second), strict=True):
        found += [Difference(name, f"carried only by {place.path}") for name in names]
    common = [name for rule in first.family.weight_rules(first.hf) for name in rule.hf_names if name in rules[1]]
    pairs = [(name, *sources) for name in common]
    pairs += [(name, *plain) for name in sorted(plain[0].names() & plain[1].names())]
    sizes = [_num_bytes(one, name) for name, one, _ in pairs]
    if show is not None:
        show.begin(sum(sizes), 0)

    def judge(pair: tuple[str, WeightSource, WeightSource]) -> Difference | None:
        outcome = _difference(*pair)
        if show is not None:
            show.advance(_num_bytes(pair[1], pair[0]))
        return outcome

    with ThreadPoolExecutor(max_workers=threads) as pool:
        found += [difference for difference in pool.map(judge, pairs) if difference is not None]
    places = zip((first, second), sources, carried, strict=True)
    spare = {str(place.path): left_out(place, source, some) for place, source, some in places}
    return Verdict(
        found,
        len(pairs),
        sum(sizes),
        left_out={path: names for path, names in spare.items() if names},
        num_carried=len(pairs) - len(common),
    )


def _only(sources: tuple[WeightSource, WeightSource]) -> tuple[list[str], list[str]]:
    """Names that each has and the other lacks."""
    first, second = (source.names() for source in sources)
    return sorted(first - second), sorted(second - first)


def _num_bytes(source: WeightSource, name: str) -> int:
    return torch.Size(source.shape(name)).numel() * source.dtype(name).itemsize


def _difference(name: str, first: WeightSource, second: WeightSource) -> Difference | None:
    shapes = first.shape(name), second.shape(name)
    if shapes[0] != shapes[1]:
        return Difference(name, f"shape {list(shapes[0])} and {list(shapes[1])}")
    a, b = first.get(name), second.get(name)
    if a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)):
        return None
    gap = (a.double() - b.double()).abs()
    number = int((~((gap == 0) | (a.double().isnan() & b.double().isnan()))).sum())
    types = "" if a.dtype == b.dtype else f"{_word(a)} and {_word(b)}: "
    if not number:
        return Difference(name, f"{types}equal values" if types else "equal values, other bits (zeros or NaNs)")
    largest = float(gap.nan_to_num(torch.inf).max())
    return Difference(name, f"{types}{number} of {a.numel()} values differ, by up to {largest:.3g}")


def _bits(tensor: Tensor) -> Tensor:
    """As bytes: NaNs compare, and -0 is not 0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _word(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def compare_forwards(
    first: Place, second: Place, *, num_tokens: int, seed: int, allowed: tuple[str, ...] = ()
) -> Forward:
    """Random tokens through both, in float32; a Hugging Face folder through transformers, shards through Megatron.

    Where both have one form, the second one goes through the other code, so that the mapping itself is held to it.
    `allowed` as in `compare_weights`.

    Raises:
        ConfigError: fewer than 2 tokens, or vocabularies that differ.
        CheckpointError: weights that do not fill a model.
    """
    vocab = [int(place.family.transformer_kwargs(place.hf)["vocab_size"]) for place in (first, second)]
    if vocab[0] != vocab[1]:
        raise ConfigError(f"the vocabularies have {vocab[0]} and {vocab[1]} tokens; no text means the same to both")
    if num_tokens < 2:
        raise ConfigError(f"--tokens is {num_tokens}; it takes at least 2 for one to be predicted")
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab[0], (num_tokens,), generator=generator)
    probes = torch.randperm(vocab[0], generator=generator)[:MAX_PROBES]
    runners: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {"transformers": _by_transformers}
    runners["megatron"] = _by_megatron
    own = ["transformers" if place.form == "huggingface" else "megatron" for place in (first, second)]
    if own == ["transformers", "transformers"]:
        own[1] = "megatron"
    outputs = [runners[by](place, tokens, probes, allowed) for by, place in zip(own, (first, second), strict=True)]
    (a, routes_a), (b, routes_b) = outputs
    gap = float(((a - b).abs() / (1 + a.abs())).max())
    differing = total = 0
    if routes_a is not None and routes_b is not None:
        total = routes_a.numel()
        differing = int((routes_a.sort(-1).values != routes_b.sort(-1).values).sum())
    return Forward(gap, a.numel(), differing, total, (own[0], own[1]))


def _by_megatron(
    place: Place, tokens: Tensor, probes: Tensor, allowed: tuple[str, ...]
) -> tuple[Tensor, Tensor | None]:
    from moerl.mcore.forward import forward_once
    from moerl.mcore.model import ModelSource

    shards = None if place.form == "huggingface" else place.weights
    return forward_once(ModelSource(place.settings, place.hf, place.family, shards), tokens, probes, allowed=allowed)


@torch.no_grad()
def _by_transformers(
    place: Place, tokens: Tensor, probes: Tensor, allowed: tuple[str, ...]
) -> tuple[Tensor, Tensor | None]:
    model = transformers_model(place, torch.float32, allowed)
    routes: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: routes.append(output[2]))
        for module in _routers(model)
    ]
    try:
        logits = model(tokens[None], use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    logprobs = logits[:-1].float().log_softmax(-1).index_select(-1, probes)
    return logprobs, torch.stack(routes, 1) if routes else None


def _routers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Modules that give (logits, weights, experts), which is what transformers 5 makes of every router."""
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in ("gate", "router") and "Router" in type(module).__name__:
            yield module
