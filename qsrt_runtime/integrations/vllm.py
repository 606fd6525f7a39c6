"""Packages in stock vLLM: with qsrt installed beside it, `vllm serve PKG` and nothing else.

vLLM calls `register`, an entry point of the group vllm.general_plugins, in each of its processes.
Its own loader reads what the package's index names, which is everything but the layer files; each
rank's share of these is read afterwards, from the package itself.
"""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.platforms import current_platform

from qsrt_runtime.arguments import padded_rows
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.manifest import (
    ACTIVATIONS,
    METHODS,
    SITU_BETA,
    SITU_LINEAR_BETA,
    text_config,
)
from qsrt_runtime.format.package import Package, open_package
from qsrt_runtime.hub import sealed_snapshot
from qsrt_runtime.load import (
    check_unchanged,
    checked_device,
    load_layer,
    owned_slots,
    verify_package,
)
from qsrt_runtime.moe import moe_forward
from qsrt_runtime.staging import Staging
from qsrt_runtime.weights import LayerWeights, traits_of
from qsrt_runtime.workspace import FEW_TOKENS, Workspace, make_workspace

METHOD = "qsrt"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# All that a quantization_config of ours says. One that says more has other tensors quantized too.
_KEYS = {
    *("demoted_format", "hybrid_bit_map", "ignored_layers", "kept_format", "qsrt", "quant_algo"),
    "quant_method",
}


def register() -> None:
    """Make vLLM know quant_method qsrt. May be called again."""
    register_quantization_config(METHOD)(QsrtConfig)


class QsrtConfig(QuantizationConfig):
    """The quantization_config of a package, and the package once a worker has opened it."""

    def __init__(self, config: dict[str, Any]) -> None:
        """config: the field of config.json. Raises FormatError for what is no package's."""
        super().__init__()
        if "qsrt" not in config:
            raise FormatError("quantization_config has no qsrt block; this is no package")
        more = sorted(set(config) - _KEYS)
        if more:
            raise FormatError(
                f"quantization_config has {', '.join(more)}: tensors that are no routed expert's "
                "are quantized too, which this integration does not run in vLLM; pack without "
                "--keep-dense-format"
            )
        self.model, self.revision = "", None
        self._opened: tuple[Package, str] | None = None
        self._workspace: Workspace | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "QsrtConfig":
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Packages are ours in the published loader's spelling too, where it is `modelopt`."""
        ours = hf_quant_cfg.get("quant_method") in METHODS and "qsrt" in hf_quant_cfg
        return METHOD if ours else None

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        self.model, self.revision = model_name, revision

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        kernels = [torch.bfloat16, torch.float16]
        return [*kernels, torch.float32] if current_platform.is_cpu() else kernels

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Ours for the packed layers' experts; everything else is as in the source."""
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        if not isinstance(layer, RoutedExperts):
            return None
        match = _LAYER.search(prefix)
        if match is None:
            raise FormatError(f"{prefix} does not say of which layer these experts are")
        package, _ = self.opened()
        return (
            QsrtMoEMethod(layer, int(match[1]), self) if int(match[1]) in package.layers else None
        )

    def opened(self) -> tuple[Package, str]:
        """The package, verified, and its verified.fingerprint."""
        if self._opened is None:
            folder = Path(self.model)
            if not folder.is_dir():
                cache = get_current_vllm_config().load_config.download_dir
                folder = sealed_snapshot(self.model, self.revision, cache)
            package = open_package(folder)
            self._opened = package, verify_package(package, "once")
        return self._opened

    def workspace(self, weights: LayerWeights, topk: int, dtype: torch.dtype) -> Workspace:
        """The buffers that all layers use in turn, there before vLLM captures graphs."""
        if self._workspace is None:
            device = weights.atoms.device
            self._workspace = make_workspace(weights.geometry, topk, FEW_TOKENS, dtype, device)
        return self._workspace


class QsrtMoEMethod(FusedMoEMethodBase):
    """What vLLM calls for the experts of one packed layer."""

    def __init__(self, layer: RoutedExperts, number: int, config: QsrtConfig) -> None:
        super().__init__(layer.moe_config)
        self.number, self.config = number, config
        self.weights: LayerWeights | None = None
        self.workspace: Workspace | None = None

    def create_weights(self, layer: RoutedExperts, *_: Any, **__: Any) -> None:
        """Refuse what the package does not fit; nothing is allocated that vLLM would fill."""
        package, _fingerprint = self.config.opened()
        check_experts(layer, self.number, package)
        geometry = package.geometry
        self.slots = owned_slots(geometry, self.moe.tp_rank, self.moe.tp_size)
        self.experts = expert_range(layer.expert_map, geometry.experts)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Read this rank's share of the layer file; on CUDA, take the workspace too."""
        package, fingerprint = self.config.opened()
        with Staging(checked_device(self.moe.device)) as staging:
            weights = load_layer(package, self.number, staging, self.slots, self.experts)
        check_unchanged(package, fingerprint)
        traits = traits_of(weights.shared_scales, weights.format_codes)
        self.weights = replace(weights, traits=traits)
        for field in fields(weights):  # so that vLLM knows of them, as when it sleeps
            value = getattr(weights, field.name)
            if isinstance(value, torch.Tensor):
                layer.register_buffer(f"qsrt_{field.name}", value, persistent=False)
        if weights.atoms.is_cuda:
            topk, dtype = self.moe.experts_per_token, self.moe.in_dtype
            self.workspace = self.config.workspace(self.weights, topk, dtype)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        return None

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """[T, H], weights and global ids [T, k] -> this rank's part of [T, H].

        Shared experts are the caller's: it adds them, and sums over ranks.
        """
        routes, options = (topk_ids, topk_weights), {"expert_map": layer.expert_map}
        options["weight_on_input"] = layer.apply_router_weight_on_input
        if self.workspace is None:
            return moe_forward(x, self.weights, *routes, **options)
        from qsrt_runtime.moe_kernels import moe_forward_kernels  # brings triton

        padded, options["workspace"] = padded_rows(x, self.weights), self.workspace
        out = moe_forward_kernels(padded, self.weights, *routes, **options)
        return out[:, : self.weights.width].contiguous() if self.weights.hidden_padding else out


def check_experts(layer: RoutedExperts, number: int, package: Package) -> None:
    """Refuse experts of other sizes than the package's, and what packed ones do not compute."""
    moe, where = layer.moe_config, f"layer {number} of {package.path}"
    sizes, parallel = package.true_sizes, moe.moe_parallel_config
    for name, found, packed in (
        ("experts", moe.num_experts, package.geometry.experts),
        ("hidden channels", moe.hidden_dim, sizes.hidden),
        ("intermediate channels", moe.intermediate_size, sizes.intermediate),
    ):
        if found != packed:
            raise FormatError(f"{where}: vLLM has {found} {name}, packed are {packed}")
    _check_activation(layer, number, package, where)
    for name, asked in (
        ("biases", moe.has_bias),
        ("a clamped SwiGLU", {moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta} != {None}),
        ("LoRA adapters", moe.is_lora_enabled),
        ("data parallelism", parallel.dp_size > 1),
        ("prefill context parallelism", parallel.pcp_size > 1),
        ("sequence parallelism", parallel.is_sequence_parallel),
        ("dual batch overlap", get_current_vllm_config().parallel_config.enable_dbo),
    ):
        if asked:
            raise ValueError(f"{where}: packed experts do not run with {name}")


def _check_activation(layer: RoutedExperts, number: int, package: Package, where: str) -> None:
    """The model's activation is one that the package's experts have, with its parameters."""
    documents, moe = package.documents, layer.moe_config
    stated = documents.manifest["layers"][str(number)].get("activation", {})
    default = stated.get("default", text_config(documents.config).get("hidden_act"))
    if layer.activation.value != default:
        raise ValueError(
            f"{where}: vLLM has the activation {layer.activation.value}, packed is {default}; "
            f"packed experts run {' and '.join(ACTIVATIONS)}"
        )
    for name, found, runs in (
        ("activation_situ_beta", moe.activation_situ_beta, SITU_BETA),
        ("activation_situ_linear_beta", moe.activation_situ_linear_beta, SITU_LINEAR_BETA),
    ):
        if found not in (None, runs):
            raise ValueError(f"{where}: {name} is {found}, packed experts run {runs}")


def expert_range(expert_map: torch.Tensor | None, experts: int) -> range:
    """The experts that a rank has, which its map [E] gives ids from 0 on and the others -1."""
    if expert_map is None:
        return range(experts)
    owned = (expert_map >= 0).nonzero().flatten().tolist()
    held = range(owned[0], owned[-1] + 1) if owned else range(0)
    if not owned or expert_map[held.start : held.stop].tolist() != list(range(len(held))):
        raise ValueError(
            f"a rank has experts {owned} of {experts}, expected some that follow each other; "
            "use as many ranks as there are experts at most, and placement strategy linear"
        )
    return held
