#!/usr/bin/env python3
"""Trains the benchmark's Llama in PyTorch on random tokens and prints its speed as one JSON line.

The opponent of `trainer bench step` in cpu_vs_pytorch.sh, written to be fast: fused kernels where
PyTorch has them, and every choice that depends on the machine (bf16 weights or autocast, grouped or
expanded attention heads, compiled or not) is tried first and the fastest kept.

    pytorch_llama.py --precision bf16            one line: tokens_per_second, the way chosen, step times
    pytorch_llama.py --precision bf16 --gemm     one line: GFLOP/s of the model's matrix products alone
"""

import argparse
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, VOCABULARY = 512, 8, 8, 4, 1408, 8192
HEAD_DIM = HIDDEN // HEADS
SEQUENCE, BATCH = 512, 4
TOKENS = SEQUENCE * BATCH  # per step


class Attention(nn.Module):
    def __init__(self, grouped: bool):
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.grouped = grouped

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, HEADS, HEAD_DIM).transpose(1, 2)      # (B, Hq, S, D)
        k = self.k(x).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)   # (B, Hkv, S, D)
        v = self.v(x).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.grouped:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            ratio = HEADS // KV_HEADS
            k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, HEADS * HEAD_DIM))


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, grouped: bool):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN, eps=1e-5), nn.RMSNorm(HIDDEN, eps=1e-5)
        self.attention = Attention(grouped)
        self.gate = nn.Linear(HIDDEN, FFN, bias=False)
        self.up = nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, grouped: bool):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block(grouped) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(SEQUENCE), 1e4 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Trainer:
    """One way to run the step. A way is (weights fp32|bf16, attention grouped|expanded, compiled|eager)."""

    def __init__(self, precision: str, way: tuple):
        weights, attention, compiled = way
        torch.manual_seed(42)
        self.model = Llama(attention == "grouped")
        if weights == "bf16":
            self.model = self.model.to(torch.bfloat16)
        self.autocast = precision == "bf16" and weights == "fp32"
        self.loss = torch.compile(self.model) if compiled == "compiled" else self.model
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)

    def step(self) -> dict:
        """Forward, backward, clipping and AdamW on fresh random tokens."""
        text = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1))
        wall, cpu = time.perf_counter(), time.process_time()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss = self.loss(text[:, :-1], text[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        value = loss.item()
        return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "loss": value}


def trial(precision: str, way: tuple) -> float:
    """Seconds a step takes: of two after one of warm-up, or of the first where that is very long."""
    trainer = Trainer(precision, way)
    seconds = trainer.step()["cpu"]
    if seconds < 60 or way[2] == "compiled":
        seconds = min(trainer.step()["cpu"] for _ in range(2))
    print(f"tried {' '.join(way)}: {seconds:.2f} CPU seconds a step", file=sys.stderr)
    return seconds


def fastest_way(precision: str, try_compiler: bool) -> tuple:
    weights = ("fp32", "bf16") if precision == "bf16" else ("fp32",)
    eager = {way: trial(precision, way)
             for way in ((w, a, "eager") for w in weights for a in ("grouped", "expanded"))}
    best = min(eager, key=eager.get)
    if try_compiler:
        compiled = (*best[:2], "compiled")
        try:
            if trial(precision, compiled) < eager[best]:
                return compiled
        except RuntimeError as error:  # what torch.compile raises where no C++ compiler works
            print(f"torch.compile does not work here: {str(error).splitlines()[0]}", file=sys.stderr)
    return best


def train(arguments) -> dict:
    way = tuple(arguments.way.split(",")) if arguments.way else fastest_way(arguments.precision,
                                                                           arguments.compile)
    trainer = Trainer(arguments.precision, way)
    for _ in range(arguments.warmup):
        trainer.step()
    steps = [trainer.step() for _ in range(arguments.steps)]
    seconds = [step[arguments.clock] for step in steps]
    return {"tokens_per_second": TOKENS / statistics.median(seconds), "step_seconds": seconds,
            "cpu_share": sum(step["cpu"] for step in steps) / sum(step["wall"] for step in steps), "way": ",".join(way),
            "loss": steps[-1]["loss"], "parameters": sum(p.numel() for p in trainer.model.parameters())}


def gemm_shapes() -> list:
    """(name, rows, columns, inner, times a step): forward, gradient by input, gradient by weight."""
    shapes = []
    for name, out, inner, count in (("q and o", HIDDEN, HIDDEN, 2 * LAYERS),
                                    ("k and v", KV_HEADS * HEAD_DIM, HIDDEN, 2 * LAYERS),
                                    ("gate and up", FFN, HIDDEN, 2 * LAYERS),
                                    ("down", HIDDEN, FFN, LAYERS), ("head", VOCABULARY, HIDDEN, 1)):
        shapes += [(f"{name}, forward", TOKENS, out, inner, count),
                   (f"{name}, input gradient", TOKENS, inner, out, count),
                   (f"{name}, weight gradient", out, inner, TOKENS, count)]
    return shapes


def gemm(arguments) -> dict:
    """Rate over all matrix products of a step, each timed alone (median), weighted as the step uses them."""
    dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    total_seconds = total_work = 0.0
    rates = {}
    for name, rows, columns, inner, count in gemm_shapes():
        # The operand layouts of nn.Linear: x W^T, g W, g^T x.
        if name.endswith("forward"):
            a, b = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype).T
        elif name.endswith("input gradient"):
            a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
        else:
            a, b = torch.randn(inner, rows).to(dtype).T, torch.randn(inner, columns).to(dtype)
        times = []
        clock = time.perf_counter if arguments.clock == "wall" else time.process_time
        began = clock()
        while len(times) < 26 and clock() - began < 0.5:
            start = clock()
            torch.mm(a, b)
            times.append(clock() - start)
        times = times[1:] or times  # the first is warm-up, unless a single product takes all the time
        work, seconds = 2.0 * rows * columns * inner, statistics.median(times)
        rates[name] = work / seconds / 1e9
        total_work += count * work
        total_seconds += count * seconds
    return {"gemm_gflops": total_work / total_seconds / 1e9, "gemm_seconds_per_step": total_seconds,
            "gemm_gflops_by_shape": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5, help="measured steps (default 5)")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them (default 1)")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall",
                        help="cpu: the process's time on a processor (one thread, a machine in use)")
    parser.add_argument("--compile", action="store_true", help="try torch.compile too (a minute or more)")
    parser.add_argument("--way", metavar="WAY", help="skip the trials: WEIGHTS,ATTENTION,COMPILED of "
                        "fp32|bf16, grouped|expanded, compiled|eager, as an earlier run printed it")
    parser.add_argument("--gemm", action="store_true", help="measure the matrix products alone")
    arguments = parser.parse_args()
    if arguments.way:
        allowed = (("fp32", "bf16"), ("grouped", "expanded"), ("compiled", "eager"))
        parts = arguments.way.split(",")
        if len(parts) != 3 or any(part not in choice for part, choice in zip(parts, allowed)):
            parser.error(f"--way {arguments.way}: not of the form fp32|bf16,grouped|expanded,compiled|eager")
    torch.set_num_threads(arguments.threads)
    result = gemm(arguments) if arguments.gemm else train(arguments)
    print(json.dumps({"program": "pytorch", "torch": torch.__version__, "precision": arguments.precision,
                      "threads": arguments.threads, "clock": arguments.clock, **result}))


if __name__ == "__main__":
    main()
