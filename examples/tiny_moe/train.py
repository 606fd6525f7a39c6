"""Train the tiny model, tokenizer and all, from the text that prepare_text.py cut.

    python train.py train text .                        # as the model here was made; wants a GPU
    python train.py train text /tmp/tiny --steps 20 --batch 4   # a look at it on a CPU
    python train.py evaluate .                          # what the saved files reach, on the CPU

`train TEXT OUT` writes OUT/model as the Hugging Face Hub has it (config, tokenizer, two shards and
their index), OUT/eval.txt, OUT/calib.txt and OUT/training.json; `evaluate OUT` reads them back
through transformers and adds what it finds to training.json.
"""

import json
import math
import shutil
import time
from pathlib import Path

import click
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

END = "<|endoftext|>"  # token 0
CONTEXT = 512
SEED = 0
PEAK_LR = 3e-3  # the best of 3e-3, 6e-3 and 12e-3 over 400 steps
FINAL_LR_SHARE = 0.01
WARMUP_STEPS = 200
WEIGHT_DECAY = 0.1
BALANCE_COEF = 0.01  # weight of the load-balancing loss
SHARD_SIZE = "1200KB"  # two shards, so that the index is used

CONFIG = transformers.Qwen3MoeConfig(
    vocab_size=1024,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    intermediate_size=256,
    norm_topk_prob=True,
    router_aux_loss_coef=BALANCE_COEF,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=0,
)


def train_tokenizer(documents: list[str]) -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level BPE of CONFIG.vocab_size entries; END is token 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG.vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: transformers.PreTrainedTokenizerFast, documents: list[str]) -> torch.Tensor:
    """Return the tokens of all documents, END after each but the last: [n] int64."""
    encoded = tokenizer.backend_tokenizer.encode_batch([d + END for d in documents])
    return torch.tensor([i for e in encoded for i in e.ids][:-1])


def dense_experts(
    experts: torch.nn.Module, hidden: torch.Tensor, top_ids: torch.Tensor, top_weights: torch.Tensor
) -> torch.Tensor:
    """Run every expert on every token and weigh; for 4 experts two matrix products beat a loop.

    hidden: [T, H]; top_ids, top_weights: [T, k]. Returns [T, H].
    """
    num_experts, double_inner, width = experts.gate_up_proj.shape
    weights = torch.zeros(len(hidden), num_experts, dtype=top_weights.dtype, device=hidden.device)
    weights = weights.scatter(1, top_ids, top_weights)  # [T, E]
    gate_up = F.linear(hidden, experts.gate_up_proj.reshape(-1, width))
    gate, up = gate_up.view(-1, num_experts, double_inner).chunk(2, dim=-1)  # [T, E, I] each
    inner = F.silu(gate) * up * weights[..., None]
    down = experts.down_proj.permute(0, 2, 1).reshape(-1, width)  # [E*I, H]
    return inner.flatten(1) @ down


def balance_loss(router_logits: torch.Tensor) -> torch.Tensor:
    """Return one layer's load-balancing loss, 1 at balance.

    router_logits: [T, E]. E times the sum over experts of (share of routes) * (mean probability).
    """
    num_experts, k = router_logits.shape[-1], CONFIG.num_experts_per_tok
    probabilities = router_logits.float().softmax(-1)
    top_ids = probabilities.topk(k, dim=-1).indices
    shares = F.one_hot(top_ids, num_experts).float().mean((0, 1))
    return num_experts * (shares * probabilities.mean(0)).sum()


def losses(model: torch.nn.Module, windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cross entropy in nats a token, mean balance loss) of windows [B, L + 1] int64."""
    out = model.model(windows[:, :-1], use_cache=False, output_router_logits=True)
    logits = model.lm_head(out.last_hidden_state).float()
    cross_entropy = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    return cross_entropy, torch.stack([balance_loss(r) for r in out.router_logits]).mean()


def learning_rate(step: int, steps: int) -> float:
    """Return the rate of a step: linear warm-up, then a cosine down to FINAL_LR_SHARE."""
    warmup = min(WARMUP_STEPS, steps // 10 + 1)
    if step < warmup:
        return PEAK_LR * (step + 1) / warmup
    cosine = 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))
    return PEAK_LR * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * cosine)


def fit(
    model: torch.nn.Module, train: torch.Tensor, calib: torch.Tensor, steps: int, batch: int
) -> list[dict[str, float]]:
    """Train model in place on random windows of train; return the losses along the way.

    train, calib: [n] int64 tokens. batch: windows of CONTEXT tokens a step.
    """
    device = model.device
    train = train.to(device)
    generator = torch.Generator().manual_seed(SEED)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=True)
    is_cuda = device.type == "cuda"  # a CPU trains in float32: few of them are quick at bfloat16
    losses_fn = torch.compile(losses) if is_cuda else losses
    held_out = calib[: (len(calib) - 1) // CONTEXT * CONTEXT + 1].unfold(0, CONTEXT + 1, CONTEXT)
    held_out = held_out[:batch].to(device)
    offsets = torch.arange(CONTEXT + 1, device=device)
    curve = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        starts = torch.randint(len(train) - CONTEXT, (batch, 1), generator=generator)
        windows = train[starts.to(device) + offsets]
        with torch.autocast(device.type, torch.bfloat16, enabled=is_cuda):
            cross_entropy, balance = losses_fn(model, windows)
        (cross_entropy + BALANCE_COEF * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % (steps // 20 or 1) == 0 or step == steps - 1:
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=is_cuda):
                calib_loss, _ = losses(model, held_out)
            point = {"train": cross_entropy, "balance": balance, "calib": calib_loss}
            curve.append({"step": step, **{k: round(v.item(), 4) for k, v in point.items()}})
            click.echo(" ".join(f"{k} {v}" for k, v in curve[-1].items()))
    return curve


def eval_windows(tokens: torch.Tensor) -> list[torch.Tensor]:
    """Cut tokens [n] into windows of CONTEXT; each predicts all its tokens but the first."""
    return [w for w in tokens.split(CONTEXT) if len(w) > 1]


def unigram_cross_entropy(train: torch.Tensor, windows: list[torch.Tensor]) -> float:
    """Return the cross entropy in nats a token that the token counts of train reach, plus one."""
    counts = torch.bincount(train, minlength=CONFIG.vocab_size) + 1.0
    targets = torch.cat([w[1:] for w in windows])
    return F.cross_entropy(counts.log().expand(len(targets), -1), targets).item()


def read_tokens(
    text: Path,
) -> tuple[transformers.PreTrainedTokenizerFast, dict[str, torch.Tensor]]:
    """Return the tokenizer of TEXT/train.txt and the tokens of all three texts."""
    documents = {
        split: (text / f"{split}.txt").read_text(encoding="utf-8").split(END)
        for split in ("train", "calib", "eval")
    }
    tokenizer = train_tokenizer(documents["train"])
    return tokenizer, {split: encode(tokenizer, texts) for split, texts in documents.items()}


def write_json(path: Path, value: dict[str, object]) -> None:
    """Write value as JSON, two spaces an indent."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def save(
    model: torch.nn.Module, tokenizer: transformers.PreTrainedTokenizerFast, out: Path
) -> None:
    """Write the checkpoint in bfloat16, one tensor an expert and matrix, as the Hub has them."""
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    model.to("cpu", torch.bfloat16).save_pretrained(out, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(out)
    # transformers 5 writes num_local_experts; checkpoints on the Hub say num_experts.
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config["num_experts"] = CONFIG.num_experts
    write_json(out / "config.json", dict(sorted(config.items())))


@torch.inference_mode()
def measure(model: torch.nn.Module, windows: list[torch.Tensor]) -> tuple[float, list[list[float]]]:
    """Return (cross entropy in nats a token, share of the routes of each expert by layer)."""
    nats, routes = 0.0, torch.zeros(CONFIG.num_hidden_layers, CONFIG.num_experts)
    for window in windows:
        result = model(window[None], output_router_logits=True)
        logits = result.logits[0, :-1].float()
        nats += F.cross_entropy(logits, window[1:], reduction="sum").item()
        for layer, router_logits in enumerate(result.router_logits):
            top_ids = router_logits.topk(CONFIG.num_experts_per_tok, dim=-1).indices
            routes[layer] += torch.bincount(top_ids.flatten(), minlength=CONFIG.num_experts)
    shares = routes / routes.sum(1, keepdim=True)
    return nats / sum(len(w) - 1 for w in windows), shares.tolist()


@click.group()
def main() -> None:
    """Train or evaluate the tiny mixture-of-experts model."""


@main.command()
@click.argument("text", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--steps", default=12_000, show_default=True)
@click.option("--batch", default=128, show_default=True, help=f"Windows of {CONTEXT} tokens a step")
def train(text: Path, out: Path, steps: int, batch: int) -> None:
    """Train on TEXT/train.txt and write OUT/model and OUT/training.json."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED)
    tokenizer, tokens = read_tokens(text)
    click.echo(f"{len(tokens['train'])} tokens of text to train on")

    ALL_EXPERTS_FUNCTIONS.register("dense", dense_experts)
    model = transformers.Qwen3MoeForCausalLM(CONFIG).to(device)
    model.set_experts_implementation("dense")
    start = time.perf_counter()
    curve = fit(model, tokens["train"], tokens["calib"], steps, batch)
    seconds = time.perf_counter() - start

    out.mkdir(parents=True, exist_ok=True)
    save(model, tokenizer, out / "model")
    for split in ("calib", "eval"):
        shutil.copyfile(text / f"{split}.txt", out / f"{split}.txt")
    unigram = unigram_cross_entropy(tokens["train"], eval_windows(tokens["eval"]))
    report = {
        "steps": steps,
        "tokens_a_step": batch * CONTEXT,
        "tokens_trained": steps * batch * CONTEXT,
        "tokens_of_text": len(tokens["train"]),
        "epochs": round(steps * batch * CONTEXT / len(tokens["train"]), 2),
        "peak_learning_rate": PEAK_LR,
        "seed": SEED,
        "seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "losses": curve,
        "unigram_on_eval": {"cross_entropy": unigram, "perplexity": math.exp(unigram)},
    }
    write_json(out / "training.json", report)


@main.command()
@click.argument("out", type=click.Path(exists=True, file_okay=False, path_type=Path))
def evaluate(out: Path) -> None:
    """Measure OUT/model on OUT/eval.txt: the saved bfloat16 weights, float32 arithmetic, CPU."""
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "model")
    text = (out / "eval.txt").read_text(encoding="utf-8")
    tokens = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    windows = eval_windows(tokens)
    cross_entropy, shares = measure(model, windows)
    num_bytes = len(text.encode())
    report = json.loads((out / "training.json").read_text(encoding="utf-8"))
    report["saved_files_on_eval"] = {
        "window": CONTEXT,
        "tokens_predicted": sum(len(w) - 1 for w in windows),
        "arithmetic": "float32",
        "device": "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cross_entropy": cross_entropy,
        "perplexity": math.exp(cross_entropy),
        "bits_a_byte": cross_entropy / math.log(2) * len(tokens) / num_bytes,
        "expert_shares_by_layer": [[round(s, 4) for s in layer] for layer in shares],
    }
    write_json(out / "training.json", report)
    click.echo(json.dumps(report["saved_files_on_eval"], indent=2))


if __name__ == "__main__":
    main()
