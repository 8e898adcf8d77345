"""Settings that megatron would train wrong without a word are refused, each by its own message."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import tiny_models
import torch

from moerl.config.schema import ModelSection, ParallelSection, PrecisionSection
from moerl.errors import ConfigError
from moerl.models.family import YARN_ATTRIBUTES


@pytest.fixture(scope="module")
def fields():
    """What every configuration here has."""
    return {
        "num_layers": 4,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_moe_experts": 4,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
    }


WRONG = {
    "interleaving": {"virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": False},
    "sequence_parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": False},
    "router_fusion": {"moe_router_fusion": True},
    "shared_replay": {"moe_enable_routing_replay": True},
    "fp8": {"fp8": "hybrid"},
    "per_token_loss": {"calculate_per_token_loss": True},
    "capacity": {"moe_expert_capacity_factor": 1.0},
    "jitter": {"moe_input_jitter_eps": 0.01},
    "forced_balance": {"moe_router_force_load_balancing": True},
    "sinks": {"softmax_type": "off-by-one"},
    "linear_attention": {"experimental_attention_variant": "gated_delta_net", "tensor_model_parallel_size": 2},
    "fused_yarn": {"apply_rope_fusion": True, "yarn_rotary_scaling_factor": 32.0},
    "saved_activations": {"distribute_saved_activations": True},
    "allgather": {"moe_token_dispatcher_type": "allgather", "expert_model_parallel_size": 2},
    "flex": {"moe_token_dispatcher_type": "flex"},
}


WRONG_WITH_TE = {
    "latent_norms": {"multi_latent_attention": True, "layernorm_epsilon": 1e-5},
    "te_window_context": {"context_parallel_size": 2, "window_size": (128, 0)},
}


def config_of(fields, **changes):
    """Megatron's own checks are passed by: a later version may drop them, and some depend on what is installed."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(**fields)
    for name, value in changes.items():
        assert hasattr(config, name) or name in YARN_ATTRIBUTES, name
        setattr(config, name, value)
    return config


def test_every_guard_has_a_case():
    from moerl.mcore.guards import GUARDS

    assert sorted({*WRONG, *WRONG_WITH_TE}) == sorted(guard.name for guard in GUARDS)


@pytest.mark.parametrize(
    ("name", "use_te"), [*((name, False) for name in WRONG), *((name, True) for name in WRONG_WITH_TE)]
)
def test_each_guard_refuses_its_case_and_no_other_guard_does(fields, name, use_te):
    from moerl.mcore.guards import GUARDS, refuse_silent_faults

    changes = (WRONG_WITH_TE if use_te else WRONG)[name]
    if "tensor_model_parallel_size" in changes and name != "sequence_parallel":
        changes = {**changes, "sequence_parallel": True}
    config = config_of(fields, **changes)
    message = next(guard.message for guard in GUARDS if guard.name == name)
    with pytest.raises(ConfigError) as caught:
        refuse_silent_faults(config, use_te=use_te)
    assert str(caught.value) == f"megatron settings: {message}"


@pytest.mark.parametrize("softmax_type", ["learnable", "off-by-one"])
def test_sinks_of_transformer_engine_are_refused_under_tensor_parallelism(fields, softmax_type):
    """Any that it has; at tensor=1 it trains them right."""
    from moerl.mcore.guards import GUARDS, refuse_silent_faults

    message = next(guard.message for guard in GUARDS if guard.name == "sinks")
    cut = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    with pytest.raises(ConfigError) as caught:
        refuse_silent_faults(config_of(fields, softmax_type=softmax_type, **cut), use_te=True)
    assert str(caught.value) == f"megatron settings: {message}"
    refuse_silent_faults(config_of(fields, softmax_type=softmax_type), use_te=True)
    refuse_silent_faults(config_of(fields, softmax_type="vanilla", **cut), use_te=True)


def test_sinks_of_transformer_engine_are_refused_under_context_parallelism(fields):
    from moerl.mcore.guards import refuse_silent_faults

    cut = {"context_parallel_size": 2, "softmax_type": "learnable"}
    with pytest.raises(ConfigError, match=r"sliding windows or attention sinks .* set parallel\.context=1"):
        refuse_silent_faults(config_of(fields, **cut), use_te=True)
    refuse_silent_faults(config_of(fields, **cut, window_size=(128, 0)), use_te=False)
    refuse_silent_faults(config_of(fields, context_parallel_size=2), use_te=True)


def test_what_the_learner_asks_for_passes(fields):
    from moerl.mcore.guards import refuse_silent_faults

    good = {
        "virtual_pipeline_model_parallel_size": 2,
        "overlap_p2p_comm": True,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "moe_token_dispatcher_type": "allgather",
        "expert_model_parallel_size": 2,
    }
    refuse_silent_faults(config_of(fields, **good), use_te=False)
    with_te = {"fp8": "hybrid", "window_size": (128, 0), "softmax_type": "learnable"}
    refuse_silent_faults(config_of(fields, **with_te), use_te=True)
    refuse_silent_faults(config_of(fields, apply_rope_fusion=True), use_te=True)
    refuse_silent_faults(config_of(fields, apply_rope_fusion=True, yarn_rotary_scaling_factor=1.0), use_te=True)
    refuse_silent_faults(config_of(fields, multi_latent_attention=True, layernorm_epsilon=1e-6), use_te=True)
    refuse_silent_faults(config_of(fields, multi_latent_attention=True, layernorm_epsilon=1e-5), use_te=False)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"softmax_type": "off-by-one"}, "softmax_type other than vanilla"),
        ({"mtp_num_layers": 1}, "layers of multi-token prediction; no objective trains them"),
    ],
    ids=["softmax", "prediction"],
)
def test_a_family_cannot_bring_a_refused_setting_in(tiny_folder, setting, said):
    """The settings of a model's folder go through the guards."""
    from moerl.mcore.model import ModelSource, read_source, transformer_config
    from moerl.mcore.parallel import initialize_parallel

    source = read_source(ModelSection(path=str(tiny_folder)))

    class Odd:
        def transformer_kwargs(self, hf):
            return {**source.kwargs, **setting}

    odd = ModelSource(source.folder, source.hf, Odd())  # pyright: ignore[reportArgumentType] its settings are all that is read
    with pytest.raises(ConfigError, match=said):
        transformer_config(
            odd,
            section=ModelSection(),
            precision=PrecisionSection(),
            parallel=initialize_parallel(ParallelSection(), 0),
        )


@pytest.mark.parametrize(
    ("has_cuda", "has_te", "use_te", "said"),
    [
        (True, False, False, "TransformerEngine is not installed: experts run one after the other"),
        (True, True, False, "precision.params=fp32 trains without TransformerEngine: experts run one after the other"),
        (True, True, True, ""),
        (False, False, False, ""),
    ],
)
def test_experts_without_grouped_products_on_a_gpu_are_told_of(caplog, has_cuda, has_te, use_te, said):
    from moerl.mcore.guards import warn_without_grouped_gemm

    with caplog.at_level(logging.WARNING):
        warn_without_grouped_gemm(has_cuda=has_cuda, has_te=has_te, use_te=use_te)
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)


@pytest.mark.parametrize(("has_cuda", "is_told"), [(True, True), (False, False)])
def test_settings_of_a_run_tell_of_experts_without_grouped_products(
    tiny_folder, monkeypatch, caplog, has_cuda, is_told
):
    from moerl.mcore import model as room
    from moerl.mcore.parallel import initialize_parallel

    section, layout = ModelSection(path=str(tiny_folder)), initialize_parallel(ParallelSection(), 0)
    monkeypatch.setattr(room, "has_transformer_engine", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    with caplog.at_level(logging.WARNING):
        room.transformer_config(
            room.read_source(section), section=section, precision=PrecisionSection(), parallel=layout
        )
    assert ("TransformerEngine is not installed: experts run one after the other" in caplog.text) == is_told


@pytest.mark.parametrize(
    ("cut", "context", "use_te", "is_refused"),
    [
        ("whole", 2, True, True),
        ("whole", 2, False, False),
        ("whole", 1, True, False),
        ("auto", 2, True, False),
        ("zigzag", 2, True, False),
    ],
)
def test_whole_sequences_are_refused_where_transformer_engine_would_cut_them(cut, context, use_te, is_refused):
    from moerl.mcore.guards import refuse_whole_sequences

    expected = nullcontext()
    if is_refused:
        expected = pytest.raises(ConfigError, match=r"context_cut=whole with parallel\.context=2: .*set it to auto")
    with expected:
        refuse_whole_sequences(cut, context, use_te=use_te)


def test_the_cut_that_a_run_asks_for_is_held_to_its_layers(tiny_folder, monkeypatch):
    from moerl.mcore import model as room
    from moerl.mcore.parallel import initialize_parallel

    asked = []
    monkeypatch.setattr(room, "refuse_whole_sequences", lambda *args, use_te: asked.append((*args, use_te)))
    section = ModelSection(path=str(tiny_folder))
    layout = initialize_parallel(ParallelSection(context_cut="whole"), 0)
    room.transformer_config(room.read_source(section), section=section, precision=PrecisionSection(), parallel=layout)
    assert asked == [("whole", 1, False)]


def test_local_layers_run_experts_one_after_the_other(kit, tiny_folder):
    """Megatron's local layers take moe_grouped_gemm without a word and ignore it, so it is only set where it acts."""
    from moerl.mcore.model import build_chunks, read_source, transformer_config, unwrap
    from moerl.mcore.parallel import initialize_parallel

    section = ModelSection(path=str(tiny_folder))
    source, layout = read_source(section), initialize_parallel(ParallelSection(), 0)
    config = transformer_config(source, section=section, precision=PrecisionSection(), parallel=layout)
    assert not config.moe_grouped_gemm  # float32: the local layers, whatever is installed
    model = unwrap(build_chunks(source, config, layout)[0])
    names = {type(module).__name__ for module in model.modules()}
    assert "SequentialMLP" in names


def test_yarn_is_never_rotated_by_the_fused_kernel(tmp_path, monkeypatch):
    """Of packed sequences it drops YaRN's factor (1.35 at a scale of 32), by which attention's scores are too small."""
    from moerl.mcore import model as room
    from moerl.mcore.parallel import initialize_parallel

    monkeypatch.setattr(room, "uses_transformer_engine", lambda dtype: True)
    layout = initialize_parallel(ParallelSection(), 0)
    section = ModelSection(path=str(tiny_models.save_model(tmp_path / "m", "fused")))  # gpt-oss
    source = room.read_source(section)
    config = room.transformer_config(source, section=section, precision=PrecisionSection(), parallel=layout)
    assert source.kwargs["position_embedding_type"] == "yarn"
    assert not config.apply_rope_fusion


def test_no_padding_mask_no_labels_and_parallel_logits(kit, tiny_folder, monkeypatch):
    """Issue 7452, 1, 2, 5 and 10: label smoothing, gathered logits, and masks of padding are never in play."""
    from moerl.mcore import model as room
    from moerl.mcore.router_replay import ReplayRouter

    seen: dict[str, list] = {"masks": [], "forwards": []}
    plain_forward, plain_routing = room.PackedGPTModel.forward, ReplayRouter.routing

    def forward(self, *args, **kwargs):
        seen["forwards"].append((len(args), frozenset(kwargs), self.parallel_output))
        return plain_forward(self, *args, **kwargs)

    def routing(self, logits, padding_mask=None):
        seen["masks"].append(padding_mask)
        return plain_routing(self, logits, padding_mask)

    monkeypatch.setattr(room.PackedGPTModel, "forward", forward)
    monkeypatch.setattr(ReplayRouter, "routing", routing)
    kit.make_policy(tiny_folder).gradients([kit.make_micro([5, 7])], kit.Nll())
    assert seen["masks"]
    assert set(seen["masks"]) == {None}
    for count, names, is_parallel in seen["forwards"]:
        assert count == 3
        assert not names & {"labels", "padding_mask", "runtime_gather_output"}
        assert is_parallel


def test_bf16_gradients_are_summed_in_float32_over_micro_batches(kit, tiny_folder):
    """64 equal micro-batches: in bf16 the sum would stop growing by what is below its last bit."""
    policy = kit.make_policy(tiny_folder, params="bf16")
    micro = kit.make_micro([9, 6])
    once = policy.gradients([micro], kit.Nll())
    often = policy.gradients([micro] * 64, kit.Nll())
    assert all(grad.dtype is torch.float32 for grad in once.values())
    for name, grad in often.items():
        assert (grad - 64 * once[name]).abs().max() <= 1e-5 * grad.abs().max(), name


@pytest.mark.parametrize("make", ["make_policy", "make_critic"])
def test_a_family_whose_forward_was_never_compared_does_not_train(kit, tiny_folder, monkeypatch, make):
    from dataclasses import replace

    from moerl.models.family import MAPPING_ONLY, families

    plugin = families.get("qwen3_moe")
    traits = {**plugin.traits, "verified": MAPPING_ONLY}
    monkeypatch.setitem(families._plugins, "qwen3_moe", replace(plugin, traits=traits))
    with pytest.raises(ConfigError, match=r"qwen3_moe \(Qwen3MoeForCausalLM\) is verified as 'mapping only'"):
        getattr(kit, make)(tiny_folder)


def test_biases_of_experts_are_refused_where_each_rank_would_add_them(tmp_path):
    from dataclasses import replace

    from tiny_models import save_model

    from moerl.mcore.model import read_source, transformer_config
    from moerl.mcore.parallel import initialize_parallel

    layout = initialize_parallel(ParallelSection(), 0)
    cut = replace(layout, etp=replace(layout.etp, size=2))
    section = ModelSection(path=str(save_model(tmp_path, "fused")))
    with pytest.raises(ConfigError, match=r"parallel\.expert_tensor is 2, but this family's experts have biases"):
        transformer_config(read_source(section), section=section, precision=PrecisionSection(), parallel=cut)
