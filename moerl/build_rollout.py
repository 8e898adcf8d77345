"""Composition of the rollout side: tokenizer, data sets, rewards, engines, collector, buffer. Part of `build.py`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from moerl.algorithms.objective import build_objective
from moerl.build_answers import answer_reader, reward_section
from moerl.build_weights import weight_sender
from moerl.config.schema import DatasetConfig, RunConfig
from moerl.data.chat import ChatTokenizer
from moerl.data.prompts import PromptSet, check_disjoint, load_dataset
from moerl.data.templating import PromptTemplate, announcing, resolve_template, rewritten
from moerl.envs import environments
from moerl.errors import ConfigError, DataError
from moerl.evaluate import EvaluationSet, Evaluator
from moerl.metrics import Metrics
from moerl.models.family import family_of
from moerl.models.hf_folder import read_config
from moerl.models.sharded import open_weights
from moerl.protocols import Bounded, Environment, RolloutEngine, Span
from moerl.reference.config import ReferenceConfig
from moerl.reference.sampling import Sampler
from moerl.rewards.pool import SandboxPool
from moerl.rewards.scorer import RewardScorer, build_scorer
from moerl.rollout.collect import MAX_CONCURRENCY, Collector, CollectorHooks
from moerl.rollout.engine import RouteLayout, ServedModel, engines
from moerl.rollout.engines.local_engine import LocalEngine, LocalEngineConfig
from moerl.rollout.loop_thread import LoopThread
from moerl.run_folder import folder_of
from moerl.types import Prompt, RolloutGroup, SamplingParams, Trajectory

logger = logging.getLogger(__name__)

GIVEN = "given"
"""Name of the reward of completions that the file itself gave."""


@dataclass(frozen=True)
class Data:
    """Everything read and checked before any work starts."""

    tokenizer: ChatTokenizer
    train: tuple[PromptSet, ...]
    held_out: tuple[PromptSet, ...]
    scorer: GivenScorer
    reward_weights: dict[str, float]

    def close(self) -> None:
        """Stop the verifier processes."""
        self.scorer.close()


class GivenScorer:
    """Supervised training: what the file's own completions are worth is 1; other data sets go to the real scorer."""

    def __init__(self, inner: RewardScorer, given: frozenset[str]) -> None:
        self._inner = inner
        self._given = given

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Trajectory:
        """Reward 1 under the name `given`, or the inner scorer's verdict."""
        if prompt.dataset in self._given:
            return replace(trajectory, reward=1.0, reward_components={GIVEN: 1.0})
        return await self._inner.score(prompt, trajectory)

    def check_prompts(self, prompts: Iterable[Prompt]) -> list[str]:
        """Only prompts that are really scored need a gold answer."""
        return self._inner.check_prompts(p for p in prompts if p.dataset not in self._given)

    def apart(self) -> GivenScorer:
        """The same with counts of its own."""
        return GivenScorer(self._inner.apart(), self._given)

    def take_metrics(self) -> Metrics:
        """Counts of answers without a verdict since the last call."""
        return self._inner.take_metrics()

    @property
    def pool(self) -> SandboxPool:
        """Of the inner scorer."""
        return self._inner.pool

    def close(self) -> None:
        """Close the inner scorer."""
        self._inner.close()


def is_supervised(cfg: RunConfig) -> bool:
    """Whether the run trains on the file's completions."""
    return cfg.rollout.engine["name"] == "dataset"


def load_data(cfg: RunConfig, *, with_train: bool = True) -> Data:
    """Read every data set, check gold answers and that train and held-out are disjoint.

    Raises:
        DataError: names files and lines.
    """
    tokenizer = ChatTokenizer(cfg.model.path)
    template = resolve_template(cfg.data.template)

    def load(items: Sequence[DatasetConfig], template: PromptTemplate, env: str) -> tuple[PromptSet, ...]:
        sets = (
            load_dataset(
                item,
                tokenizer,
                max_prompt_tokens=cfg.data.max_prompt_tokens,
                on_long_prompt=cfg.data.on_long_prompt,
                template=template,
            )
            for item in items
        )
        return tuple(replace(one, prompts=tuple(replace(p, env=env) for p in one.prompts)) for one in sets)

    train, environment, held_out_environment = (), cfg.rollout.environment["name"], _evaluation_environment(cfg)
    asked = _asked(cfg, template, tokenizer)
    if with_train:
        train = load(cfg.data.train, asked, environment)
    is_same = held_out_environment == environment
    held_out = load(cfg.evaluation.sets, asked if is_same else template, held_out_environment)
    if cfg.data.check_disjoint:
        check_disjoint(train, held_out)
    given = frozenset(item.name for item in train) if is_supervised(cfg) else frozenset()
    inner = build_scorer(reward_section(cfg))
    scorer = GivenScorer(inner, given)
    problems = scorer.check_prompts(p for one in (*train, *held_out) for p in one.prompts)
    if problems:
        scorer.close()
        raise DataError(f"{len(problems)} gold answers cannot be scored:\n  " + "\n  ".join(problems[:20]))
    return Data(tokenizer, train, held_out, scorer, {GIVEN: 1.0} if given else inner.weights)


def reward_weights(cfg: RunConfig) -> dict[str, float]:
    """As in `Data`, on a rank that scores nothing."""
    if is_supervised(cfg):
        return {GIVEN: 1.0}
    scorer = build_scorer(reward_section(cfg))
    scorer.close()
    return scorer.weights


@dataclass(frozen=True)
class RolloutSide:
    """Engines and what asks them."""

    train_engine: RolloutEngine
    eval_engine: RolloutEngine
    collector: Collector
    eval_collector: Collector
    sampling: SamplingParams
    thread: LoopThread | None = None
    """Where everything that asks an engine runs, if generation goes on while the learner trains."""
    eval_scorer: GivenScorer | None = None
    """Of evaluation, where it runs beside training's answers; None: the same."""

    @property
    def engines(self) -> list[RolloutEngine]:
        """Every engine that needs new weights, once."""
        return [self.train_engine] if self.train_engine is self.eval_engine else [self.train_engine, self.eval_engine]

    def close(self) -> None:
        """Close collectors, then engines."""
        self.collector.close()
        self.eval_collector.close()
        for engine in self.engines:
            engine.close()


def build_rollout_side(
    cfg: RunConfig,
    data: Data,
    *,
    load_weights: bool = False,
    on_span: Span | None = None,
    place: Path | None = None,
    elsewhere: Any = None,
) -> RolloutSide:
    """Engines without weights (the first publish brings them), or with those of `model.path`.

    Args:
        cfg: of the run.
        data: read.
        load_weights: into engines of this process.
        on_span: told of every group that is sampled for training.
        place: for evaluation alone: where servers' logs and weights go, in place of the run's folder.
        elsewhere: servers of other nodes, for an engine that takes them.
    """
    plugin, engine_cfg = engines.resolve(cfg.rollout.engine, where="rollout.engine")

    def local(precision: str) -> Sampler:
        model = ReferenceConfig.from_folder(cfg.model.path)  # of fewer families than the learner builds
        sampler = Sampler(model, precision=precision, decode=data.tokenizer.decode)
        if load_weights:
            sampler.load_weights(_weights_of(cfg))
        return sampler

    injected: dict[str, Any] = {"elsewhere": elsewhere} if "elsewhere" in plugin.traits["injects"] else {}
    if "sampler" in plugin.traits["injects"]:
        injected["sampler"] = local(engine_cfg.precision)
    if "completions" in plugin.traits["injects"]:
        injected["completions"] = _completions(data.train)
    if "served_model" in plugin.traits["injects"]:
        model = served_model(cfg)
        injected["served_model"] = replace(model, run_folder=place, wants_routes=False) if place else model
    if "sender" in plugin.traits["injects"]:
        injected["sender"] = weight_sender(cfg, place)
    train_engine: RolloutEngine = plugin.target(engine_cfg, **injected)
    eval_engine = train_engine
    if is_supervised(cfg):
        eval_engine = LocalEngine(LocalEngineConfig(), sampler=local("fp32"))
    sampling = sampling_params(cfg, data.tokenizer)
    at_once = _max_concurrency(eval_engine)
    if cfg.rollout.max_staleness and not load_weights:
        thread = LoopThread()
        # One gate: training's episodes go on meanwhile, and evaluation's are to wait for their turn in front of it.
        gate = asyncio.Semaphore(at_once) if train_engine is eval_engine else None
        hooks, scorer = CollectorHooks(runner=thread, gate=gate), data.scorer.apart()
        collector = _collector(cfg, data, train_engine, hooks, _max_concurrency(train_engine))
        eval_collector = _collector(cfg, replace(data, scorer=scorer), eval_engine, hooks, at_once)
        return RolloutSide(train_engine, eval_engine, collector, eval_collector, sampling, thread, scorer)
    runner = asyncio.Runner()
    # An episode keeps its place while a tool runs, so of those that call some twice as many are let in.
    more = 2 if environments.get(cfg.rollout.environment["name"]).traits.get("multi_turn") else 1
    hooks = CollectorHooks(on_span=on_span, runner=runner)
    collector = _collector(cfg, data, train_engine, hooks, more * _max_concurrency(train_engine))
    eval_collector = _collector(cfg, data, eval_engine, CollectorHooks(runner=runner), at_once)
    return RolloutSide(train_engine, eval_engine, collector, eval_collector, sampling)


def served_model(cfg: RunConfig) -> ServedModel:
    """What an engine of remote servers knows of the model and the run; of every family that the learner builds.

    Raises:
        CheckpointError: config.json is of no such family.
    """
    hf = read_config(cfg.model.path)
    sizes = family_of(hf, cfg.model.family).transformer_kwargs(hf)
    routed = tuple(layer for layer, is_moe in enumerate(sizes["moe_layer_freq"]) if is_moe)
    layout = None
    if routed:
        layout = RouteLayout(sizes["num_layers"], routed, sizes["moe_router_topk"], sizes["num_moe_experts"])
    return ServedModel(
        path=Path(cfg.model.path),
        run_folder=folder_of(cfg),
        vocab_size=sizes["vocab_size"],
        layout=layout,
        wants_routes=cfg.algorithm.routing == "R3",
        longest_tokens=cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens,
    )


def _weights_of(cfg: RunConfig) -> Iterator[tuple[str, Tensor]]:
    """Of `model.path`, plain even where they are quantised there."""
    folder = Path(cfg.model.path)
    hf = read_config(folder)
    source = open_weights(folder, family_of(hf, cfg.model.family), hf)
    return ((name, source.get(name)) for name in sorted(source.names()))


def exported_weights(cfg: RunConfig) -> Iterator[tuple[str, Tensor]]:
    """Of `model.path`, plain, the names that a learner publishes alone."""
    hf = read_config(cfg.model.path)
    wanted = {name for rule in family_of(hf, cfg.model.family).weight_rules(hf) for name in rule.hf_names}
    return ((name, tensor) for name, tensor in _weights_of(cfg) if name in wanted)


def side_with(cfg: RunConfig, data: Data, side: RolloutSide) -> RolloutSide:
    """The same engines asked for other data, as under another prompt template. Its `eval_collector` is to be closed."""
    return replace(
        side,
        eval_collector=_collector(cfg, data, side.eval_engine, None, _max_concurrency(side.eval_engine)),
        sampling=sampling_params(cfg, data.tokenizer),
    )


def sampling_params(cfg: RunConfig, tokenizer: ChatTokenizer) -> SamplingParams:
    """Of training rollouts."""
    reads_likeliest = "rollout_topk" in build_objective(cfg.algorithm).needs
    return SamplingParams(
        max_new_tokens=cfg.rollout.max_new_tokens,
        temperature=cfg.rollout.temperature,
        top_p=cfg.rollout.top_p,
        top_k=cfg.rollout.top_k,
        top_logprobs=cfg.rollout.top_logprobs if reads_likeliest else 0,
        stop_token_ids=tokenizer.stop_token_ids,
        stop_strings=(*cfg.rollout.stop, *resolve_template(cfg.data.template).stop),
    )


def build_evaluator(cfg: RunConfig, data: Data, side: RolloutSide) -> Evaluator:
    """Same engine and rewards as training; greedy, and sampled from the whole distribution.

    Its answers without a verdict are counted under `eval/errors_*`, not among those of the next training step; what its
    rewards measure is dropped, and where training episodes run meanwhile, theirs is not (`Separable`).
    """
    scorer = side.eval_scorer or data.scorer

    def collect(prompts: Sequence[Prompt], **options: Any) -> list[RolloutGroup]:
        groups = side.eval_collector.collect(prompts, **options)
        scorer.take_metrics()
        return groups

    plain = replace(side.sampling, top_p=1.0, top_k=0, top_logprobs=0, return_routes=False)
    return Evaluator(
        sets=[EvaluationSet(one.name, one.prompts) for one in data.held_out],
        collect=collect,
        greedy=replace(plain, temperature=0.0),
        sampled=replace(plain, temperature=cfg.evaluation.temperature),
        num_samples=cfg.evaluation.num_samples,
        pass_at=cfg.evaluation.pass_at,
        maj_at=cfg.evaluation.maj_at,
        best_of=cfg.evaluation.best_of,
        read=answer_reader(cfg),
        max_error_fraction=cfg.reward.max_error_fraction,
    )


def _completions(sets: Sequence[PromptSet]) -> Mapping[str, Any]:
    prompts = [prompt for one in sets for prompt in one.prompts]
    return {p.prompt_id: p.completion_ids for p in prompts if p.completion_ids is not None}


def _asked(cfg: RunConfig, template: PromptTemplate, tokenizer: ChatTokenizer) -> PromptTemplate:
    """`template`, the task rewritten where the environment asks for it in words of its own.

    Raises:
        ConfigError: its arguments are wrong, or the tokenizer lacks a string that it needs.
    """
    plugin, env_cfg = environments.resolve(cfg.rollout.environment, where="rollout.environment")
    if "check" in plugin.traits:
        unknown = [text for text in plugin.traits["check"](env_cfg) if not tokenizer.can_write(text)]
        if unknown:
            raise ConfigError(
                f"rollout.environment ({plugin.name}): the tokenizer of {tokenizer.folder} cannot write "
                f"{', '.join(map(repr, unknown))}; choose markers from its vocabulary"
            )
    if "schemas" in plugin.traits:
        template = announcing(template, plugin.traits["schemas"](env_cfg))
    if "rewrite" not in plugin.traits:
        return template
    return rewritten(template, partial(plugin.traits["rewrite"], env_cfg))


def _evaluation_environment(cfg: RunConfig) -> str:
    """Held-out tasks are asked plainly where the environment is a way of sampling for training."""
    name = cfg.rollout.environment["name"]
    return environments.get(name).traits.get("evaluate_as", name)


def _environments(cfg: RunConfig, data: Data) -> dict[str, Environment]:
    """Of training and of evaluation, by the name in `Prompt.env`."""
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens
    nodes = {
        _evaluation_environment(cfg): {"name": _evaluation_environment(cfg)},
        cfg.rollout.environment["name"]: cfg.rollout.environment,
    }
    given = {
        "decode": data.tokenizer.decode,
        "max_context_tokens": longest,
        "dialogue": data.tokenizer,
        "sandbox": data.scorer.pool,
    }
    made: dict[str, Environment] = {}
    for name, node in nodes.items():
        plugin, env_cfg = environments.resolve(node, where="rollout.environment")
        made[name] = plugin.target(env_cfg, **{word: given[word] for word in plugin.traits["injects"]})
    return made


def _max_concurrency(engine: RolloutEngine) -> int:
    """Episodes that it serves at once, each of which has one request."""
    return engine.max_concurrency if isinstance(engine, Bounded) else MAX_CONCURRENCY


def _collector(
    cfg: RunConfig, data: Data, engine: RolloutEngine, hooks: CollectorHooks | None, max_concurrency: int
) -> Collector:
    return Collector(
        engine=engine,
        environments=_environments(cfg, data),
        scorer=data.scorer,
        run_seed=cfg.run.seed,
        timeout_seconds=cfg.rollout.timeout_seconds,
        max_concurrency=max_concurrency,
        hooks=hooks,
    )
