"""Loading a stage takes the memory of that stage, not of the model."""

import pytest

from tests.engine.stages.tiny import whole
from tests.interpreter import python
from weft.conf.schema import ModelConfig

LOAD = """
import re, sys, torch
from weft.conf.schema import ModelConfig, SplitKind
from weft.engine.stages.files.loading import build_model, load_hf_config, load_stages
from weft.engine.stages.cutting.split import split_layers
from tests.engine.stages.tiny_models import tiny_model

torch.set_num_threads(1)
# Converting reads every weight; in the file's own dtype, pages would be mapped and not read.
options = {"dtype": torch.bfloat16, "seed": 0}
tiny = tiny_model("llama")  # imports what is imported late
load_stages(tiny, split_layers(load_hf_config(tiny), 2, SplitKind.even), [0], **options)

def resident_mib(field):
    return int(re.search(field + r":\\s*(\\d+)", open("/proc/self/status").read())[1]) / 1024

config, kept = ModelConfig(path=sys.argv[1]), []
split = split_layers(load_hf_config(config), 4, SplitKind.even)
for stage in (0, 1, 3, None):
    open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
    before = resident_mib("VmRSS")
    kept.append(build_model(config, **options) if stage is None else load_stages(config, split, [stage], **options))
    print(resident_mib("VmHWM") - before)
"""


@pytest.mark.slow
def test_peak(tmp_path):
    overrides = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 1000}
    overrides |= {"num_attention_heads": 8, "num_key_value_heads": 8, "pad_token_id": 0, "num_local_experts": 4}
    whole(ModelConfig(arch="mixtral", overrides=overrides)).save_pretrained(tmp_path)
    output = python("-c", LOAD, tmp_path, check=True, timeout_s=100).stdout
    *stages, everything = map(float, output.split())
    assert everything > 200 and max(stages) < 0.4 * everything, (stages, everything)
