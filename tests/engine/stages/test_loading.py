"""Loading: from folders, part by part; and every way in which that can fail."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.stages.tiny import ARCHITECTURES, batch, gradients, logits, run, stages_of, tiny, whole
from weft.conf.schema import ModelConfig, SplitKind
from weft.engine.stages.checking.self_check import self_check
from weft.engine.stages.cutting.from_model import stages_from_model
from weft.engine.stages.cutting.split import split_layers
from weft.engine.stages.files.exporting import export_stages
from weft.engine.stages.files.loading import check_model_fits, load_hf_config, load_stages


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saved models, each in several files."""
    made = {}

    def folder(arch, **overrides):
        key = (arch, *sorted(overrides.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(arch)
            whole(tiny(arch, **overrides)).save_pretrained(made[key], max_shard_size="60KB")
        return made[key]

    return folder


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_from_folder(arch, folders):
    stages = stages_of(ModelConfig(path=str(folders(arch))), 3)
    reference = dict(whole(tiny(arch)).named_parameters())
    found = {n: p for stage in stages for n, p in stage.named_global_parameters()}
    assert found.keys() == reference.keys()
    for name, parameter in reference.items():
        assert torch.equal(found[name], parameter), name


def test_types_and_overrides(folders):
    config = ModelConfig(path=str(folders("llama")), overrides={"rope_theta": 500.0})
    stages = stages_of(config, 2, dtype=torch.bfloat16)
    assert {p.dtype for s in stages for p in s.parameters()} == {torch.bfloat16}
    assert all(s.training for s in stages)
    assert stages[1].hf_model.config.rope_theta == 500.0


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt2"])
def test_a_fold_shares_tied_weights(arch, folders):
    path = folders(arch, tie_word_embeddings=True)
    config = ModelConfig(path=str(path))
    split = split_layers(load_hf_config(config), 4, SplitKind.even)
    first, last = load_stages(config, split, [0, 3], dtype=torch.float32, seed=1)
    (name,) = first.tied
    one, other = (dict(stage.named_global_parameters())[name] for stage in (first, last))
    assert one is other and last.hf_model.get_output_embeddings().weight is one
    rest = load_stages(config, split, [1, 2], dtype=torch.float32, seed=1)
    stages, reference, data = [first, *rest, last], whole(tiny(arch, tie_word_embeddings=True)), batch()
    run(stages, data).backward()
    reference(**data, use_cache=False).loss.backward()
    for key, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients(stages)[key], parameter.grad, rtol=0, atol=1e-7)


def test_untied_checkpoint_under_a_tied_config(tmp_path):
    whole(tiny("llama", tie_word_embeddings=False)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ValueError, match="tie_word_embeddings=false"):
        stages_of(ModelConfig(path=str(tmp_path)), 2)


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt2", "mixtral"])
@pytest.mark.parametrize("held", [(0, 3), (1, 2)])
def test_from_model(arch, held):
    reference, model, data = whole(tiny(arch)), whole(tiny(arch)), batch()
    split = split_layers(model.config, 4, SplitKind.even)
    others = [index for index in range(4) if index not in held]
    made = dict(zip(held, stages_from_model(model, split, held), strict=True))
    made |= dict(zip(others, stages_from_model(whole(tiny(arch)), split, others), strict=True))
    stages = [made[index] for index in range(4)]
    assert torch.equal(logits(stages, data), reference(**data, use_cache=False).logits)
    kept = {id(p) for stage in made.values() for p in stage.parameters()}
    assert {id(p) for p in model.parameters()} <= kept


def test_from_peft_model():
    import peft

    def adapted():
        torch.manual_seed(3)
        model = peft.get_peft_model(whole(tiny("llama")), peft.LoraConfig(target_modules=["q_proj", "up_proj"]))
        torch.manual_seed(4)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
        return model

    reference, data = adapted(), batch()
    stages = stages_from_model(adapted(), split_layers(reference.get_base_model().config, 3, SplitKind.even), range(3))
    loss = run(stages, data)
    loss.backward()
    want = reference(**data, use_cache=False).loss
    want.backward()
    assert torch.equal(loss, want)
    found = gradients(stages)
    assert found.keys() == {n for n, p in reference.named_parameters() if p.requires_grad}
    for name, parameter in reference.named_parameters():
        assert not parameter.requires_grad or torch.equal(found[name], parameter.grad), name


OF_THE_WHOLE_MODEL = {
    "prompt": (lambda peft: peft.PromptTuningConfig(num_virtual_tokens=4), "PROMPT_TUNING puts tokens before"),
    "loss": (lambda peft: peft.AdaLoraConfig(total_step=9, target_modules=["q_proj"]), "ADALORA adds to the model's"),
    "activated": (
        lambda peft: peft.LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[3]),
        "LORA with alora_invocation_tokens looks for them in the prompt",
    ),
    "view": (
        lambda peft: peft.LoraConfig(target_modules=["embed_tokens"], ensure_weight_tying=True),
        "are two weights in the same memory, .* name the embedding in modules_to_save",
    ),
}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("case", OF_THE_WHOLE_MODEL)
def test_adapters_that_need_the_whole_model_are_refused(case, stages):
    import peft

    make, text = OF_THE_WHOLE_MODEL[case]
    model = whole(tiny("llama", tie_word_embeddings=True))
    split = split_layers(model.config, stages, SplitKind.even)
    settings = make(peft)
    settings.task_type = "CAUSAL_LM"
    with pytest.raises(ValueError, match=text):
        stages_from_model(peft.get_peft_model(model, settings), split, [0])


@pytest.mark.parametrize("case", ["added", "unwrapped"])
def test_adapters_that_an_export_would_leave_out_are_refused(case):
    """Those of transformers' `add_adapter`, and of a model taken out of peft's."""
    import peft

    model = whole(tiny("llama"))
    settings = peft.LoraConfig(target_modules=["q_proj"])
    if case == "added":
        model.add_adapter(settings)
    else:
        model = peft.get_peft_model(model, settings).get_base_model()
    with pytest.raises(
        ValueError, match=r"q_proj has an adapter, and \w+ is not a PeftModel.*give peft.get_peft_model"
    ):
        stages_from_model(model, split_layers(whole(tiny("llama")).config, 1, SplitKind.even), [0])


def test_trained_weight_of_several_stages_is_refused():
    import peft

    bank = peft.VBLoRAConfig(target_modules=["q_proj"], num_vectors=8, vector_length=4, topk=2)
    model = peft.get_peft_model(whole(tiny("llama")), bank)
    split = split_layers(model.get_base_model().config, 2, SplitKind.even)
    with pytest.raises(ValueError, match=r"layers.2.self_attn.q_proj.vblora_vector_bank.*; set pipeline.stages=1"):
        stages_from_model(model, split, [0])


def test_stages_without_a_target_have_no_adapters():
    config = tiny("llama")
    config.lora.enabled, config.lora.target_modules = True, [r".*layers\.[01]\..*q_proj"]
    config.lora.target_modules = ["layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"]
    reference, stages, data = whole(config), stages_of(config, 2), batch()
    assert not [n for n, p in stages[1].named_global_parameters() if p.requires_grad]
    names = {n for stage in stages for n, _ in stage.named_global_parameters()}
    assert names == {n for n, _ in reference.named_parameters()}
    assert torch.equal(run(stages, data), reference(**data, use_cache=False).loss)


TOY = """
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

class ToyConfig(LlamaConfig):
    model_type = "toy"

class ToyForCausalLM(LlamaForCausalLM):
    config_class = ToyConfig

    def forward(self, *args, labels=None, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 0.5
        if labels is not None:
            output.loss = self.loss_function(output.logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return output
"""


def test_a_model_that_brings_its_code(tmp_path):
    whole(tiny("llama")).save_pretrained(tmp_path / "toy")
    (tmp_path / "toy" / "modeling_toy.py").write_text(TOY)
    config = json.loads((tmp_path / "toy" / "config.json").read_text())
    names = {"AutoConfig": "modeling_toy.ToyConfig", "AutoModelForCausalLM": "modeling_toy.ToyForCausalLM"}
    config |= {"model_type": "toy", "architectures": ["ToyForCausalLM"], "auto_map": names}
    (tmp_path / "toy" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_hf_config(ModelConfig(path=str(tmp_path / "toy")))
    trusted = ModelConfig(path=str(tmp_path / "toy"), trust_remote_code=True)
    self_check(trusted)
    stages, reference, data = stages_of(trusted, 2), whole(trusted), batch()
    want = reference(**data, use_cache=False)
    assert torch.equal(run(stages, data), want.loss)
    export_stages(stages, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert torch.equal(again(**data, use_cache=False).logits, want.logits)


class TestErrors:
    def refused(self, pattern, config, count=2):
        with pytest.raises(ValueError, match=pattern) as caught:
            stages_of(config, count)
        assert "\n" not in str(caught.value)

    def test_missing_folder(self, tmp_path):
        self.refused("not a folder", ModelConfig(path=str(tmp_path / "nowhere")))

    def test_hub_name_offline(self):
        self.refused("no such folder, and no such model", ModelConfig(path="someone/never-there"))

    def test_empty_folder(self, tmp_path):
        self.refused(r"no config\.json", ModelConfig(path=str(tmp_path)))

    def test_adapter_folder(self, tmp_path):
        (tmp_path / "adapter_config.json").write_text("{}")
        self.refused("merge_and_unload", ModelConfig(path=str(tmp_path)))

    @pytest.fixture
    def copied(self, folders, tmp_path):
        shutil.copytree(folders("llama"), tmp_path / "copy")
        return tmp_path / "copy"

    def test_no_weights(self, copied):
        for file in copied.glob("model*"):
            file.unlink()
        self.refused(r"no model\.safetensors", ModelConfig(path=str(copied)))

    def test_missing_shard(self, copied):
        next(copied.glob("*.safetensors")).unlink()
        self.refused("is missing; copy or download", ModelConfig(path=str(copied)))

    def test_truncated_shard(self, copied):
        file = next(copied.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-100])
        self.refused(r"has \d+ of \d+ bytes", ModelConfig(path=str(copied)))

    def test_not_a_shard(self, copied):
        next(copied.glob("*.safetensors")).write_bytes(b"not weights at all")
        self.refused("not a safetensors file", ModelConfig(path=str(copied)))

    def test_corrupt_index(self, copied):
        (copied / "model.safetensors.index.json").write_text("{")
        self.refused("index.json cannot be read", ModelConfig(path=str(copied)))

    def test_corrupt_config(self, copied):
        (copied / "config.json").write_text("{")
        self.refused("model.path", ModelConfig(path=str(copied)))

    def test_quantised(self, copied):
        config = json.loads((copied / "config.json").read_text())
        quantised = config | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
        (copied / "config.json").write_text(json.dumps(quantised))
        self.refused("quantised", ModelConfig(path=str(copied)))

    def test_routers_loss(self):
        size = {"hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 8}
        experts = {"intermediate_size": 48, "num_local_experts": 4, "output_router_logits": True}
        self.refused("output_router_logits=true", ModelConfig(arch="jetmoe", overrides=size | experts))

    def test_config_of_another_size(self, copied):
        config = json.loads((copied / "config.json").read_text())
        (copied / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
        self.refused("model.path", ModelConfig(path=str(copied)))

    def test_a_layer_too_few(self, copied):
        config = json.loads((copied / "config.json").read_text())
        (copied / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
        self.refused(r"model.layers.4.\S+ is missing", ModelConfig(path=str(copied)))

    @pytest.mark.parametrize(
        ("file", "change", "message"),
        [
            ("config.json", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: more than 10,000"),
            (
                "config.json",
                {"rms_norm_eps": float("nan")},
                "rms_norm_eps=nan: not a finite number; correct its config",
            ),
            ("config.json", {"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06: not above 0; correct its config.json"),
            (
                "config.json",
                {"rope_parameters": {"rope_theta": 0, "rope_type": "default"}},
                "rope_theta=0: not above 0",
            ),
            ("config.json", {"attention_dropout": 1.5}, "attention_dropout=1.5: not between 0 and 1; correct"),
            ("config.json", {"hidden_act": "nope"}, "not read .'nope'.; correct config.json"),
            ("config.json", {"intermediate_size": -32}, "not read .*negative dimension.*; correct config.json"),
            ("generation_config.json", "[" * 100_000, r"not read \(maximum recursion.*; correct .*generation_config"),
            (
                "generation_config.json",
                {"cache_implementation": "nope"},
                r"model.path=.*\(Invalid `cache_implementation`",
            ),
            ("model.safetensors.index.json", {"weight_map": {}}, r"index.json cannot be read \(it names no file\)"),
        ],
    )
    def test_hostile_configuration(self, copied, file, change, message):
        text = change if isinstance(change, str) else json.dumps(json.loads((copied / file).read_text()) | change)
        (copied / file).write_text(text)
        with pytest.raises(ValueError, match=message):
            check_model_fits(ModelConfig(path=str(copied)), 1, 8)

    def test_impossible_override(self):
        self.refused("model.overrides.rope_theta=-1.0: not above 0; correct it", tiny("llama", rope_theta=-1.0))

    def test_new_model_with_an_unknown_name(self):
        with pytest.raises(ValueError, match=r"cannot build LlamaForCausalLM .*'gelux'.*check model.overrides"):
            check_model_fits(tiny("llama", hidden_act="gelux"), 1, 8)

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [("F32", "I32", "has the type I32"), ("F32", "F99", "not read .*F99"), ("[0,", "[8,", "not read .*offset")],
    )
    def test_header_that_other_weights_would_have(self, copied, old, new, message):
        file = next(copied.glob("*.safetensors"))
        file.write_bytes(file.read_bytes().replace(old.encode(), new.encode(), 1))
        with pytest.raises(ValueError, match=rf"model\.path=.*{message}"):
            check_model_fits(ModelConfig(path=str(copied)), 1, 8)

    def test_layers_skipped_at_random(self):
        config = ModelConfig(arch="opt", overrides={"layerdrop": 0.1, "num_hidden_layers": 2})
        message = r"OPTForCausalLM skips layers at random \(layerdrop=0.1\)"
        self.refused(message, config)
        with pytest.raises(ValueError, match=message):
            check_model_fits(config, 2, 8)

    def test_more_stages_than_layers(self):
        self.refused("5 virtual stages, but the model has 4 layers", tiny("llama"), 5)

    def test_unknown_architecture(self):
        self.refused("model.arch=lama", ModelConfig(arch="lama"))

    def test_unknown_override(self):
        self.refused("did you mean hidden_size", tiny("llama", hiden_size=3))

    def test_refused_override(self):
        self.refused("model.overrides", tiny("llama", num_attention_heads=5))

    def test_unsupported_attention(self):
        self.refused(r"attn_implementation=sdpa: Bloom.* set it to eager", ModelConfig(arch="bloom"))

    def test_no_language_model(self):
        self.refused("no causal language model", ModelConfig(arch="vit"))

    def test_unknown_targets(self):
        config = ModelConfig(arch="afmoe", overrides={"num_hidden_layers": 2, "hidden_size": 64})
        config.lora.enabled = True
        self.refused(r"target_modules=\[\]", config)
