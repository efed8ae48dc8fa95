"""Trains a byte-level mixture-of-experts language model on real text, with the experts in BF16, MXFP8 or NVFP4.

    python examples/train_moe.py --recipe mxfp8     # 300 steps, about two minutes on two cores
    python examples/train_moe.py --compare          # plain torch FP32, bf16, mxfp8 and nvfp4 in one plot

Writes to --out: RECIPE.json (settings, losses), RECIPE.pt (checkpoint) and loss.png. Needs matplotlib and tqdm.
Everything but the experts is FP32. The same seed gives the same parameters and batches in every recipe, and the same
losses bit for bit in every run. The same command with --resume goes on from the checkpoint as if it had never stopped.
"""

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from cudnn_grouped.nn import GroupedMLP, permute, unpermute
from cudnn_grouped.nn.grouped_mlp import ACTIVATIONS

RECIPES = ("torch", "bf16", "mxfp8", "nvfp4")
SIZES = {"layers": 2, "d_model": 128, "heads": 4, "ffn": 256, "experts": 8, "top_k": 2, "context": 128, "batch": 16}
# What a checkpoint must share with the run that resumes it; other options may change.
IDENTITY = ("recipe", "activation", "text", "steps", "seed", "learning_rate", *SIZES)
HELD_OUT_BYTES = 2**16  # at most
SMOOTHING = 20  # steps, in the plot and the table


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    run = parser.add_argument_group("run")
    run.add_argument("--recipe", choices=RECIPES, default="mxfp8", help="torch is the same model in plain torch, FP32")
    run.add_argument(
        "--compare", nargs="*", choices=RECIPES, metavar="RECIPE", help="several of them; all without names"
    )
    run.add_argument("--activation", choices=list(ACTIVATIONS), default="swiglu")
    run.add_argument("--text", help="a file to learn; Python's own documentation by default")
    run.add_argument("--out", type=Path, default=Path("train_moe"), help="folder for what is written")
    run.add_argument("--steps", type=int, default=300)
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, if there is one")
    run.add_argument("--stop-after", type=int, metavar="STEP", help="leave early, as if interrupted")
    run.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    size = parser.add_argument_group("size")
    for name, value in SIZES.items():
        size.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, metavar="N", help=f"default {value}")
    size.add_argument("--learning-rate", type=float, default=3e-3, metavar="R", help="at its peak, default 3e-3")
    return parser.parse_args(argv)


# The model


def reference_experts(x, experts, prob, fc1_weight, fc2_weight, activation):
    """What permute, GroupedMLP and unpermute compute, in plain torch: expert by expert, in the dtype of x."""
    y = torch.zeros_like(x)
    for expert, (fc1, fc2) in enumerate(zip(fc1_weight, fc2_weight)):
        token, slot = (experts == expert).nonzero(as_tuple=True)
        hidden = prob[token, slot, None] * reference_activation(x[token] @ fc1.T, activation)
        y = y.index_add(0, token, hidden @ fc2.T)
    return y


def reference_activation(c, activation):
    if activation == "srelu":
        return F.relu(c).square()
    gate, up = c.unflatten(-1, (-1, 2, 32)).unbind(-2)  # columns alternate in blocks of 32
    gate, up = gate.flatten(-2), up.flatten(-2)
    if activation == "swiglu":
        return F.silu(gate) * up
    if activation == "geglu":
        gate = gate.clamp(max=7)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)
    if activation == "clamped_swiglu":
        return F.silu(gate.clamp(max=10)) * up.clamp(-10, 10)
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)  # situglu


class MoE(nn.Module):
    """Router and experts. Returns the output and the load-balancing loss (Switch Transformer, eq. 4): 1 at balance."""

    def __init__(self, options):
        super().__init__()
        self.top_k, self.recipe, self.activation = options.top_k, options.recipe, options.activation
        self.router = nn.Linear(options.d_model, options.experts, bias=False)
        recipe = "bf16" if self.recipe == "torch" else self.recipe  # "torch" takes the parameters only
        self.mlp = GroupedMLP(options.experts, options.d_model, options.ffn, self.activation, recipe)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        router_prob = self.router(tokens).softmax(-1)
        prob, experts = router_prob.topk(self.top_k)
        prob = prob / prob.sum(-1, keepdim=True)
        load = F.one_hot(experts, router_prob.shape[-1]).sum(1).float().mean(0) / self.top_k
        balance = router_prob.shape[-1] * (load * router_prob.mean(0)).sum()
        if self.recipe == "torch":
            y = reference_experts(tokens, experts, prob, self.mlp.fc1_weight, self.mlp.fc2_weight, self.activation)
        else:
            rows, row_prob, permutation = permute(tokens, experts, prob, self.mlp.num_experts)
            y = unpermute(self.mlp(rows, permutation.padded_offsets, row_prob), permutation)
        return y.view_as(x), balance


def rotate(x):
    """Rotary position embedding of (batch, heads, time, width): halves are paired."""
    time, half = x.shape[-2], x.shape[-1] // 2
    angle = torch.arange(time)[:, None] * 1e4 ** (-torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Block(nn.Module):
    def __init__(self, options):
        super().__init__()
        width = options.d_model
        self.heads = options.heads
        self.attention_norm, self.moe_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.moe = MoE(options)

    def forward(self, x):
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        y, balance = self.moe(self.moe_norm(x))
        return x + y, balance


class Model(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.embedding = nn.Embedding(256, options.d_model)
        nn.init.normal_(self.embedding.weight, std=0.1)  # about the size of what a layer adds to it
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm, self.head = nn.RMSNorm(options.d_model), nn.Linear(options.d_model, 256, bias=False)

    def forward(self, tokens):
        """(batch, time) bytes to their (batch, time, 256) logits and the mean load-balancing loss of the layers."""
        x = self.embedding(tokens)
        balance = 0.0
        for block in self.blocks:
            x, layer_balance = block(x)
            balance = balance + layer_balance / len(self.blocks)
        return self.head(self.norm(x)), balance


# The text


def load_text(path=None):
    """(training bytes, held-out bytes): the last tenth is held out, or less of a long text."""
    if path is None:
        from pydoc_data.topics import topics  # the language reference, part of every Python installation

        text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        text = Path(path).read_bytes()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    held_out = min(len(data) // 10, HELD_OUT_BYTES)
    return data[: len(data) - held_out], data[len(data) - held_out :]


def unigram_entropy(data):
    """Nats per byte of the best model that ignores context."""
    share = data.bincount(minlength=256) / len(data)
    return -torch.special.xlogy(share, share).sum().item()


def batch_at(data, options, index):
    """Inputs and targets. A function of the seed and the index alone, so a resumed run needs no generator's state."""
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + index)
    starts = torch.randint(len(data) - options.context, (options.batch, 1), generator=generator)
    windows = data[starts + torch.arange(options.context + 1)]
    return windows[:, :-1], windows[:, 1:]


# Training


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def learning_rate(options, step):
    """Linear warm-up over the first twentieth, then a cosine to zero."""
    warm_up = max(1, options.steps // 20)
    if step < warm_up:
        return options.learning_rate * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, options.steps - warm_up)
    return options.learning_rate * (0.5 + 0.5 * math.cos(math.pi * progress))


@torch.no_grad()
def held_out_loss(model, data, options):
    """Mean over all of the held-out text, window by window."""
    count = (len(data) - 1) // options.context
    inputs, targets = (part[: count * options.context].view(count, -1) for part in (data[:-1], data[1:]))
    total = 0.0
    for x, y in zip(inputs.split(options.batch), targets.split(options.batch)):
        total += cross_entropy(model(x)[0], y).item() * len(x)
    return total / count


def train(options):
    """Trains one recipe; writes and returns its record."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(options.seed)
    training, held_out = load_text(options.text)
    if len(held_out) <= options.context:
        raise ValueError(f"text: expected more than {10 * options.context} bytes, got {len(training) + len(held_out)}")
    model = Model(options)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    identity = {name: getattr(options, name) for name in IDENTITY}
    checkpoint, losses, seconds = options.out / f"{options.recipe}.pt", [], 0.0
    if options.resume and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        for name, value in identity.items():
            if state["identity"][name] != value:
                raise ValueError(f"{name}: {checkpoint} has {state['identity'][name]}, this run {value}")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses, seconds = state["losses"], state["seconds"]
    options.out.mkdir(parents=True, exist_ok=True)
    stop = min(options.steps, options.stop_after or options.steps)
    started = time.perf_counter() - seconds
    with tqdm(total=options.steps, initial=len(losses), desc=options.recipe, unit="step") as progress:
        for step in range(len(losses), stop):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(options, step)
            inputs, targets = batch_at(training, options, step)
            logits, balance = model(inputs)
            loss = cross_entropy(logits, targets)
            optimizer.zero_grad()
            (loss + 0.01 * balance).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            progress.update()
            if len(losses) % options.checkpoint_every == 0 or len(losses) == stop:
                state = {"identity": identity, "losses": losses, "seconds": time.perf_counter() - started}
                save(checkpoint, state | {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    record = {
        "settings": identity,
        "unigram_entropy": unigram_entropy(held_out),
        "seconds": time.perf_counter() - started,
        "held_out_loss": held_out_loss(model, held_out, options),
        "losses": losses,
    }
    (options.out / f"{options.recipe}.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


def save(path, state):
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


# The report


def plot(records, path):
    """The training losses, and below them their ratio to bf16 where that was run."""
    smooth = {recipe: moving_mean(record["losses"]) for recipe, record in records.items()}
    base = smooth.get("bf16")
    figure = Figure(figsize=(8, 7), layout="constrained")
    upper, *lower = figure.subplots(1 if base is None else 2, sharex=True, squeeze=False)[:, 0]
    for index, (recipe, record) in enumerate(records.items()):
        steps = range(len(record["losses"]) - len(smooth[recipe]), len(record["losses"]))
        upper.plot(record["losses"], color=f"C{index}", alpha=0.2)
        upper.plot(steps, smooth[recipe], color=f"C{index}", label=f"{recipe}: held out {record['held_out_loss']:.4f}")
        for axes in lower:
            axes.plot(steps, 100 * (smooth[recipe] / base - 1), color=f"C{index}")
            axes.set_ylabel("to bf16, %")
    upper.axhline(record["unigram_entropy"], color="gray", linestyle=":", label="unigram entropy")
    upper.set_ylabel("training loss, nats per byte")
    upper.legend()
    figure.supxlabel(f"step (lines: mean of {SMOOTHING} steps)")
    figure.savefig(path, dpi=120)


def moving_mean(losses):
    losses = torch.tensor(losses)
    return losses.unfold(0, min(SMOOTHING, len(losses)), 1).mean(1)


def report(records):
    """A table; differences are to bf16 where that was run."""
    base = records.get("bf16")
    print(f"{'recipe':8} {'held-out loss':>14} {'to bf16':>9} {f'last {SMOOTHING} steps':>14} {'seconds':>8}")
    for recipe, record in records.items():
        loss, last = record["held_out_loss"], record["losses"][-SMOOTHING:]
        ratio = f"{loss / base['held_out_loss'] - 1:+9.2%}" if base else f"{'-':>9}"
        print(f"{recipe:8} {loss:14.4f} {ratio} {sum(last) / len(last):14.4f} {record['seconds']:8.1f}")
    print(f"a model without context would reach {record['unigram_entropy']:.4f}")


def main(argv=None):
    options = parse_arguments(argv)
    recipes = [options.recipe] if options.compare is None else options.compare or RECIPES
    records = {}
    for recipe in recipes:
        records[recipe] = train(argparse.Namespace(**{**vars(options), "recipe": recipe}))
    plot(records, options.out / "loss.png")
    report(records)
    return records


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"train_moe: {error}")
