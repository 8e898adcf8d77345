"""Mistakes of public converters that no other test of this folder would see; docs/conversion.md lists them all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conversions import convert
from prediction_layers import save_with_prediction
from quantised_folders import read_files
from safetensors.torch import load_file, save_file
from tiny_models import KINDS, make_model, save_model
from torch.nn.functional import silu

from moerl.config.schema import ModelSection
from moerl.convert.exports import export_checkpoint
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.layouts import Layout
from moerl.convert.places import find
from moerl.errors import CheckpointError
from moerl.models.family import family_of
from moerl.models.hf_folder import HFFolder, checked_source, read_config
from moerl.shards import Shard, ShardReader

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    **dict(num_hidden_layers=1, hidden_size=3, num_attention_heads=2, num_key_value_heads=2, head_dim=2),
    **dict(intermediate_size=4, num_experts_per_tok=1, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]),
    **dict(vocab_size=7, rope_theta=1e4, rms_norm_eps=1e-6, hidden_act="silu", tie_word_embeddings=False),
    "max_position_embeddings": 8,
}


def there_and_back(folder: Path, out: Path, layout: Layout, **options) -> dict[str, torch.Tensor]:
    import_checkpoint(find(folder), out / "shards", layout, Options(**options))
    export_checkpoint(find(out / "shards"), out / "back", Options(**options))
    return load_file(out / "back" / "model.safetensors")


@pytest.mark.parametrize("vocab", [37, 41, 64])
@pytest.mark.parametrize("tensor", [1, 2, 3])
def test_filling_rows_of_the_vocabulary_never_leave(tmp_path, vocab, tensor):
    """Megatron-Bridge 625 and 5375: padded rows were exported, or the configuration was inflated."""
    folder = save_model(tmp_path / "hf", "softmax", vocab_size=vocab, num_key_value_heads=6)
    made = there_and_back(folder, tmp_path, Layout(tensor=tensor))
    original = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(made[name], original[name])
    assert read_config(tmp_path / "back")["vocab_size"] == vocab
    with ShardReader(tmp_path / "shards") as reader:
        assert reader.entries["weights/output_layer.weight"].shape == (vocab, 40)


def test_a_correction_bias_of_large_values_chooses_the_same_experts(tmp_path):
    """sglang 37133, 31213: in bf16, 256 values between 6.8 and 7.05 become 8, and nearly every token moves."""
    sizes = dict(n_routed_experts=256, num_experts_per_tok=8, n_group=1, topk_group=1, moe_intermediate_size=2)
    folder = save_model(tmp_path / "hf", "sigmoid", num_hidden_layers=2, **sizes)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    names = [name for name in tensors if name.endswith("e_score_correction_bias")]
    biases = {name: 6.8 + 0.25 * torch.rand(256, generator=generator) for name in names}
    save_file({**tensors, **biases}, folder / "model.safetensors")
    made = there_and_back(folder, tmp_path, Layout(expert=2), dtype=torch.bfloat16)
    scores = torch.rand(512, 256, generator=generator) * 0.3
    assert names
    for name, bias in biases.items():
        assert made[name].dtype == torch.float32
        assert bias.bfloat16().unique().numel() <= 9
        chosen, rounded = ((scores + b).topk(8).indices.sort().values for b in (made[name], bias.bfloat16().float()))
        assert torch.equal(chosen, (scores + bias).topk(8).indices.sort().values)
        assert (chosen != rounded).any(1).float().mean() > 0.3  # what the mistake would have done


def test_layers_of_multi_token_prediction_beyond_those_that_config_json_names_are_refused(tmp_path):
    """Megatron-Bridge 4960, ms-swift 6644: such tensors went missing without a word."""
    folder = save_model(tmp_path / "hf", "sigmoid")
    tensors = load_file(folder / "model.safetensors")
    layers = read_config(folder)["num_hidden_layers"]
    extra = {f"model.layers.{layers}.{part}.weight": torch.ones(3) for part in ("enorm", "eh_proj", "mlp.gate")}
    save_file({**tensors, **extra}, folder / "model.safetensors")
    made = there_and_back(folder, tmp_path, Layout())
    assert made.keys() == tensors.keys() | extra.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in extra.items())
    save_file({**tensors, f"model.layers.{layers + 1}.enorm.weight": torch.ones(3)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"unmapped tensors: model\.layers\.{layers + 1}\.enorm\.weight"):
        import_checkpoint(find(folder), tmp_path / "again", Layout(), Options())


def test_no_parameter_keeps_what_was_there_before(tmp_path):
    """Megatron-LM 5844: stacked keys met a schema of one key per expert, and experts kept their initial values."""
    folder = save_model(tmp_path / "hf", "softmax")
    import_checkpoint(find(folder), tmp_path / "shards", Layout(expert=4, tensor=2), Options())
    hf = read_config(folder)
    wanted = sum(len(rule.hf_names) for rule in family_of(hf).weight_rules(hf))
    with ShardReader(tmp_path / "shards") as reader:
        for name, entry in reader.entries.items():
            assert sum(torch.Size(part.size).numel() for part in entry.parts) == entry.numel, name
    assert len(find(tmp_path / "shards").open().names()) == wanted
    description = tmp_path / "shards" / "rank_00003.json"
    state = json.loads(description.read_text())
    key = next(name for name in state["tensors"] if ".experts." in name)
    del state["tensors"][key]["parts"][0]
    description.write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=r"the files hold 0 of the \d+ elements of weights/.*experts"):
        find(tmp_path / "shards").open()


def test_stacked_experts_are_each_expert_s_own_matrices(tmp_path):
    """Megatron-LM 909: experts joined by columns have the right shape and are another model (E 2, h 3, f 5)."""
    sizes = dict(num_experts=2, num_experts_per_tok=1, hidden_size=3, moe_intermediate_size=5, num_hidden_layers=1)
    folder = save_model(tmp_path / "hf", "softmax", **sizes)
    tensors = load_file(folder / "model.safetensors")
    import_checkpoint(find(folder), tmp_path / "shards", Layout(expert=2, expert_tensor=5), Options())
    x = torch.randn(3, generator=torch.Generator().manual_seed(0))
    with ShardReader(tmp_path / "shards") as reader:
        whole = {}
        for name, entry in reader.entries.items():
            whole[name] = torch.full(entry.shape, torch.nan)
            reader.fill(Shard(name, entry.shape, (0,) * len(entry.shape), whole[name]))
    first, second = (whole[f"weights/decoder.layers.0.mlp.experts.experts.linear_fc{i}.weight"] for i in (1, 2))
    assert (tuple(first.shape), tuple(second.shape)) == ((2, 10, 3), (2, 3, 5))
    for e in range(2):
        gate, up, down = (
            tensors[f"model.layers.0.mlp.experts.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        ours = (first[e] @ x).chunk(2)
        torch.testing.assert_close(
            second[e] @ (ours[0].sigmoid() * ours[0] * ours[1]), down @ (silu(gate @ x) * (up @ x))
        )


def test_shards_of_experts_are_gathered_without_marks_on_their_tensors():
    """slime 2280: shards of two expert-tensor ranks without marks of tensor parallelism were sent as they were."""
    hf = {**QWEN3_MOE, "num_experts": 2, "moe_intermediate_size": 6}
    rules = [rule for rule in family_of(hf).weight_rules(hf) if rule.is_expert]
    assert len(rules) == 2 * 2
    for rule in rules:
        whole = torch.arange(float(torch.Size(rule.megatron_shape()).numel())).view(rule.megatron_shape())
        shards = [rule.shard(whole, rank, 2).clone() for rank in range(2)]
        assert not any(hasattr(shard, mark) for shard in shards for mark in ("tensor_model_parallel", "partition_dim"))
        assert all(shard.shape != whole.shape for shard in shards)
        assert torch.equal(rule.gather(shards), whole)
        gate_first = whole[tuple(slice(0, n) for n in shards[0].shape)]  # half of both, not the first half
        assert torch.equal(shards[0], gate_first) is (rule.tensor_axis == 1)


def test_several_processes_write_the_whole_folder(tmp_path):
    """slime 2270, Megatron-Bridge 1716: a parallel exporter left tensors out."""
    folder = save_model(tmp_path / "hf", "softmax")
    both = [
        convert("export", folder, tmp_path / "out", "--max-shard-size", "20KB", world=(rank, 2)) for rank in range(2)
    ]
    for process in both:
        _, faults = process.communicate(timeout=120)
        assert process.returncode == 0, faults
    original, found = load_file(folder / "model.safetensors"), read_files(tmp_path / "out")
    assert found.keys() == original.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in original.items())


class Counting(HFFolder):
    """Notes what is read of fused tensors."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.whole: list[str] = []
        self.rows = 0

    def get(self, name: str) -> torch.Tensor:
        self.whole.append(name)
        return super().get(name)

    def get_slice(self, name: str, expert: int, start: int, stop: int) -> torch.Tensor:
        part = super().get_slice(name, expert, start, stop)
        self.rows = max(self.rows, part.shape[0])
        return part


def test_no_fused_tensor_of_all_experts_is_ever_in_memory(tmp_path):
    """verl 6691: a grouped export allocated the tensor of all experts."""
    folder = save_model(tmp_path / "hf", "softmax")
    hf, family = read_config(folder), family_of(read_config(folder))
    fused = {name: tensor.contiguous() for name, tensor in make_model("softmax").state_dict().items()}
    save_file(fused, folder / "model.safetensors", metadata={"format": "pt"})
    stored = Counting(folder)
    source = checked_source(stored, family, hf)
    for rule in family.weight_rules(hf):
        rule.to_megatron({name: source.get(name) for name in rule.hf_names})
    assert stored.whole
    assert not [name for name in stored.whole if ".experts." in name]
    assert stored.rows == hf["hidden_size"] > hf["moe_intermediate_size"]  # of one expert's down projection


def test_no_family_asks_for_a_gate_in_stripes(tmp_path):
    """Megatron-LM 7576: with the flag set and weights in two blocks, gate and up are mixed."""
    for kind in KINDS:
        hf = read_config(save_model(tmp_path / kind, kind))
        settings = family_of(hf).transformer_kwargs(hf)
        assert not [name for name in settings if name.endswith("glu_interleave_size")]


def test_nothing_drops_out_unless_asked():
    """AutoAlign 62: megatron's own default is 0.1."""
    assert ModelSection(path="").attention_dropout == ModelSection(path="").hidden_dropout == 0


@pytest.mark.parametrize("kind", ["sigmoid", "latent"])
def test_config_json_comes_back_in_every_field(kind, tmp_path):
    """Megatron-Bridge 4960: the number of layers of multi-token prediction became null; 625: the vocabulary grew."""
    folder = save_with_prediction(tmp_path / "hf", kind)[0]
    there_and_back(folder, tmp_path, Layout(tensor=2))
    before, after = read_config(folder), read_config(tmp_path / "back")
    assert before["num_nextn_predict_layers"] == 2
    assert after == before
