"""Layer by layer is the whole model: outputs, routes and gradients."""

from functools import partial

import pytest
import torch
from architectures import KINDS, write_model
from transformers import AutoConfig, AutoModelForCausalLM

from qsrt_pack.calibrate import capture
from qsrt_pack.calibration_input import embedding_name
from qsrt_pack.source.architectures import CALIBRATED
from qsrt_pack.source.checkpoint import open_checkpoint, read_tensor
from qsrt_pack.source.models import find_experts, one_layer_changes, outer_names
from qsrt_runtime.format.errors import FormatError

CPU = torch.device("cpu")


@pytest.fixture(params=["example", "mixtral"])
def source(request):
    return request.getfixturevalue(request.param)[0]


@pytest.fixture
def checkpoint(source):
    return open_checkpoint(source)


def weights(checkpoint, *names):
    return {name: read_tensor(checkpoint, name).float() for name in names}


def layer_weights(checkpoint, layer):
    prefix = f"model.layers.{layer}."
    names = [name for name in checkpoint.tensors if name.startswith(prefix)]
    found = weights(checkpoint, *names)
    return {name.removeprefix(prefix): weight for name, weight in found.items()}


def runner(checkpoint, layer):
    changes = one_layer_changes(find_experts(checkpoint), layer)
    given = layer_weights(checkpoint, layer)
    return capture.LayerRunner(checkpoint.config, layer, changes, given, CPU)


@pytest.fixture
def model(source):
    return AutoModelForCausalLM.from_pretrained(
        source,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    )


@pytest.fixture
def tokens(checkpoint):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(checkpoint.config["vocab_size"], (3, 20), generator=generator)


def embedded(checkpoint, tokens):
    name = "model.embed_tokens.weight"
    return weights(checkpoint, name)[name][tokens]


@torch.no_grad()
def test_rows_and_routes(checkpoint, model, tokens):
    rows, seen = embedded(checkpoint, tokens), []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _m, routes: seen.append(routes))
    expected = model.model(tokens, output_hidden_states=True).hidden_states
    for layer in range(checkpoint.config["num_hidden_layers"]):
        run = runner(checkpoint, layer)
        with run.watching() as routes:
            after = run(rows)
        assert len(routes) == 1
        for found, wanted in zip(routes[0], seen[layer], strict=True):
            torch.testing.assert_close(found, wanted)
        if layer + 1 < checkpoint.config["num_hidden_layers"]:  # the last one is normed
            torch.testing.assert_close(after, expected[layer + 1])
        rows = after
    torch.testing.assert_close(model.model.norm(rows), expected[-1])


def test_gradients(checkpoint, model, tokens):
    layers = checkpoint.config["num_hidden_layers"]
    rows = [embedded(checkpoint, tokens)]
    runs = [runner(checkpoint, layer) for layer in range(layers)]
    for run in runs:
        with torch.no_grad():
            rows.append(run(rows[-1]))
    inner = {}

    def keep(number):
        def hook(_module, _arguments, result):
            result.retain_grad()
            inner[number] = result

        return hook

    for number, layer in enumerate(model.model.layers):
        layer.mlp.experts.register_forward_hook(keep(number))
    start = rows[0].clone().requires_grad_()
    logits = model(inputs_embeds=start).logits.flatten(0, 1)
    draws = torch.rand(60, generator=torch.Generator().manual_seed(1))
    labels = capture._sample(logits.detach(), draws)
    torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()

    head = weights(checkpoint, "model.norm.weight", "model.embed_tokens.weight")
    if "lm_head.weight" in checkpoint.tensors:
        head |= weights(checkpoint, "lm_head.weight")
    slope = capture.loss_gradient(checkpoint.config, head, CPU)(rows[-1].flatten(0, 1), draws)
    slope = slope.view_as(rows[-1])
    for layer in reversed(range(layers)):
        slope, gradient = runs[layer].backward(rows[layer], slope)
        torch.testing.assert_close(gradient, inner[layer].grad.view_as(gradient))
    torch.testing.assert_close(slope, start.grad)
    assert slope.abs().max() > 0


class Seen:
    """What passes through every layer of a whole model, and through its experts."""

    def __init__(self, model):
        self.before, self.after, self.routes, self.given = {}, {}, {}, {}
        for number, layer in enumerate(model.model.layers):
            layer.register_forward_pre_hook(partial(self.enter, number), with_kwargs=True)
            layer.register_forward_hook(partial(self.leave, number))
            for name, module in layer.named_modules():
                if name.endswith(".experts"):
                    module.register_forward_pre_hook(partial(self.route, number))
                    module.register_forward_hook(partial(self.give, number))

    def enter(self, number, _module, arguments, named):
        self.before[number] = (*arguments, *named.values())[0]

    def leave(self, number, _module, _arguments, result):
        self.after[number] = result[0] if isinstance(result, tuple) else result

    def route(self, number, _module, arguments):
        self.routes[number] = arguments

    def give(self, number, _module, _arguments, result):
        result.retain_grad()
        self.given[number] = result


# Where a family has them, so that a layer that is not like the first shows.
UNLIKE = {"num_hidden_layers": 2, "routed_scaling_factor": 1.7, "logit_scale": 0.3}
WINDOWED = {"sliding_window": 5}


@pytest.mark.parametrize("name", sorted(CALIBRATED))
def test_every_architecture_that_is_calibrated(tmp_path, name):
    """Rows, routes and gradients are those of the whole model, dense layers and kinds included."""
    windows = WINDOWED if AutoConfig.for_model(name).to_dict().get("sliding_window") else {}
    kinds = KINDS[name].changes.get("layer_types")
    more = {"layer_types": kinds * 2} if kinds is not None and len(kinds) == 1 else {}
    write_model(tmp_path, name, **UNLIKE, **windows, **more)
    checkpoint = open_checkpoint(tmp_path)
    experts = find_experts(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    tokens = torch.randint(96, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model(tokens, use_cache=False).logits.flatten(0, 1)
    seen = Seen(model)
    (embedding,) = weights(checkpoint, embedding_name(checkpoint)).values()
    start = embedding[tokens].requires_grad_()
    logits = model(inputs_embeds=start, use_cache=False).logits.flatten(0, 1)
    draws = torch.rand(60, generator=torch.Generator().manual_seed(1))
    labels = capture._sample(logits.detach(), draws)
    torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    assert torch.equal(plain, logits)
    assert torch.equal(seen.before[0], start)

    runs, rows = [runner(checkpoint, layer) for layer in range(2)], [start.detach()]
    for layer, run in enumerate(runs):
        with torch.no_grad(), run.watching() as routes:
            rows.append(run(rows[-1]))
        torch.testing.assert_close(rows[-1], seen.after[layer].detach())
        assert len(routes) == (layer in experts.layers)
        for found in routes:
            for one, other in zip(found, seen.routes[layer], strict=True):
                torch.testing.assert_close(one, other.detach())
            assert len(found) == 3
    outer = weights(checkpoint, *outer_names(checkpoint, experts))
    slope = capture.loss_gradient(checkpoint.config, outer, CPU)(rows[-1].flatten(0, 1), draws)
    slope = slope.view_as(rows[-1])
    for layer in (1, 0):
        slope, gradient = runs[layer].backward(rows[layer], slope)
        assert (gradient is not None) == (layer in experts.layers)
        if gradient is not None:
            torch.testing.assert_close(gradient, seen.given[layer].grad.view_as(gradient))
    torch.testing.assert_close(slope, start.grad)
    assert slope.abs().max() > 0


def test_labels_are_sampled_from_the_distribution():
    logits = torch.log(torch.tensor([0.1, 0.6, 0.3])).repeat(10_000, 1)
    draws = torch.rand(10_000, generator=torch.Generator().manual_seed(0))
    shares = torch.bincount(capture._sample(logits, draws), minlength=3) / 10_000
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.6, 0.3]), atol=0.02, rtol=0)
    ends = torch.tensor([0.0, 1 - 2**-30])
    assert capture._sample(logits[:2], ends).tolist() == [0, 2]


def test_only_one_layer_is_in_memory(checkpoint):
    run = runner(checkpoint, 0)
    held = sum(value.numel() for value in run.model.parameters())
    layer = sum(value.numel() for value in layer_weights(checkpoint, 0).values())
    assert held <= layer + 4 * checkpoint.config["hidden_size"]


def test_weights_that_do_not_fit_are_refused(checkpoint):
    given = layer_weights(checkpoint, 0)
    changes = one_layer_changes(find_experts(checkpoint), 0)
    for change in ({next(iter(given)): None}, {"more.weight": torch.ones(2)}):
        changed = {n: w for n, w in (given | change).items() if w is not None}
        with pytest.raises(FormatError, match="does not take the checkpoint's tensors"):
            capture.LayerRunner(checkpoint.config, 0, changes, changed, CPU)
