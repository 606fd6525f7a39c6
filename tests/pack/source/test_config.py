import pytest
from checkpoints import config

from qsrt_pack.source.config import described_experts
from qsrt_runtime.format.errors import FormatError


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("ernie4_5_moe", {"moe_layer_start_index": 1, "moe_layer_end_index": 3}, (1, 2, 3)),
        ("ernie4_5_moe", {"moe_layer_interval": 2}, (1, 3, 5)),
        ("ernie4_5_moe", {"moe_layer_start_index": 3, "moe_layer_end_index": -1}, (3, 4, 5)),
        ("jamba", {"expert_layer_period": 2, "expert_layer_offset": 1}, (1, 3, 5)),
        ("jamba", {"expert_layer_period": 3, "expert_layer_offset": 0}, (0, 3)),
        ("llama4_text", {"interleave_moe_layer_step": 3}, (2, 5)),
        ("llama4_text", {"interleave_moe_layer_step": 3, "moe_layers": [1, 9]}, (1,)),
        ("lfm2_moe", {"num_dense_layers": 4}, (4, 5)),
        ("glm4_moe", {"mlp_layer_types": ["dense", "sparse"] * 3}, (1, 3, 5)),
    ],
)
def test_cf_2a_layers_by_the_keys_of_a_family(
    model_type: str, changes: dict, expected: tuple[int, ...]
) -> None:
    value = config(model_type=model_type, num_hidden_layers=6)
    value |= {"intermediate_size": 256, "moe_k": 2, **changes}
    assert described_experts(value, "here").layers == expected


def test_cf_2a_kinds_of_another_number_of_layers() -> None:
    value = config(model_type="deepseek_v3", num_hidden_layers=3)
    value["mlp_layer_types"] = ["dense", "sparse"]
    with pytest.raises(FormatError, match="mlp_layer_types has 2 entries for 3 layers"):
        described_experts(value, "here")
