"""Which GPU, whose layers, which queue and how exact: decisions that are a GPU's, held without one."""

from __future__ import annotations

from datetime import timedelta

import pytest
import tiny_models
import torch

from moerl.config.schema import ModelSection, ParallelSection, PrecisionSection
from moerl.errors import ConfigError


@pytest.mark.parametrize(
    ("dtype", "has_te", "uses"),
    [
        (torch.bfloat16, True, True),
        (torch.float16, True, True),
        (torch.float32, True, False),
        (torch.bfloat16, False, False),
        (torch.float32, False, False),
    ],
)
def test_transformer_engine_is_for_half_precision(monkeypatch, dtype, has_te, uses):
    from moerl.mcore import gpu

    monkeypatch.setattr(gpu, "has_transformer_engine", lambda: has_te)
    assert gpu.uses_transformer_engine(dtype) is uses


@pytest.mark.parametrize(("params", "fused"), [("fp32", False), ("bf16", True)])
def test_the_settings_of_a_model_follow_its_format(tiny_folder, monkeypatch, params, fused):
    """Where TransformerEngine is installed; a GPU is not needed to decide."""
    from megatron.core.models.common.embeddings import rope_utils

    from moerl.mcore import gpu
    from moerl.mcore.model import read_source, transformer_config
    from moerl.mcore.parallel import initialize_parallel

    monkeypatch.setattr(gpu, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", lambda: None)  # megatron asks if it is there
    section = ModelSection(path=str(tiny_folder))
    config = transformer_config(
        read_source(section),
        section=section,
        precision=PrecisionSection(params=params),
        parallel=initialize_parallel(ParallelSection(), 0),
    )
    assert config.moe_grouped_gemm is fused
    assert config.apply_rope_fusion is fused


def test_float32_trains_the_local_layers_beside_transformer_engine(kit, tiny_folder, monkeypatch):
    """Were the format not asked for somewhere, megatron would look for TransformerEngine's classes in vain."""
    from moerl.mcore import gpu
    from moerl.mcore import model as room

    micro = kit.make_micro([5, 7])
    alone = kit.make_policy(tiny_folder).gradients([micro], kit.Nll())
    monkeypatch.setattr(gpu, "has_transformer_engine", lambda: True)
    seen = []
    plain = room.packed_layout

    def packed_layout(rows, *, use_te):
        seen.append(use_te)
        return plain(rows, use_te=use_te)

    monkeypatch.setattr(room, "packed_layout", packed_layout)
    policy = kit.make_policy(tiny_folder)
    gradients = policy.gradients([micro], kit.Nll())
    assert set(seen) == {False}
    names = {type(module).__name__ for chunk in policy._runner._chunks for module in chunk.modules()}
    assert {"PackedAttention", "RMSNorm", "SequentialMLP"} <= names
    assert not any(name.startswith("TE") for name in names)
    assert gradients.keys() == alone.keys()
    assert all(torch.equal(grad, alone[name]) for name, grad in gradients.items())


def test_one_layout_is_asked_for_where_transformer_engine_trains(kit, tiny_folder, monkeypatch):
    """The local layers of a bf16 policy, given TransformerEngine's layout: only what `score_tokens` asks is seen."""
    from moerl.mcore import model as room

    policy = kit.make_policy(tiny_folder, params="bf16")
    asked, seen = [], []

    def layout(rows, *, use_te):
        seen.append(use_te)
        return plain(rows, use_te=False)

    plain = room.packed_layout
    monkeypatch.setattr(room, "uses_transformer_engine", lambda dtype: not asked.append(dtype))
    monkeypatch.setattr(room, "packed_layout", layout)
    policy.gradients([kit.make_micro([5, 7])], kit.Nll())
    assert set(asked) == {torch.bfloat16}
    assert set(seen) == {True}


@pytest.mark.parametrize(("use_te", "cut"), [(True, "zigzag"), (False, "auto")])
def test_sequences_stay_whole_only_where_transformer_engine_does_not_train(kit, tiny_folder, monkeypatch, use_te, cut):
    """Its attention and core's rotation cut every pack by the zigzag."""
    from moerl.mcore import step

    policy, asked, plain = kit.make_policy(tiny_folder), [], step.plan_rows
    monkeypatch.setattr(step, "uses_transformer_engine", lambda dtype: use_te)
    monkeypatch.setattr(step, "plan_rows", lambda bounds, cut: (asked.append(cut.context_cut), plain(bounds, cut))[1])
    policy.gradients([kit.make_micro([5, 7])], kit.Nll())
    assert set(asked) == {cut}


@pytest.mark.parametrize("params", ["fp32", "bf16"])
def test_routers_of_float32_never_ask_transformer_engine_for_a_product(kit, tiny_folder, monkeypatch, params):
    """Megatron takes its product wherever TransformerEngine is installed, whatever the layers are; the folder's routers
    are float32, and stay so."""
    from megatron.core.transformer.moe import moe_utils

    calls = []

    def general_gemm(a, b, dtype, layout="TN", bias=None, grad=False):
        calls.append(layout)
        a, b = a.float(), b.float()
        product = {"TN": lambda: b @ a.t(), "NN": lambda: b @ a, "NT": lambda: b.t() @ a}[layout]()
        return [product.to(dtype)]

    monkeypatch.setattr(moe_utils, "te_general_gemm", general_gemm)
    policy = kit.make_policy(tiny_folder, params=params)
    policy.gradients([kit.make_micro([5, 7])], kit.Nll())
    assert calls == []


def test_the_gating_of_float32_is_the_product_in_float32(kit, tiny_folder):
    from moerl.mcore.router_replay import ReplayRouter

    policy = kit.make_policy(tiny_folder)
    router = next(m for chunk in policy._runner._chunks for m in chunk.modules() if isinstance(m, ReplayRouter))
    torch.manual_seed(0)
    hidden = torch.randn(9, 1, router.weight.shape[1], requires_grad=True)
    logits = router.gating(hidden)
    exact = hidden.double() @ router.weight.double().t()
    assert logits.dtype is torch.float32
    assert (logits - exact).abs().max() < 1e-5
    seeds = torch.randn_like(logits)
    hidden_grad, weight_grad = torch.autograd.grad(logits, (hidden, router.weight), seeds)
    assert (hidden_grad - seeds.double() @ router.weight.double()).abs().max() < 1e-5
    assert (weight_grad - seeds[:, 0].double().t() @ hidden[:, 0].double()).abs().max() < 1e-5


def test_float32_stays_float32_where_the_environment_asks_for_tf32(monkeypatch):
    """TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 of NVIDIA's containers makes torch start with `high`."""
    from moerl.mcore.parallel import initialize_parallel

    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        initialize_parallel(ParallelSection(), 0)
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)


# Devices

EIGHT = {"LOCAL_WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("environment", "count", "own"),
    [
        ({"LOCAL_RANK": "0"}, 1, 0),
        ({"LOCAL_RANK": "5", **EIGHT}, 8, 5),
        ({"LOCAL_RANK": "5", **EIGHT, "CUDA_VISIBLE_DEVICES": "5"}, 1, 0),
        ({"LOCAL_RANK": "5", **EIGHT, "CUDA_VISIBLE_DEVICES": "GPU-1f2e"}, 1, 0),
    ],
)
def test_each_rank_has_the_gpu_of_its_number_or_the_one_it_is_shown(environment, count, own):
    from moerl.mcore.gpu import own_device

    assert own_device(environment, count) == own


@pytest.mark.parametrize(
    ("environment", "count", "said"),
    [
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 1, "not set"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": "0,1"}, 2, "0,1"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}, 0, "not set"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0,7"}, 1, "0,7"),
    ],
)
def test_more_processes_than_gpus_are_told_as_that(environment, count, said):
    from moerl.mcore.gpu import own_device

    local = environment["LOCAL_RANK"]
    with pytest.raises(ConfigError) as caught:
        own_device(environment, count)
    assert str(caught.value) == (
        f"local rank {local} has no GPU: this machine shows {count} (CUDA_VISIBLE_DEVICES is {said}); start at most "
        f"{count} processes a node (--nproc-per-node), or show more GPUs"
    )


@pytest.mark.parametrize(
    ("sizes", "capability", "before", "after"),
    [
        ({"tensor": 2}, 9, None, "1"),
        ({"context": 2}, 8, None, "1"),
        ({"tensor": 2}, 10, None, None),
        ({"expert": 8, "pipeline": 2}, 9, None, None),
        ({"tensor": 2}, 9, "32", "32"),
    ],
)
def test_one_queue_where_exchanges_hide_behind_products(sizes, capability, before, after):
    from moerl.mcore.gpu import CONNECTIONS, queue_in_order

    environment = {} if before is None else {CONNECTIONS: before}
    queue_in_order(ParallelSection(**sizes), environment, capability)
    assert environment.get(CONNECTIONS) == after


def test_queues_are_settled_before_cuda_starts_on_the_device_and_the_group_after(monkeypatch):
    from moerl.mcore import parallel
    from moerl.mcore.gpu import CONNECTIONS, DUMP_ON_TIMEOUT

    environment = {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "1"}
    calls = []
    monkeypatch.setattr(parallel.os, "environ", environment)
    monkeypatch.setattr(parallel.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append((device, environment.get(CONNECTIONS))))
    monkeypatch.setattr(
        parallel.dist,
        "init_process_group",
        lambda backend, timeout: calls.append((backend, timeout, environment.get(DUMP_ON_TIMEOUT))),
    )
    parallel.join_world(ParallelSection(tensor=2, timeout_seconds=90))
    assert calls == [(0, "1"), ("nccl", timedelta(seconds=90), "0")]


def test_a_failed_weight_update_is_no_reason_for_the_learners_groups_to_end_the_process():
    """Unless somebody wants torch's flight records."""
    from moerl.mcore.gpu import DUMP_ON_TIMEOUT, keep_groups_apart

    for before, after in (({}, "0"), ({DUMP_ON_TIMEOUT: "1"}, "1")):
        keep_groups_apart(before)
        assert before[DUMP_ON_TIMEOUT] == after


def test_torch_reads_the_variable_of_flight_records_by_this_name():
    from pathlib import Path

    from moerl.mcore.gpu import DUMP_ON_TIMEOUT

    header = Path(torch.__path__[0]) / "include" / "torch" / "csrc" / "distributed" / "c10d" / "ProcessGroupNCCL.hpp"
    assert f'"{DUMP_ON_TIMEOUT}"' in header.read_text()


def test_gpt_oss_is_refused_over_context_with_transformer_engine_and_not_in_float32(tmp_path, monkeypatch):
    from dataclasses import replace

    from moerl.mcore import gpu
    from moerl.mcore.model import read_source, transformer_config
    from moerl.mcore.parallel import initialize_parallel

    monkeypatch.setattr(gpu, "has_transformer_engine", lambda: True)
    layout = initialize_parallel(ParallelSection(), 0)
    cut = replace(layout, cp=replace(layout.cp, size=2))
    section = ModelSection(path=str(tiny_models.save_model(tmp_path / "m", "fused")))  # gpt-oss
    source = read_source(section)

    def config_of(params, parallel):
        return transformer_config(source, section=section, precision=PrecisionSection(params=params), parallel=parallel)

    with pytest.raises(ConfigError, match=r"sliding windows or attention sinks .* set parallel\.context=1"):
        config_of("bf16", cut)
    config_of("fp32", cut)
    config_of("bf16", layout)
