"""Running a model layer by layer through transformers' own modules.

A decoder layer is run as a model of one layer, whose final norm is left out, so that masks,
positions, attention and routing are the library's; its weights alone are in memory.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import MODEL_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from qsrt_runtime.format.errors import FormatError

_NORMS = ("norm", "embedding_norm")  # what families call the final norm
_LABELED = 256  # rows whose distributions are in memory at once
_SMALL_VOCABULARY = 2  # of the one-layer model, which is given embedded tokens

Weights = Mapping[str, torch.Tensor]
Routes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class LayerRunner:
    """One decoder layer on a device.

    A forward call takes residual rows [windows, length, H] and returns those after the layer.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        layer: int,
        changes: Mapping[str, Any],
        weights: Weights,
        device: torch.device,
    ) -> None:
        """config: the model's config.json.   changes: to it, for a model of this layer alone.

        weights: the layer's tensors by their names in the layer, float32.
        """
        self.model = _one_layer(config, layer, changes, weights).to(device)
        self.experts = _experts_of(self.model)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.model(inputs_embeds=rows, use_cache=False).last_hidden_state

    @contextmanager
    def watching(self) -> Iterator[list[Routes]]:
        """Collects the experts' inputs [n, H], ids [n, k] and gates [n, k] of each call."""
        seen: list[Routes] = []

        def note(_module: nn.Module, arguments: Routes) -> None:
            seen.append(arguments)

        if self.experts is None:
            yield seen
            return
        handle = self.experts.register_forward_pre_hook(note)
        try:
            yield seen
        finally:
            handle.remove()

    def backward(
        self, rows: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """From the gradient at the layer's output to those at its input and its experts' output.

        rows, gradient: [windows, length, H].   Returns [windows, length, H] and [n, H], None for
        a layer without experts.
        """
        outputs: list[torch.Tensor] = []
        handle = None
        if self.experts is not None:
            handle = self.experts.register_forward_hook(
                lambda _module, _arguments, result: outputs.append(result)
            )
        try:
            with torch.enable_grad():
                rows = rows.detach().requires_grad_()
                targets = [rows]
                result = self(rows)
                targets += outputs
                found = torch.autograd.grad(result, targets, gradient)
        finally:
            if handle is not None:
                handle.remove()
        return found[0], found[1] if outputs else None


def loss_gradient(
    config: Mapping[str, Any], weights: Weights, device: torch.device
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A function from final residual rows to the gradient of the model's own loss at them.

    weights: of all that is outside the layers, by the checkpoint's names, float32.
    The function takes rows [n, H] and uniform draws [n] in [0, 1), which sample each row's label
    from the model's distribution, and returns [n, H]: of the sum of cross-entropies.
    """
    full = _full(config)
    value = {**full, **_by_layer(full, slice(0)), "num_hidden_layers": 0}
    model = _load(AutoModelForCausalLM, value, weights, needed="").to(device)

    @torch.enable_grad()
    def gradient_of_some(rows: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        rows = rows.detach().requires_grad_()
        logits = model(inputs_embeds=rows[None], use_cache=False).logits[0].float()
        labels = _sample(logits.detach(), draws)
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return torch.autograd.grad(loss, rows)[0]

    def gradient(rows: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        parts = zip(rows.split(_LABELED), draws.split(_LABELED), strict=True)
        return torch.cat([gradient_of_some(*part) for part in parts])

    return gradient


def _sample(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """A label of each row by the inverse of its distribution function: [n] int64."""
    total = logits.double().softmax(-1).cumsum(-1)
    wanted = draws.double()[:, None] * total[:, -1:]
    return torch.searchsorted(total, wanted, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)


def _one_layer(
    config: Mapping[str, Any], layer: int, changes: Mapping[str, Any], weights: Weights
) -> PreTrainedModel:
    full = _full(config)
    value = {
        **full,
        **_by_layer(full, slice(layer, layer + 1)),
        "num_hidden_layers": 1,
        "vocab_size": _SMALL_VOCABULARY,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
        **{key: item for key, item in changes.items() if key in full},
    }
    state = {f"layers.0.{name}": weight for name, weight in weights.items()}
    model = _load(MODEL_MAPPING, value, state, needed="layers.")
    for name in _NORMS:
        if hasattr(model, name):
            setattr(model, name, nn.Identity())
    return model


def _full(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the lists by layer that transformers derives from the rest of it."""
    return AutoConfig.for_model(**config).to_dict()


def _by_layer(config: Mapping[str, Any], layers: slice) -> dict[str, Any]:
    """The lists of a config that have an item for each layer, cut to some layers."""
    count = config["num_hidden_layers"]
    return {k: v[layers] for k, v in config.items() if isinstance(v, list) and len(v) == count}


def _load(auto: Any, value: Mapping[str, Any], state: Weights, *, needed: str) -> PreTrainedModel:
    """A model of a config with the given weights; FormatError where they do not fit it.

    needed: what the names begin with that may not be missing.
    """
    config = AutoConfig.for_model(**value)
    kind = auto if auto is MODEL_MAPPING else auto._model_mapping
    try:
        model, info = kind[type(config)].from_pretrained(
            None,
            config=config,
            state_dict=dict(state),
            dtype=torch.float32,
            attn_implementation="eager",  # the others' backward adds up in any order
            experts_implementation="eager",
            output_loading_info=True,
        )
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise FormatError(
            f"transformers does not take the checkpoint's tensors: {reason}"
        ) from error
    left = {name for name in info["missing_keys"] if name.startswith(needed)}
    wrong = left | set(info["unexpected_keys"])
    if wrong:
        raise FormatError(
            f"transformers' {type(model).__name__} does not take the checkpoint's tensors: "
            f"{min(map(str, wrong))} for one"
        )
    return model.requires_grad_(False).eval()


def _experts_of(model: PreTrainedModel) -> nn.Module | None:
    found = [module for name, module in model.named_modules() if name.endswith(".experts")]
    return found[0] if found else None
