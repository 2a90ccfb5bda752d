"""A user's own DeepSpeed configuration: what is taken over, what stands, what is refused."""

import json
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, DeepSpeedConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel

from weft.conf.batch import fit_batch
from weft.conf.deepspeed import deepspeed_config
from weft.conf.schema import LrSchedule, OptimizerKind, Precision
from weft.engine.deepspeed import table as deepspeed_table
from weft.engine.deepspeed.keys import _refuse, split_deepspeed_config
from weft.engine.deepspeed.names import _model, _top_level
from weft.engine.deepspeed.table import DEEPSPEED_DEFAULTS, OPTIMIZERS, REFUSED, TAKEN_OVER, handling, key_table

USER = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.9]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    "zero_optimization": {"stage": 1, "overlap_comm": True},
    "bf16": {"enabled": True},
    "steps_per_print": 10,
    "tensorboard": {"enabled": True, "output_path": "x"},
    "comms_logger": {"enabled": False},
    "weft": {"enabled": True, "pipeline": {"stages": 2}},
}


def test_what_both_know_is_taken_over():
    config, _ = split_deepspeed_config(USER)
    assert config.train.microbatch_size == 2
    assert (config.pipeline.stages, config.pipeline.microbatches) == (2, 8)
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.clip) == (1e-3, [0.8, 0.9], 0.5)
    assert config.optimizer.kind is OptimizerKind.adamw
    assert (config.zero.stage, config.train.precision) == (1, Precision.bf16)


def test_what_deepspeed_alone_knows_stands():
    before = deepcopy(USER)
    _, rest = split_deepspeed_config(USER)
    assert before == USER
    assert not {"weft", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu"} & set(rest)
    assert rest["scheduler"] == USER["scheduler"] and rest["steps_per_print"] == 10
    assert rest["optimizer"]["params"]["torch_adam"] is True
    assert rest["zero_optimization"]["overlap_comm"] is True


def test_silence_means_what_it_means_to_deepspeed():
    config, _ = split_deepspeed_config({"weft": {"enabled": True}})
    assert config.optimizer.clip == 0
    assert config.optimizer.schedule is LrSchedule.constant
    config, _ = split_deepspeed_config({"weft": {"enabled": True, "optimizer": {"schedule": "linear", "clip": 2.0}}})
    assert (config.optimizer.schedule, config.optimizer.clip) == (LrSchedule.linear, 2.0)


@pytest.mark.parametrize("section", [None, {"enabled": False}])
def test_switched_off_it_is_deepspeeds_own(section):
    user = {"anything": 1} | ({"weft": section} if section else {})
    assert split_deepspeed_config(user) == (None, {"anything": 1})


def test_a_file_is_read_like_a_dictionary(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(USER))
    assert split_deepspeed_config(file) == split_deepspeed_config(USER)
    assert split_deepspeed_config(str(file)) == split_deepspeed_config(USER)


BAD = [
    ({"grandient_accumulation_steps": 3}, "did you mean gradient_accumulation_steps?"),
    ({"zero_optimization": {"stag": 1}}, "no key zero_optimization.stag; did you mean zero_optimization.stage?"),
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage=4"),
    ({"zero_optimization": {"stage": "x"}}, "zero_optimization.stage='x'"),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "zero_optimization.offload_optimizer"),
    ({"optimizer": {"typ": "AdamW"}}, "did you mean optimizer.type?"),
    ({"scheduler": {"type": "WarmupLR", "param": {}}}, "did you mean scheduler.params?"),
    ({"tensorboard": {"enbled": True}}, "did you mean tensorboard.enabled?"),
    ({"comms_logger": {"enabld": True}}, "did you mean comms_logger.enabled?"),
    ({"data_types": {"grad_acum_dtype": "fp32"}}, "did you mean data_types.grad_accum_dtype?"),
    ({"bf16": {"enable": True}}, "did you mean bf16.enabled?"),
    ({"fp16": {"enabled": True}}, "simultaneously enabled"),
    ({"amp": {"enabled": True}}, "removed"),
    ({"train_micro_batch_size_per_gpu": "auto"}, 'train_micro_batch_size_per_gpu="auto"'),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}, "only the Hugging Face Trainer"),
    ({"pipeline": {"stages": 2}}, "set weft.pipeline"),
    ({"activation_checkpointing": {"partition_activations": True}}, "set weft.pipeline.recompute=layers"),
    ({"compile": {"deepcompile": True}}, "leave it out"),
    ({"compile": {"offload_parameters": True}}, "leave it out"),
    ({"tensor_parallel": {"autotp_size": 2}}, "leave it out"),
    ({"flops_profiler": {"enabled": True}}, "reports its own throughput"),
    ({"data_efficiency": {"data_sampling": {"enabled": True}}}, "data_efficiency="),
    ({"checkpoint": {"load_universal": True}}, "Weft's own"),
    ({"elasticity": {"enabled": True}}, "removed"),
    ({"sparse_gradients": True}, "removed"),
    ({"flops_profiler": {"enabled": False, "profil_step": 2}, "zero_optimization": {"stag": 1}}, "stag"),
    ({"zero_optimization": {"reduce_bucket_size": 2.5}}, "should be a valid integer"),
    ({"gradient_clipping": "x"}, "optimizer.clip='x': expected a number"),
    ({"weft": {"enabled": True, "logging": {"wandb": True}}}, "it is for recipes; set wandb.enabled=true"),
    ({"weft": True}, "say whether it is on"),
    ({"weft": {"pipeline": {"stages": 2}}}, "say whether it is on"),
    ({"weft": {"enabled": True, "pipline": {}}}, "did you mean pipeline?"),
    ({"weft": {"enabled": True, "pipeline": {"microbatches": 3}}}, "weft.pipeline.microbatches=3 differs"),
    ({"weft": {"enabled": True, "train": {"precision": "fp32"}}}, "weft.train.precision=fp32 differs"),
]


@pytest.mark.parametrize(("change", "part"), BAD, ids=lambda value: json.dumps(value)[:60])
def test_what_is_refused(change, part):
    with pytest.raises(ValueError) as error:
        split_deepspeed_config(USER | change)
    assert part in str(error.value)
    assert str(error.value).startswith("DeepSpeed config: ")


FILES = [(None, "No such file"), ("{", "not JSON"), ("[1]", "holds no keys"), ('{"a": 1, "a": 2}', "a: given twice")]


@pytest.mark.parametrize(("text", "part"), FILES)
def test_files_that_cannot_be_read(text, part, tmp_path):
    file = tmp_path / "ds.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=part):
        split_deepspeed_config(file)


def test_deepspeed_still_has_the_names_that_we_use():
    top = {name.split(".")[0] for name in (*TAKEN_OVER, *REFUSED)} - {"sequence_parallel_size"}
    assert top <= _top_level()
    zero = {name.split(".")[1] for name in (*TAKEN_OVER, *REFUSED) if name.startswith("zero_optimization.")}
    assert zero <= {field.alias or name for name, field in _model("DeepSpeedZeroConfig").model_fields.items()}


def test_every_kind_of_optimizer_has_its_name_at_deepspeed():
    assert set(OPTIMIZERS.values()) == set(OptimizerKind.__members__)
    assert DEEPSPEED_DEFAULTS.keys() <= {"optimizer.clip", "optimizer.schedule", "optimizer.warmup_steps"}


def test_pydantic_sections_refuse_unknown_keys_themselves():
    """The names of those sections depend on this."""
    read = DeepSpeedConfig({"train_batch_size": 1})
    for value in vars(read).values():
        if isinstance(value, DeepSpeedConfigModel):
            assert type(value).model_config["extra"] == "forbid"


def deepspeed_names():
    """Every key that DeepSpeed knows, those of sections whose keys have fates of their own included."""
    models = {"zero_optimization": "Zero", "bf16": "BF16", "fp16": "FP16"}
    names = _top_level() - set(models) - {"bfloat16"} - _REMOVED_TOP_LEVEL_CONFIG_KEYS.keys()
    for section, model in models.items():
        fields = _model(f"DeepSpeed{model}Config").model_fields.items()
        names |= {f"{section}.{field.alias or name}" for name, field in fields}
    return names


def test_every_key_of_deepspeed_has_a_fate():
    assert not [name for name in deepspeed_names() if not (handling(name) or name == "optimizer")]


def test_the_table_of_the_docs_is_this_one():
    """Where it is stale: put the lines of `key_table` into docs/zero.md."""
    lines, table = (Path(__file__).parents[2] / "docs/zero.md").read_text().splitlines(), key_table()
    assert lines[-len(table) :] == table


def nested(name, value):
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def merged(name, value):
    tree, (section, *_) = deepcopy(USER), name.split(".")
    part = nested(name, value)[section]
    tree[section] = tree[section] | part if isinstance(part, dict) and section in tree else part
    return tree


@pytest.mark.parametrize("name", sorted(name for name, refusal in REFUSED.items() if refusal.harmless))
def test_values_that_ask_for_nothing_pass(name):
    for value in REFUSED[name].harmless:
        _refuse(merged(name, value), "DeepSpeed config")


def test_what_asks_for_nothing_is_nothing():
    off = {"offload_optimizer": {"device": "none"}, "zero_quantized_weights": False, "zero_hpz_partition_size": 1}
    config, _ = split_deepspeed_config(USER | {"zero_optimization": USER["zero_optimization"] | off})
    assert config == split_deepspeed_config(USER)[0]


ASKED = {
    "data_types.grad_accum_dtype": "bf16",
    "managed_gradient_accumulation": False,
    "sequence_parallel_size": 2,
    "zero_optimization.ignore_unused_parameters": False,
    "zero_optimization.load_from_fp32_weights": False,
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_param.device": "nvme",
    "zero_optimization.zenflow": {"topk_ratio": 0.1},
    "zero_optimization.zero_hpz_partition_size": 2,
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_had_is_refused_with_its_value_and_a_remedy(name):
    value = ASKED.get(name, True)
    with pytest.raises(ValueError) as error:
        split_deepspeed_config(merged(name, value))
    assert str(error.value) == f"DeepSpeed config: {name}={value!r}: Weft does not support it; {REFUSED[name].remedy}"


BATCHES = [
    # the DeepSpeed keys, and what DeepSpeed makes of them on 4 ranks: train, micro-batch, accumulation
    ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 6}, 4),
    ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 2}, 4),
    ({"train_batch_size": 48, "gradient_accumulation_steps": 6}, 4),
    ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 6}, 4),
    ({"train_batch_size": 48}, 4),
    ({"train_micro_batch_size_per_gpu": 12}, 4),
]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("keys", "replicas"), BATCHES)
def test_a_batch_given_in_part_is_what_it_is_at_deepspeed(keys, replicas, stages, monkeypatch):
    monkeypatch.setattr("deepspeed.runtime.config.dist.get_rank", lambda: 0)
    config, _ = split_deepspeed_config({**keys, "weft": {"enabled": True, "pipeline": {"stages": stages}}})
    fitted = fit_batch(config, replicas * stages)
    theirs = DeepSpeedConfig(keys, SimpleNamespace(get_data_parallel_world_size=lambda: replicas))
    sizes = (theirs.train_batch_size, theirs.train_micro_batch_size_per_gpu, theirs.gradient_accumulation_steps)
    emitted = deepspeed_config(fitted, replicas * stages)
    assert emitted["train_batch_size"] == sizes[0] == 48
    assert (fitted.train.microbatch_size, fitted.pipeline.microbatches) == sizes[1:]


def test_a_batch_that_does_not_come_out_even_is_refused():
    config, _ = split_deepspeed_config({"train_batch_size": 30, "weft": {"enabled": True}})
    with pytest.raises(ValueError, match=r"train\.batch_size=30: not a multiple of 4 replicas; choose 32"):
        fit_batch(config, 4)


@pytest.mark.parametrize("given", ["fp32", "BF16", "fp16"])
def test_gradients_travel_in_the_format_that_is_asked_for(given):
    config, _ = split_deepspeed_config(USER | {"communication_data_type": given})
    assert config.zero.communication_data_type is Precision[given.lower()]


def test_unknown_keys_are_refused(monkeypatch):
    monkeypatch.delitem(deepspeed_table.WITHOUT_EFFECT, "vocabulary_size")
    with pytest.raises(ValueError, match="vocabulary_size=3: Weft does not support it; leave it out"):
        split_deepspeed_config(USER | {"vocabulary_size": 3})


def test_optimizers_that_need_whole_matrices_go_without_shards_only():
    given = {"optimizer": {"type": "Adafactor"}}
    with pytest.raises(ValueError, match=r"optimizer\.type='Adafactor': it needs whole parameters"):
        split_deepspeed_config(USER | given)
    split_deepspeed_config(USER | given | {"zero_optimization": {"stage": 0}})


def muon(**parameters):
    return USER | {"optimizer": {"type": "Muon", "params": parameters}}


def test_muon_has_deepspeeds_parameters():
    config, sections = split_deepspeed_config(muon(lr=1e-4, muon_lr=0.02, adam_lr=3e-4, momentum=0.9))
    assert (config.optimizer.kind.value, config.optimizer.lr, config.optimizer.muon_lr) == ("muon", 1e-4, 0.02)
    assert sections["optimizer"]["params"] == {"lr": 1e-4, "muon_lr": 0.02, "adam_lr": 3e-4, "momentum": 0.9}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"moun_lr": 0.1}, r"optimizer\.params\.moun_lr=0\.1: Muon has no such parameter; did you mean muon_lr\?"),
        ({"per_head_muon": True}, r"per_head_muon=True: Muon has no such parameter; known are adam_lr"),
        ({"ns_method": "qr"}, r"optimizer\.params\.ns_method='qr': choose gram or standard"),
    ],
)
def test_parameters_that_muon_does_not_have_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        split_deepspeed_config(muon(**parameters))


@pytest.mark.parametrize("state", ["bf16", "int8"])
def test_smaller_moments_have_decoupled_weight_decay_only(state):
    given = {"optimizer": {"type": "Adam", "params": {"lr": 1e-4, "adam_w_mode": False}}}
    section = {"weft": {"enabled": True, "optimizer": {"state": state}}}
    with pytest.raises(ValueError, match=rf"adam_w_mode=False: {state} moments have decoupled weight decay only; set"):
        split_deepspeed_config(USER | given | section)
