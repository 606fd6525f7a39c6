"""Packages in transformers 5: import this, then AutoModelForCausalLM.from_pretrained(PKG).

transformers does not look for quantization methods outside itself; importing this module
registers ours. Without it transformers would start the experts at random after a warning. So a
package's config.json names, under `transformers_weights`, a file that transformers refuses, with
what to import for a name; the hooks below take that entry away.
"""

import inspect
import logging
import re
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from qsrt_runtime.arguments import X_DTYPES
from qsrt_runtime.expansion import check_expand, expanded
from qsrt_runtime.format import decode
from qsrt_runtime.format.atom import Expert
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import LOCAL_BYTES, Geometry, TrueSizes
from qsrt_runtime.format.manifest import (
    ACTIVATIONS,
    DENSE_QUANTIZATION,
    IMPORT_FIRST,
    METHODS,
    TRANSFORMERS_WEIGHTS,
    text_config,
)
from qsrt_runtime.format.package import Package, open_package
from qsrt_runtime.format.slab import unpack_expert
from qsrt_runtime.hub import sealed_snapshot
from qsrt_runtime.load import check_unchanged, load_layer, verify_package
from qsrt_runtime.moe import moe_forward
from qsrt_runtime.staging import Staging
from qsrt_runtime.weights import LayerWeights, Traits, traits_of

_EXPERTS = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.+\.)?experts$")
# The attributes by which transformers marks other experts, and what they are for ours.
_PLAIN = {
    "has_bias": False,
    "has_gate": True,
    "has_post_expert_norm": False,
    "is_concatenated": True,
}

logger = logging.getLogger(__name__)


class QsrtConfig(QuantizationConfigMixin):
    """The quantization_config of a package, field by field as config.json has it.

    One more, `expand`, is the caller's, as load_package's: config.quantization_config["expand"] of
    the config that from_pretrained is given.
    """

    def __init__(self, **fields: Any) -> None:
        if "qsrt" not in fields:
            raise ValueError(
                f"quantization_config of quant_method {fields.get('quant_method')!r} has no qsrt "
                "block; qsrt_runtime reads only its own packages"
            )
        vars(self).update(fields)


class PackedExperts(torch.nn.Module):
    """The routed experts of one layer, in place of transformers' module of that name.

    Its buffers are those of weights.LayerWeights, the float16 scales under the name scale_bits
    as int16, so that no change of the model's dtype touches them.
    """

    def __init__(
        self,
        dense: torch.nn.Module,
        layer: int,
        geometry: Geometry,
        true_sizes: TrueSizes,
        expand: str | None,
    ) -> None:
        """dense: the module to stand in for, on the meta device.   expand: as load_package's."""
        super().__init__()
        self.is_transposed = _shapes(dense) == _stacks(
            geometry.experts, true_sizes, is_transposed=True
        )
        self.dense = (dense,)  # in a tuple, so that it is no submodule
        self.layer, self.geometry, self.true_sizes = layer, geometry, true_sizes
        self.traits = Traits()
        experts = geometry.experts
        stride = geometry.slot_stride(experts) if expand is None else experts * LOCAL_BYTES
        shapes = {
            "atoms": ((geometry.slots, stride), torch.uint8),
            "format_codes": ((experts,), torch.uint8),
            "scale_bits": ((3, experts, geometry.hidden), torch.int16),
            "activations": ((experts,), torch.uint8),
        }
        if expand is not None:
            shapes["labels"] = ((experts * geometry.weights_per_expert,), torch.uint8)
        for name, (shape, dtype) in shapes.items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"))
        if expand is None:
            self.register_buffer("labels", None)

    def fill(self, package: Package, staging: Staging) -> None:
        """Take the layer's weights as buffers; they have their bytes when the staging ends."""
        loaded = load_layer(package, self.layer, staging)
        self.atoms, self.format_codes = loaded.atoms, loaded.format_codes
        self.scale_bits = loaded.shared_scales.view(torch.int16)
        self.activations = loaded.activations

    def take_traits(self) -> None:
        """Look, once they have their bytes, at what the experts have in common."""
        self.traits = traits_of(self.scale_bits.view(torch.float16), self.format_codes)

    def fill_expanded(self, package: Package) -> None:
        """Take the layer's weights as buffers, its labels in the memory that is there for them."""
        device, labels, self.labels = self.atoms.device, self.labels, None
        with Staging(device) as staging:
            self.fill(package, staging)
        self.take_traits()
        self.atoms = expanded(self.weights(), labels).atoms
        self.labels = labels

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())

    def weights(self) -> LayerWeights:
        """The layer as moe_forward takes it."""
        return LayerWeights(
            layer=self.layer,
            geometry=self.geometry,
            slots=range(self.geometry.slots),
            format_codes=self.format_codes,
            shared_scales=self.scale_bits.view(torch.float16),
            atoms=self.atoms,
            activations=self.activations,
            labels=self.labels,
            traits=self.traits,
            hidden_padding=self.geometry.hidden - self.true_sizes.hidden,
        )

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], ids [T, k] and weights [T, k] -> [T, H]."""
        return moe_forward(hidden_states, self.weights(), top_k_index, top_k_weights)

    @torch.no_grad()
    def to_dense(self, dtype: torch.dtype) -> torch.nn.Module:
        """The module it stands for, with decoded weights; channels in the package's order."""
        dense = self.dense[0].to_empty(device=self.atoms.device).to(dtype).train(self.training)
        weights = self.weights()
        for expert in range(self.geometry.experts):
            decoded = _unpadded(unpack_expert(weights, expert), self.true_sizes)
            gate_up, down = torch.cat([decoded["w1"], decoded["w3"]]), decoded["w2"]
            dense.gate_up_proj[expert] = gate_up.T if self.is_transposed else gate_up
            dense.down_proj[expert] = down.T if self.is_transposed else down
        return dense


class PackedExpertsByRow(PackedExperts):
    """The same where the module is given no routes but the rows of every expert, as in Llama 4.

    A token's weight is in its row already, which is 0 where it does not go to the expert.
    """

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[E * T, H], the rows of one expert after another's -> [E * T, H]."""
        numbers = torch.arange(self.geometry.experts, device=hidden_states.device)
        ids = numbers.repeat_interleave(len(hidden_states) // len(numbers))
        ids = torch.where(hidden_states.any(-1), ids, -1)[:, None]
        return moe_forward(hidden_states, self.weights(), ids, torch.ones_like(ids).float())


class QsrtQuantizer(HfQuantizer):
    """The hooks that transformers calls while it loads a package."""

    requires_calibration = True  # a model is packed by qsrt-pack, not while it loads

    def __init__(self, quantization_config: QsrtConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.package: Package | None = None
        self.verified = ""
        self.expand: str | None = getattr(quantization_config, "expand", None)

    def validate_environment(self, *_: Any, **__: Any) -> None:
        check_expand(self.expand)
        kept = getattr(self.quantization_config, DENSE_QUANTIZATION, None)
        if kept is not None:
            raise ValueError(
                f"the tensors of this package that are no experts' are quantized with "
                f"{kept.get('quant_method')} ({DENSE_QUANTIZATION}), which this integration does "
                "not load; convert without --keep-dense-format, or run qsrt-pack decode"
            )

    def update_attn_implementation(self, config: PretrainedConfig) -> PretrainedConfig:
        """Called, from transformers 5.18 on, before it looks for weight files."""
        if getattr(config, TRANSFORMERS_WEIGHTS, None) == IMPORT_FIRST:
            delattr(config, TRANSFORMERS_WEIGHTS)
        return config

    update_tp_plan = update_attn_implementation  # called there by the releases before

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in X_DTYPES:
            raise ValueError(f"packed experts run in float32, float16 and bfloat16, not in {dtype}")
        return dtype

    def update_ep_plan(self, config: PretrainedConfig) -> PretrainedConfig:
        return config

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        if not checkpoint_files:
            raise ValueError("a package is loaded from its folder or repository, not a state_dict")
        package = open_package(_package_folder(model, Path(checkpoint_files[0])))
        self.package, self.verified = package, verify_package(package, "once")
        _check_fields(vars(self.quantization_config), package.documents.config)
        _replace_experts(model, package, self.expand)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        devices = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
        if "disk" in devices or ("cpu" in devices and len(devices) > 1):
            raise ValueError(f"packed experts cannot be offloaded; the device map has {devices}")
        if (getattr(model, "_tp_size", None) or 1) > 1:
            raise ValueError("packed experts do not take part in transformers' tensor parallelism")
        start = time.perf_counter()
        packed = [m for m in model.modules() if isinstance(m, PackedExperts)]
        for device in {m.atoms.device for m in packed}:
            if device.type not in ("cpu", "cuda"):
                raise ValueError(f"packed experts run on cpu and cuda, not on {device}")
            there = [module for module in packed if module.atoms.device == device]
            if self.expand is not None:
                for module in there:
                    module.fill_expanded(self.package)
                continue
            with Staging(device) as staging:
                for module in there:
                    module.fill(self.package, staging)
            for module in there:
                module.take_traits()
        check_unchanged(self.package, self.verified)
        size, seconds = sum(m.nbytes for m in packed), time.perf_counter() - start
        logger.info("%s: %d bytes of experts in %.2f s", self.package.path, size, seconds)
        for module in model.modules():
            if isinstance(module, PreTrainedModel):  # each refuses to be saved
                module.hf_quantizer = self
        model.requires_grad_(False)  # there is no backward through packed experts

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str) -> PreTrainedModel:
        if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            raise ValueError("dequantize() wants the model on one device")
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        packed = {n: m for n, m in model.named_modules() if isinstance(m, PackedExperts)}
        expected = ACTIVATIONS.index(getattr(model.config.get_text_config(), "hidden_act", "silu"))
        for name, module in packed.items():
            if (module.activations != expected).any():
                raise ValueError(
                    f"{name}: experts have activations that differ; no dense model can say that"
                )
        for name, module in packed.items():
            model.set_submodule(name, module.to_dense(dtype))
        for module in model.modules():
            if isinstance(module, PreTrainedModel) and module is not model:
                self.remove_quantization_config(module)
        model.config.dtype = dtype
        return model.to(dtype).requires_grad_(True)

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        logger.warning(
            "a package is saved by copying its folder; call model.dequantize() first to save a "
            "dense model"
        )
        return False

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


def _unpadded(expert: Expert, sizes: TrueSizes) -> dict[str, torch.Tensor]:
    """An expert's dense matrices of the model's own sizes, channels in the package's order.

    Intermediate channels whose scales are all 0 add nothing; as many of them are left out as were
    added, whichever these were.
    """
    scales = torch.stack([expert.w1.svh, expert.w3.svh, expert.w2.suh])
    kept = scales.any(0).to(torch.uint8).argsort(descending=True, stable=True)
    kept = kept[: sizes.intermediate].sort().values
    dense = decode.dense_expert(expert)
    w1, w3 = (dense[name][kept, : sizes.hidden] for name in ("w1", "w3"))
    return {"w1": w1, "w3": w3, "w2": dense["w2"][: sizes.hidden, kept]}


def _package_folder(model: PreTrainedModel, shard: Path) -> Path:
    """The package that a shard belongs to; what else is sealed in one on the Hub is fetched."""
    name = model.config.name_or_path
    if Path(name).is_dir():
        return shard.parent
    snapshot = shard.parent  # CACHE/models--OWNER--NAME/snapshots/REVISION
    if snapshot.parent.name != "snapshots":
        raise ValueError(f"{name}: a package lies at the root of a repository, not in a subfolder")
    return sealed_snapshot(name, snapshot.name, snapshot.parents[2])


def _check_fields(given: dict[str, Any], config: dict[str, Any]) -> None:
    """Refuse a caller's quantization_config that is not the package's, `expand` aside."""
    own = config.get("quantization_config", {})
    other = sorted(key for key, value in given.items() if key != "expand" and value != own.get(key))
    if other:
        raise ValueError(
            f"quantization_config differs from the package's in {', '.join(other)}; "
            "`expand`, beside them, is all that can be given"
        )


def _replace_experts(model: PreTrainedModel, package: Package, expand: str | None) -> None:
    """Put PackedExperts where the package's layers have their experts."""
    replaced: set[int] = set()
    buffers: set[str] = set()
    for name, module in list(model.named_modules()):
        match = _EXPERTS.search(name)
        if match is None or int(match[1]) not in package.layers:
            continue
        sizes = (package.geometry, package.true_sizes)
        _check_plain(name, module, package.geometry.experts, package.true_sizes)
        by_row = [*inspect.signature(module.forward).parameters] == ["hidden_states"]
        kind = PackedExpertsByRow if by_row else PackedExperts
        packed = kind(module, int(match[1]), *sizes, expand)
        model.set_submodule(name, packed)
        replaced.add(int(match[1]))
        buffers |= {re.escape(f"{name}.{key}") for key, _ in packed.named_buffers()}
    # The layers that config.json does not count predict tokens further ahead: none is built.
    counted = range(text_config(package.documents.config)["num_hidden_layers"])
    missing = sorted(set(package.layers) & set(counted) - replaced)
    if missing:
        raise FormatError(
            f"{package.path}: {type(model).__name__} has no experts in layer {missing[0]}, which "
            "is packed"
        )
    ignored = set(model._keys_to_ignore_on_load_missing or ())
    model._keys_to_ignore_on_load_missing = ignored | buffers  # no shard has them


def _check_plain(name: str, module: torch.nn.Module, experts: int, sizes: TrueSizes) -> None:
    """Refuse experts that compute anything but down(act(gate x) * up x) from stacked weights.

    Stacks of matrices [out, in], or of all of them transposed.
    """
    found, where = _shapes(module), f"{name} ({type(module).__name__})"
    expected, transposed = (_stacks(experts, sizes, is_transposed=flag) for flag in (False, True))
    if found not in (expected, transposed):
        raise FormatError(f"{where} has parameters {found}, the package fits {expected}")
    for key, value in {**_PLAIN, "is_transposed": found == transposed}.items():
        if getattr(module, key, value) != value:
            raise FormatError(
                f"{where} has {key} {getattr(module, key)}; packed experts compute "
                "down(act(gate x) * up x) and nothing else"
            )


def _shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in module.named_parameters()}


def _stacks(experts: int, sizes: TrueSizes, *, is_transposed: bool) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's stacks, of matrices [out, in] or [in, out]."""
    gate_up, down = (2 * sizes.intermediate, sizes.hidden), (sizes.hidden, sizes.intermediate)
    step = -1 if is_transposed else 1
    return {
        "gate_up_proj": (experts, *gate_up[::step]),
        "down_proj": (experts, *down[::step]),
    }


for _method in METHODS:
    if _method not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(_method)(QsrtConfig)
        register_quantizer(_method)(QsrtQuantizer)
