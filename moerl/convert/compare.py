"""Two models on disk, whatever form each has: every tensor bit by bit, then what they say about random tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moerl.convert.building import Show
from moerl.convert.imports import left_out
from moerl.convert.places import Place
from moerl.convert.transformers_model import transformers_model
from moerl.errors import ConfigError
from moerl.models.hf_folder import WeightSource

MAX_LOGITS = 1 << 24
"""Logits of each model that exist at a time: 64 MiB."""


STRIP_VALUES = 2**22
"""Values of two tensors that are compared at a time."""


@dataclass(frozen=True)
class Difference:
    """One way in which two models differ."""

    name: str
    what: str


@dataclass(frozen=True)
class Gap:
    """Where two models' logits are furthest apart."""

    size: float
    """Their difference, relative to 1 + the largest |logit| after the same token: what rounding grows with."""
    position: int
    """Of the token, from 0, after which they stand."""
    token: int
    """Whose logits they are."""
    logits: tuple[float, float]


@dataclass(frozen=True)
class Forward:
    """What two models said about the same tokens."""

    gap: Gap
    num_logits: int
    """All of the vocabulary, after every token."""
    routes_differing: int
    num_routes: int
    first_route: tuple[int, int] | None
    """Token and MoE layer, from 0, of the first that differs."""
    by: tuple[str, str]
    """Which code ran each."""
    choices: tuple[str, str]
    """What each chooses for a token. Where these differ no routes are compared, and that is a difference."""

    def differences(self, tolerance: float) -> list[Difference]:
        """What is beyond `tolerance` of `gap.size`, and routes that differ."""
        found = []
        if not self.gap.size <= tolerance:  # not a number is beyond everything
            found.append(Difference(f"logit of token {self.gap.token} after position {self.gap.position}", self.told()))
        if self.choices[0] != self.choices[1]:
            found.append(Difference("routes", " and ".join(self.choices)))
        if self.first_route is not None:
            position, layer = self.first_route
            place = f"the first at position {position} in MoE layer {layer}"
            found.append(Difference("routes", f"{self.routes_differing} of {self.num_routes} differ, {place}"))
        return found

    def told(self) -> str:
        """The largest gap in words."""
        first, second = self.gap.logits
        return f"{first:.6g} and {second:.6g}, {self.gap.size:.1e} of 1 + the row's largest"


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
    copies = [place.repeated(allowed) for place in (first, second)]
    for mine, others, place in ((copies[0], copies[1], first), (copies[1], copies[0], second)):
        names = sorted(mine.keys() - others.keys())
        found += [Difference(name, f"only in {place.path}, a copy of {mine[name]}") for name in names]
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
    spare = {str(place.path): left_out(place, source, some, allowed) for place, source, some in places}
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
    number, largest = _gaps(a.reshape(-1), b.reshape(-1))
    types = "" if a.dtype == b.dtype else f"{_word(a)} and {_word(b)}: "
    if not number:
        return Difference(name, f"{types}equal values" if types else "equal values, other bits (zeros or NaNs)")
    return Difference(name, f"{types}{number} of {a.numel()} values differ, by up to {largest:.3g}")


def _gaps(a: Tensor, b: Tensor) -> tuple[int, float]:
    """Values that differ, and by how much at most; in strips, since float64 of all would take many times the tensor."""
    number, largest = 0, 0.0
    for some, others in zip(a.split(STRIP_VALUES), b.split(STRIP_VALUES), strict=True):
        x, y = some.double(), others.double()
        gap = (x - y).abs()
        number += int((~((gap == 0) | (x.isnan() & y.isnan()))).sum())
        largest = max(largest, float(gap.nan_to_num(torch.inf).max())) if len(gap) else largest
    return number, largest


def _bits(tensor: Tensor) -> Tensor:
    """As bytes: NaNs compare, and -0 is not 0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _word(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Said:
    """What one model made of tokens."""

    hidden: Tensor
    """[t, h]: what goes into the head after each token."""
    head: Callable[[Tensor], Tensor]
    """[r, h] -> logits [r, v]."""
    routes: Tensor | None
    """[t, l, k] int64; None where there is none."""


def compare_forwards(
    first: Place, second: Place, *, num_tokens: int, seed: int, allowed: tuple[str, ...] = ()
) -> Forward:
    """Random tokens through both, in float32; a Hugging Face folder through transformers, shards through Megatron.

    Every logit of the vocabulary after every token is compared, and every route. Where both have one form, the second
    one goes through the other code, so that the mapping itself is held to it. `allowed` as in `compare_weights`.

    Raises:
        ConfigError: no tokens, or vocabularies that differ.
        CheckpointError: weights that do not fill a model.
    """
    vocab = [int(place.family.transformer_kwargs(place.hf)["vocab_size"]) for place in (first, second)]
    if vocab[0] != vocab[1]:
        raise ConfigError(f"the vocabularies have {vocab[0]} and {vocab[1]} tokens; no text means the same to both")
    if num_tokens < 1:
        raise ConfigError(f"--tokens is {num_tokens}; it takes at least 1, or --no-forward")
    tokens = torch.randint(vocab[0], (num_tokens,), generator=torch.Generator().manual_seed(seed))
    runners: dict[str, Callable[..., Said]] = {"transformers": _by_transformers, "megatron": _by_megatron}
    own = ["transformers" if place.form == "huggingface" else "megatron" for place in (first, second)]
    if own == ["transformers", "transformers"]:
        own[1] = "megatron"
    a, b = (runners[by](place, tokens, allowed) for by, place in zip(own, (first, second), strict=True))
    at, total, by = torch.zeros(0, 2), 0, (own[0], own[1])
    choices = _choices(a.routes), _choices(b.routes)
    if choices[0] == choices[1] and a.routes is not None and b.routes is not None:
        total = a.routes.numel()
        others = a.routes.sort(-1).values != b.routes.sort(-1).values
        at = torch.nonzero(others)[:, :2]
    where = (int(at[0, 0]), int(at[0, 1])) if len(at) else None
    return Forward(largest_gap(a, b), num_tokens * vocab[0], len(at), total, where, by, choices)


def _choices(routes: Tensor | None) -> str:
    """Of every token, in words."""
    return "no routes" if routes is None else f"{routes.shape[2]} experts in each of {routes.shape[1]} MoE layers"


@torch.no_grad()
def largest_gap(a: Said, b: Said, *, max_logits: int = MAX_LOGITS) -> Gap:
    """Over all positions and tokens of the vocabulary; at most `max_logits` of each exist at a time, or one row.

    A difference that is not a number counts as the largest.
    """
    worst = Gap(-1.0, 0, 0, (0.0, 0.0))
    step = max(1, max_logits // a.head(a.hidden[:1]).shape[-1])
    for start in range(0, len(a.hidden), step):
        rows = slice(start, start + step)
        x, y = a.head(a.hidden[rows]).float(), b.head(b.hidden[rows]).float()
        gaps = (x - y).abs_() / (1 + x.abs().amax(-1, keepdim=True))
        row, token = divmod(int(gaps.argmax()), gaps.shape[1])
        size = float(gaps[row, token])
        if not size <= worst.size:
            worst = Gap(size, start + row, token, (float(x[row, token]), float(y[row, token])))
        if math.isnan(size):
            break
    return worst


def _by_megatron(place: Place, tokens: Tensor, allowed: tuple[str, ...]) -> Said:
    from moerl.mcore.forward import forward_once
    from moerl.mcore.model import ModelSource

    shards = None if place.form == "huggingface" else place.weights
    source = ModelSource(place.settings, place.hf, place.family, shards)
    outcome = forward_once(source, tokens, allowed=allowed)
    return Said(outcome.hidden, lambda rows: rows @ outcome.head.t(), outcome.routes)


@torch.no_grad()
def _by_transformers(place: Place, tokens: Tensor, allowed: tuple[str, ...]) -> Said:
    """What transformers' model does, its head taken apart so that it need not say all at once."""
    model = transformers_model(place, torch.float32, allowed)
    routes: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: routes.append(output[2]))
        for module in _routers(model)
    ]
    try:
        hidden = model.base_model(tokens[None], use_cache=False).last_hidden_state[0]
    finally:
        for hook in hooks:
            hook.remove()
    return Said(hidden, model.get_output_embeddings(), torch.stack(routes, 1) if routes else None)


def _routers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Modules that give (logits, weights, experts), which is what transformers 5 makes of every router."""
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in ("gate", "router") and "Router" in type(module).__name__:
            yield module
