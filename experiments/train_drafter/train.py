"""Train the DFlash drafter on text that the target generated, and report accepted length on held-out prompts.

    python train.py --target DIR --data data.npz --prompts tuning.jsonl hidden.jsonl --out DIR --minutes 9 --device cuda

The recipe is the published one (random anchors, same-position labels, slot 0 excluded, weights exp(-(k-1)/gamma),
frozen head, warm-up 4 % and cosine, clip 1.0) but for two things, both options: matrices are updated by Muon instead of
AdamW, and the slot weights move towards the gradient of the expected accepted length (loss.py). The schedule runs on
the clock, so that a run fits a fixed time.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from drafter import Drafter, DrafterShape
from evaluate import accepted_length, held_out
from loss import HeadLoss, chunk_gradient
from safetensors.torch import load_file
from target import Target
from tokenizers import Tokenizer
from torch import Tensor


def optimisers(drafter: Drafter, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for matrices (or AdamW with --adamw), AdamW for norms."""
    matrices = [p for p in drafter.parameters() if p.ndim == 2]
    vectors = [p for p in drafter.parameters() if p.ndim < 2]
    small = torch.optim.AdamW(vectors, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    if args.adamw:
        return [
            small,
            torch.optim.AdamW(
                matrices, lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=args.device == "cuda"
            ),
        ]
    return [
        small,
        torch.optim.Muon(
            matrices, lr=args.lr, weight_decay=args.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
    ]


def draw(data: dict[str, Tensor], rows: Tensor, anchors: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids [S, L], anchor positions [S, A] and labels [S, A, block - 1] (-1: none) for the sequences `rows`.

    Anchors are drawn without replacement from the answer's tokens; where an answer has fewer, the rest carry no label.
    """
    ids = data["tokens"][rows].long()
    start, end = data["prompt_length"][rows], data["length"][rows]
    positions = torch.arange(ids.shape[1], device=ids.device)
    usable = (positions >= start[:, None]) & (positions < end[:, None] - 1)
    keys = torch.rand(ids.shape, device=ids.device).masked_fill(~usable, -1.0)
    chosen = keys.topk(anchors, dim=1)
    where = chosen.indices[..., None] + torch.arange(1, block, device=ids.device)
    labels = ids.gather(1, where.clamp_max(ids.shape[1] - 1).flatten(1)).view_as(where)
    known = (where < end[:, None, None]) & (chosen.values[..., None] >= 0)
    return ids, chosen.indices, torch.where(known, labels, -1)


def load_data(path: Path, device: torch.device) -> dict[str, Tensor]:
    """The arrays of generate.py on the device."""
    arrays = np.load(path)
    return {
        name: torch.from_numpy(arrays[name].astype(np.int32)).to(device)
        for name in ("tokens", "prompt_length", "length", "kind")
    }


def schedule(progress: float, warmup: float, floor: float) -> float:
    """Learning-rate factor at `progress` in [0, 1]: linear warm-up, then cosine down to `floor`."""
    if progress < warmup:
        return max(progress / warmup, 0.01)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))
    return floor + (1 - floor) * cosine


class Trainer:
    """Holds target, drafter, data and optimisers; one call of `step` is one update."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.target = Target(args.target, self.device, self.dtype)
        taps = tuple(int(tap) for tap in args.taps.split(","))
        s = self.target.shape
        self.shape = DrafterShape(
            hidden=s.hidden, layers=args.layers, intermediate=args.intermediate, heads=s.heads, kv_heads=s.kv_heads,
            head_dim=s.head_dim, eps=s.eps, theta=s.theta, vocabulary=len(self.target.embed), target_layers=s.layers, tap_ids=taps,
        )  # fmt: skip
        self.drafter = Drafter(self.shape).to(self.device)
        with torch.no_grad():
            self.drafter.norm.weight.copy_(self.target.final_norm.float())
        if args.init:
            self.drafter.load_state_dict(
                {name: tensor.float() for name, tensor in load_file(args.init / "model.safetensors").items()}
            )
        self.optimisers = optimisers(self.drafter, args)
        self.data = load_data(args.data, self.device)
        self.tables = self.drafter.tables(2048, self.device, self.dtype)
        self.decay = torch.exp(-torch.arange(self.shape.block_size - 1, device=self.device) / args.gamma)
        compiled = (
            (lambda function: torch.compile(function, dynamic=False)) if args.compile else (lambda function: function)
        )
        self.taps_of, self.draft, self.gradient_of = (
            compiled(self._taps),
            compiled(self._draft),
            compiled(chunk_gradient),
        )
        self.order = torch.empty(0, dtype=torch.long, device=self.device)

    @torch.no_grad()
    def _taps(self, ids: Tensor) -> Tensor:
        return self.target.taps(ids, list(self.shape.tap_ids))

    def _draft(self, taps: Tensor, anchor_embedding: Tensor, anchors: Tensor) -> Tensor:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is torch.bfloat16):
            return self.drafter(
                taps, anchor_embedding, self.target.embed[self.shape.mask_token_id], anchors, self.tables
            )

    def next_rows(self) -> Tensor:
        """Indices of the next batch; every sequence once per epoch."""
        count = self.args.sequences
        if len(self.order) < count:
            self.order = torch.cat([self.order, torch.randperm(len(self.data["length"]), device=self.device)])
        rows, self.order = self.order[:count], self.order[count:]
        return rows

    def step(self, factor: float, mix: float) -> tuple[Tensor, Tensor]:
        """One update at learning-rate factor `factor`; returns loss and mean accepted length over the drawn anchors."""
        ids, anchors, labels = draw(self.data, self.next_rows(), self.args.anchors, self.shape.block_size)
        taps = self.taps_of(ids)
        anchor_embedding = self.target.embed[ids.gather(1, anchors)]
        states = self.draft(taps, anchor_embedding, anchors).to(self.dtype)
        mixing = torch.tensor(mix, device=self.device)
        loss, hits = HeadLoss.apply(
            states.flatten(0, 1),
            self.target.head,
            labels.flatten(0, 1),
            self.decay,
            mixing,
            self.args.chunk,
            self.gradient_of,
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = self.args.lr * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        usable = labels.flatten(0, 1)[:, 0] >= 0
        accepted = 1 + hits.int().cumprod(-1).sum(-1)
        return loss.detach(), (accepted * usable).sum() / usable.sum()


def run(trainer: Trainer, args: argparse.Namespace) -> None:
    """Train for `args.minutes`, evaluating and saving on the way and at the end."""
    prompts = held_out(
        trainer.target, Tokenizer.from_file(str(args.target / "tokenizer.json")), args.prompts, args.eval_tokens
    )
    log = args.out / "log.jsonl"
    args.out.mkdir(parents=True, exist_ok=True)

    def report(record: dict[str, object]) -> None:
        print(json.dumps(record), flush=True)
        with log.open("a") as stream:
            stream.write(json.dumps(record) + "\n")

    parameters = sum(p.numel() for p in trainer.drafter.parameters())
    report(
        {
            "parameters": parameters,
            "sequences": len(trainer.data["length"]),
            "args": {k: str(v) for k, v in vars(args).items()},
        }
    )
    began, number, progress = time.time(), 0, 0.0
    losses, lengths = [], []
    next_eval = args.eval_every
    while progress < 1.0 and (not args.steps or number < args.steps):
        mix = args.mix * min(1.0, max(0.0, (progress - 0.1) / 0.3))
        loss, length = trainer.step(schedule(progress, args.warmup, args.floor), mix)
        losses.append(loss)
        lengths.append(length)
        number += 1
        if number % 20 == 0:
            if trainer.device.type == "cuda":
                torch.cuda.synchronize()  # so that the clock below is the device's, too
            if number == 20:
                began = time.time()  # compilation is not training time
            progress = (time.time() - began) / (60 * args.minutes)
        if number % 200 == 0 or number == args.steps:
            report(
                {
                    "step": number,
                    "seconds": round(time.time() - began, 1),
                    "loss": round(float(torch.stack(losses).mean()), 4),
                    "train_accepted": round(float(torch.stack(lengths).mean()), 3),
                }
            )
            losses, lengths = [], []
        if progress >= next_eval:
            report(
                {
                    "step": number,
                    "progress": round(progress, 3),
                    **accepted_length(trainer.drafter, trainer.target, prompts),
                }
            )
            trainer.drafter.save(args.out)
            next_eval += args.eval_every
    trainer.drafter.save(args.out)
    report(
        {
            "step": number,
            "seconds": round(time.time() - began, 1),
            "final": True,
            **accepted_length(trainer.drafter, trainer.target, prompts),
        }
    )


def main() -> None:
    """Parse, train, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="held-out prompts, for the report only")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="checkpoint folder to continue from")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--steps", type=int, default=0, help="stop after so many updates, too")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--intermediate", type=int, default=1024)
    parser.add_argument("--taps", default="1,8,15,22,28")
    parser.add_argument("--sequences", type=int, default=48, help="sequences per update")
    parser.add_argument("--anchors", type=int, default=160, help="anchors per sequence")
    parser.add_argument("--chunk", type=int, default=1280, help="anchors per chunk of the loss")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--adamw", action="store_true", help="AdamW for matrices, too")
    parser.add_argument("--gamma", type=float, default=4.0)
    parser.add_argument("--mix", type=float, default=0.5, help="final share of the accepted-length slot weights")
    parser.add_argument("--warmup", type=float, default=0.04)
    parser.add_argument("--floor", type=float, default=0.01, help="learning-rate factor at the end")
    parser.add_argument("--eval-every", type=float, default=0.25, help="fraction of the run between evaluations")
    parser.add_argument("--eval-tokens", type=int, default=256)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    run(Trainer(args), args)


if __name__ == "__main__":
    main()
