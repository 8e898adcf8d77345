"""Rules across fields: one small function each, one message per fault, all of them reported together before
anything heavy is imported. Algorithms sit above this room, so their own rules are handed in as `extra_rules`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moerl.config import group_rules, parallel_rules, rollout_rules
from moerl.config.choices import bound_errors, choice_errors
from moerl.config.layout import parallel_axes
from moerl.config.load import as_dict
from moerl.config.schema import DatasetConfig, RunConfig
from moerl.errors import ConfigError

SGLANG_MASK_TOKENS = 4096
"""SGLang's default of `--sampling-mask-max-tokens`."""

ExtraRule = Callable[[Mapping[str, Any]], list[str]]
"""Takes the whole configuration as nested plain values; returns one message per fault."""


def check(cfg: RunConfig, *, world_size: int = 1, extra_rules: Sequence[ExtraRule] = ()) -> None:
    """Refuse an impossible configuration.

    Raises:
        ConfigError: lists every fault, each with its fields, the values seen, what is allowed and what to do.
    """
    faults = config_errors(cfg, world_size=world_size, extra_rules=extra_rules)
    if faults:
        raise ConfigError(*faults)


def config_errors(cfg: RunConfig, *, world_size: int = 1, extra_rules: Sequence[ExtraRule] = ()) -> list[str]:
    """Every fault, in the order of the schema's sections, each once."""
    values = as_dict(cfg)
    faults = [*choice_errors(values), *bound_errors(values), *parallel_axes(cfg, world_size)]
    for rule in RULES:
        faults += rule(cfg)
    for extra in extra_rules:
        faults += extra(values)
    return list(dict.fromkeys(faults))


def run_name(cfg: RunConfig) -> Iterator[str]:
    """The name becomes one folder."""
    name = cfg.run.name
    if not name.strip() or name != name.strip() or name in {".", ".."} or "/" in name or "\\" in name or "\0" in name:
        yield f"run.name is {name!r}, but must be the name of one folder inside run.output_dir (no slashes, not empty)"


def freeze_patterns(cfg: RunConfig) -> Iterator[str]:
    """Each must be a regular expression."""
    for pattern in cfg.model.freeze:
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"model.freeze holds {pattern!r}, which is not a regular expression ({error})"


def dropout(cfg: RunConfig) -> Iterator[str]:
    """Dropout makes the ratio of an unchanged policy differ from 1."""
    for name, value in (("attention", cfg.model.attention_dropout), ("hidden", cfg.model.hidden_dropout)):
        if value > 0 and cfg.algorithm.level != "none":
            yield (
                f"model.{name}_dropout is {value} with algorithm.level={cfg.algorithm.level}: a ratio compares two "
                "passes, which dropout would make differ; set it to 0 (dropout is for supervised training, "
                "algorithm.level=none)"
            )


def router_bias(cfg: RunConfig) -> Iterator[str]:
    """The balancing bias follows the loads that the routers' own choice makes."""
    rate, routing = cfg.model.router_bias_update_rate, cfg.algorithm.routing
    if rate > 0 and routing != "none":
        yield (
            f"model.router_bias_update_rate is {rate} with algorithm.routing {routing!r}: loads would be those of "
            "recorded routes, or of routers that must not move; set it to 0, or algorithm.routing to none"
        )


def datasets(cfg: RunConfig) -> Iterator[str]:
    """Something to train on; names once, over both lists; weights and limits that mean something."""
    if not cfg.data.train:
        yield "data.train is empty; name at least one data set, such as [{name: mine, source: {path: mine.jsonl}}]"
    for where, sets in (("data.train", cfg.data.train), ("evaluation.sets", cfg.evaluation.sets)):
        names = [item.name for item in sets]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"{where} has {names.count(name)} data sets called {name!r}; give each its own name"
        for index, item in enumerate(sets):
            yield from _one_dataset(item, f"{where}[{index}]")
    for name in sorted({item.name for item in cfg.data.train} & {item.name for item in cfg.evaluation.sets}):
        yield (
            f"data.train and evaluation.sets both have a data set called {name!r}, but rewards tell data sets apart by "
            f"their names: call the one in evaluation.sets otherwise, such as {name}_heldout, also where a reward's "
            "datasets name it"
        )


def _one_dataset(item: DatasetConfig, where: str) -> Iterator[str]:
    if not item.name or not re.fullmatch(r"[\w.\-]+", item.name):
        yield (
            f"{where}.name is {item.name!r}, but must be letters, digits, '_', '-' or '.', as it becomes part of "
            f"metric names"
        )
    if not (math.isfinite(item.weight) and item.weight > 0):
        yield (
            f"{where}.weight is {item.weight!r}, but must be a finite number above 0; take the set out of the list to "
            "leave it out"
        )
    if item.limit is not None and item.limit < 1:
        yield f"{where}.limit is {item.limit}, but must be at least 1, or null for every prompt"


def temperature(cfg: RunConfig) -> Iterator[str]:
    """Training divides logits by it."""
    value = cfg.rollout.temperature
    if not (math.isfinite(value) and value > 0):
        yield (
            f"rollout.temperature is {value!r}, but training needs a finite number above 0, as log-probabilities are "
            "taken at the sampling temperature (greedy answers belong to the evaluation, which always measures them)"
        )


def stop_strings(cfg: RunConfig) -> Iterator[str]:
    """An empty one would end every answer at once."""
    if any(not text for text in cfg.rollout.stop):
        yield f"rollout.stop is {cfg.rollout.stop!r}, but a stop string must not be empty"


def critic(cfg: RunConfig) -> Iterator[str]:
    """The policy must get a step."""
    steps = cfg.algorithm.critic.pretrain_steps
    if cfg.algorithm.critic.init != "none" and steps >= cfg.run.num_steps:
        yield (
            f"algorithm.critic.pretrain_steps is {steps}, but must be below run.num_steps, {cfg.run.num_steps}, which "
            "counts them: the policy would never train"
        )


def minibatches(cfg: RunConfig) -> Iterator[str]:
    """Each optimizer step needs at least one prompt."""
    if cfg.batch.num_minibatches > cfg.rollout.prompts_per_step:
        yield (
            f"batch.num_minibatches is {cfg.batch.num_minibatches}, but must be at most rollout.prompts_per_step, "
            f"{cfg.rollout.prompts_per_step}; every minibatch needs a prompt"
        )


def sglang(cfg: RunConfig) -> Iterator[str]:
    """Servers that are there or are launched, and answers whose logprobs and routes are the sampling policy's."""
    engine = cfg.rollout.engine
    if engine.get("name") != "sglang":
        return
    if bool(engine.get("urls")) == (engine.get("servers") is not None):
        yield (
            "rollout.engine=sglang needs either urls of servers that run, such as "
            "{name: sglang, urls: ['http://127.0.0.1:30000']}, or servers, to launch some ({name: sglang, servers: {}})"
        )
    routing, mode = cfg.algorithm.routing, engine.get("pause_mode", "abort")
    if routing == "R3" and mode != "abort":
        yield (
            f"rollout.engine.pause_mode is {mode!r} with algorithm.routing=R3: a request that goes on over an update "
            "brings routes that newer weights made, for tokens that older ones sampled; set it to abort"
        )
    if routing == "R3" and engine.get("routes", "auto") == "never":
        yield "rollout.engine.routes is never, but algorithm.routing=R3 replays the engine's routes: set it to auto"
    given = engine.get("servers")
    servers = given if isinstance(given, Mapping) else {}
    if (quantised := servers.get("quantization", "none")) != "none":
        yield (
            f"rollout.engine.servers.quantization is {quantised!r}, but SGLang quantises once, as it loads: weights of "
            "an update find parameters of another kind. Set it to none; a folder in FP8 says so itself, and "
            "weight_sync.precision=fp8_block sends what it holds"
        )
    limit = SGLANG_MASK_TOKENS
    if servers.get("sampling_mask_max_tokens"):
        limit = min(limit, int(servers["sampling_mask_max_tokens"]))
    if cfg.rollout.top_k > limit:
        yield (
            f"rollout.top_k is {cfg.rollout.top_k}, but SGLang tells the tokens in the running, which the logprob of "
            f"the sampled one needs, for at most {limit}: lower it, or set it to 0"
        )
    if cfg.rollout.top_p < 1 and cfg.rollout.top_k == 0 and limit < SGLANG_MASK_TOKENS:
        yield (
            f"rollout.top_p is {cfg.rollout.top_p:g} without top_k, which asks for {SGLANG_MASK_TOKENS} tokens in the "
            f"running, but servers.sampling_mask_max_tokens is {limit}: leave it out, or set rollout.top_k within it"
        )


def supervised(cfg: RunConfig) -> Iterator[str]:
    """The `dataset` engine hands out completions that no policy sampled, and `sft` trains on nothing else."""
    from_file = cfg.rollout.engine.get("name") == "dataset"
    algorithm = cfg.algorithm
    if algorithm.preset == "sft" and not from_file:
        yield (
            f"algorithm.preset=sft trains on the file's completions: set rollout.engine=dataset, not "
            f"{cfg.rollout.engine.get('name')}"
        )
    if not from_file:
        return
    if algorithm.level != "none":
        yield (
            "rollout.engine=dataset has no sampling policy to take a ratio to, but algorithm.level is "
            f"{algorithm.level}: set algorithm.preset=sft"
        )
    if (correction := algorithm.correction.get("name", "none")) != "none":
        yield (
            f"rollout.engine=dataset has no logprobs of a sampling policy, but algorithm.correction={correction} "
            "compares with them and would reject every token: set it to none"
        )
    if algorithm.routing in {"R2", "R3"}:
        yield f"rollout.engine=dataset records no routes, but algorithm.routing is {algorithm.routing}: set it to none"
    if cfg.rollout.group_size != 1:
        yield (
            f"rollout.engine=dataset has one completion per prompt, but rollout.group_size is "
            f"{cfg.rollout.group_size}: set it to 1"
        )


def rewards(cfg: RunConfig) -> Iterator[str]:
    """Each prompt that is sampled, in training or evaluation, needs something that scores it."""
    nodes = cfg.reward.rewards
    sampled = [] if cfg.rollout.engine.get("name") == "dataset" else [item.name for item in cfg.data.train]
    held_out = [item.name for item in cfg.evaluation.sets]
    if not nodes:
        if sampled or held_out:
            yield "reward.rewards is empty; name at least one, such as [{name: math_verify}] or [{name: exact_match}]"
        return
    known = {item.name for item in cfg.data.train} | set(held_out)
    covered: set[str] = set()
    weights = []
    for index, node in enumerate(nodes):
        where = f"reward.rewards[{index}] ({node.get('name')})"
        weight = node.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            yield f"{where}.weight is {weight!r}, but must be a finite number"
            continue
        weights.append(weight)
        chosen = node.get("datasets")
        if chosen is not None and (not isinstance(chosen, list) or not all(isinstance(item, str) for item in chosen)):
            yield f"{where}.datasets is {chosen!r}, but must be a list of data set names"
            continue
        for name in sorted(set(chosen or ()) - known):
            yield f"{where}.datasets names {name!r}, but the data sets are {', '.join(sorted(known))}"
        covered |= known if not chosen else set(chosen)
    for name in dict.fromkeys([*sampled, *held_out]):
        if name not in covered:
            yield f"no reward of reward.rewards applies to data set {name!r}; add it to a reward's datasets"
    if len(weights) == len(nodes) and not any(weights):
        yield "reward.rewards: every weight is 0, so that nothing is learned; set one above 0"


def optimizer_state(cfg: RunConfig) -> Iterator[str]:
    """What megatron can distribute and offload."""
    optim = cfg.optim
    if optim.distributed and optim.name != "adam":
        yield (
            f"optim.distributed is true with optim.name={optim.name}, which has no state to distribute; set "
            "optim.distributed=false"
        )
    if optim.cpu_offload and not optim.distributed:
        yield (
            "optim.cpu_offload is true without optim.distributed: megatron offloads what its distributed optimizer "
            "holds; set optim.distributed=true"
        )


def schedule(cfg: RunConfig) -> Iterator[str]:
    """A decay must end after it starts, and a bound that nothing reads is a mistake."""
    optim = cfg.optim
    if optim.schedule == "constant":
        if optim.decay_steps is not None:
            yield (
                f"optim.decay_steps is {optim.decay_steps} with optim.schedule=constant, which has none: set it to null"
            )
        return
    start = max(optim.warmup_steps, optim.constant_steps)
    last = cfg.algorithm.critic.policy_steps(cfg.run.num_steps)
    end = last if optim.decay_steps is None else optim.decay_steps
    if start >= end:
        own = " less algorithm.critic.pretrain_steps" * (last < cfg.run.num_steps)
        name = "run.num_steps" + own if optim.decay_steps is None else "optim.decay_steps"
        yield (
            f"optim.warmup_steps={optim.warmup_steps} and optim.constant_steps={optim.constant_steps} start the "
            f"{optim.schedule} decay at step {start}, but it ends at {name}={end}; make the end later, or "
            "optim.schedule=constant"
        )


def pass_at(cfg: RunConfig) -> Iterator[str]:
    """pass@k, maj@k and best-of-k need k samples."""
    section = cfg.evaluation
    for name, ks in (("pass_at", section.pass_at), ("maj_at", section.maj_at), ("best_of", section.best_of)):
        wrong = [k for k in ks if not 1 <= k <= section.num_samples]
        if wrong:
            yield (
                f"evaluation.{name} holds {wrong}, but each k must be between 1 and evaluation.num_samples, "
                f"{section.num_samples}"
            )


def refilter(cfg: RunConfig) -> Iterator[str]:
    """A band, and answers that can be right or wrong."""
    section = cfg.data.refilter
    if section.low > section.high:
        yield f"data.refilter.low is {section.low}, but must be at most data.refilter.high, {section.high}"
    if section.every_steps and cfg.rollout.engine.get("name") == "dataset":
        yield (
            f"data.refilter.every_steps is {section.every_steps} with rollout.engine=dataset, whose completions "
            "have no pass rate: set it to 0"
        )


def text_metrics(cfg: RunConfig) -> Iterator[str]:
    """Sizes of n-grams, and words that are there."""
    wrong = [n for n in cfg.telemetry.ngrams if n < 1]
    if wrong:
        yield f"telemetry.ngrams holds {wrong}, but each n must be at least 1"
    if any(not word.strip() for word in cfg.telemetry.reflection_words):
        yield f"telemetry.reflection_words is {cfg.telemetry.reflection_words!r}, but a word must not be empty"


def profile(cfg: RunConfig) -> Iterator[str]:
    """A window that no step is in is a mistake."""
    window = cfg.telemetry.profile
    if window.num_steps and window.start_step > cfg.run.num_steps:
        yield (
            f"telemetry.profile.start_step is {window.start_step}, but the run has run.num_steps={cfg.run.num_steps}: "
            "start earlier, or set telemetry.profile.num_steps=0"
        )


def files(cfg: RunConfig) -> Iterator[str]:
    """Everything that is read from disk is there."""
    yield from _model_files(cfg)
    for where, sets in (("data.train", cfg.data.train), ("evaluation.sets", cfg.evaluation.sets)):
        for index, item in enumerate(sets):
            if item.source.get("name") == "file":
                yield from _source_files(item.source.get("path"), f"{where}[{index}].source.path")


def _model_files(cfg: RunConfig) -> Iterator[str]:
    folder = Path(cfg.model.path)
    if not folder.is_dir():
        yield (
            f"model.path is {cfg.model.path}, but there is no such folder under {Path.cwd()}; it must be a local "
            "Hugging Face folder (nothing is downloaded at run time)"
        )
        return
    if not (folder / "config.json").is_file():
        yield f"model.path is {cfg.model.path}, but that folder has no config.json, so that it is no Hugging Face model"
    if cfg.model.init == "weights" and not any(folder.glob("*.safetensors")):
        yield (
            f"model.path is {cfg.model.path}, but that folder has no *.safetensors file; add the weights, or set "
            "model.init=random to start from fresh ones"
        )


def _source_files(path: Any, where: str) -> Iterator[str]:
    if not isinstance(path, str) or not path:
        yield f"{where} is {path!r}, but must be the path of a jsonl, jsonl.gz or parquet file"
    elif not Path(path).is_file():
        yield f"{where} is {path}, but there is no such file under {Path.cwd()}"


RULES: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    run_name,
    freeze_patterns,
    files,
    dropout,
    router_bias,
    *parallel_rules.RULES,
    datasets,
    temperature,
    stop_strings,
    *rollout_rules.RULES,
    *group_rules.RULES,
    sglang,
    supervised,
    rewards,
    optimizer_state,
    schedule,
    critic,
    minibatches,
    refilter,
    pass_at,
    text_metrics,
    profile,
)
"""In the order of the schema."""
