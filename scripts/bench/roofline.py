#!/usr/bin/env python3
"""The roofline of a training step: what each operation must read, write and compute, and the time that a GPU needs for it at its limits.

Nothing here is measured. An operation takes the longer of bytes / bandwidth and FLOPs / rate; a step is the sum, so no
operation overlaps another, and collectives are taken to hide behind it. Sizes are those of src/model/llama.cpp at
precision bf16: bf16 weights and activations, fp32 gradients, master weights and moments, nothing computed twice.

    roofline.py                       the tables in Markdown
    roofline.py --write docs/kernels.md   puts them into the page; --check: are they current?
    roofline.py --measured times.json times of scripts/gpu_kernels.sh against the limits
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
import pages

BF16, FP32 = 2, 4
MEBI = 1 << 20


@dataclass(frozen=True)
class Gpu:
    name: str
    bandwidth: float  # bytes/s
    tensor: float  # dense bf16 FLOP/s of the tensor cores
    vector: float  # fp32 FLOP/s outside them


GPUS = (
    Gpu("A100", 2.0e12, 312e12, 19.5e12),
    Gpu("H200", 4.8e12, 990e12, 67e12),
)


@dataclass(frozen=True)
class Shape:
    """A model, a micro-batch and a sharding; the defaults are Llama 3.1 8B, 2 x 2048 tokens, 8 ranks."""

    batch: int = 2
    sequence: int = 2048
    hidden: int = 4096  # C
    intermediate: int = 14336  # F
    layers: int = 32
    query_heads: int = 32
    key_value_heads: int = 8
    head_size: int = 128
    vocabulary: int = 128256
    shard: int = 8  # S: AdamW updates 1/S of the parameters
    logits_bytes: int = 64 * MEBI  # src/model/activations.h
    backward_products: int = 5  # of attention; 7 as cuda/kernels/attention_backward.cu is written

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def query(self) -> int:
        return self.query_heads * self.head_size

    @property
    def key(self) -> int:
        return self.key_value_heads * self.head_size

    @property
    def chunk(self) -> int:
        """Tokens whose logits exist at once: loss_chunk_tokens of src/model/activations.cpp."""
        rows = self.logits_bytes // (self.vocabulary * BF16) // 128 * 128
        return min(max(rows, 128), self.tokens)

    @property
    def layer_parameters(self) -> int:
        c = self.hidden
        return c * (self.query + 2 * self.key) + self.query * c + 3 * c * self.intermediate + 2 * c

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def shard_elements(self) -> int:
        return math.ceil(self.parameters / self.shard)

    def model_flops(self) -> float:
        """model_flops_per_token of src/train/flops.h, over the micro-batch: what MFU divides by."""
        c, q = self.hidden, self.query
        weights = self.layers * (self.layer_parameters - 2 * c) + c * self.vocabulary
        return self.tokens * (6 * weights + 6 * self.layers * self.sequence * q)


@dataclass(frozen=True)
class Work:
    """One operation and how often a step runs it. Bytes and FLOPs are those of one call."""

    phase: str  # forward, backward, optimizer, outside the step
    name: str
    shape: str
    calls: int
    bytes: float
    flops: float
    tensor: bool = False  # on tensor cores

    def limit(self, gpu: Gpu) -> str:
        return "memory" if self.memory_seconds(gpu) >= self.compute_seconds(gpu) else "compute"

    def memory_seconds(self, gpu: Gpu) -> float:
        return self.bytes / gpu.bandwidth

    def compute_seconds(self, gpu: Gpu) -> float:
        return self.flops / (gpu.tensor if self.tensor else gpu.vector)

    def call_seconds(self, gpu: Gpu) -> float:
        return max(self.memory_seconds(gpu), self.compute_seconds(gpu))

    def step_seconds(self, gpu: Gpu) -> float:
        return self.calls * self.call_seconds(gpu)


def gemm(phase, name, calls, m, n, k, out_bytes=BF16, accumulate=False) -> Work:
    """(m, n) (+)= (m, k) (k, n): every matrix is moved once, the result twice where it is added to."""
    moved = (m * k + k * n) * BF16 + m * n * out_bytes * (2 if accumulate else 1)
    return Work(phase, name, f"{m} x {n} x {k}", calls, moved, 2.0 * m * n * k, tensor=True)


def linear(name, calls, tokens, outputs, inputs, chunks=1) -> list[Work]:
    """Forward, input gradient and weight gradient of y = x w^T over all tokens, `chunks` equal pieces a call.
    The weight gradient is fp32; every piece but the first adds to it."""
    n = tokens // chunks
    works = [
        gemm("forward", f"{name}", calls * chunks, n, outputs, inputs),
        gemm("backward", f"{name}, input gradient", calls * chunks, n, inputs, outputs),
        gemm("backward", f"{name}, weight gradient", calls, outputs, inputs, n, FP32),
    ]
    if chunks > 1:
        more = gemm("backward", f"{name}, weight gradient added", calls * (chunks - 1), outputs, inputs, n, FP32, True)
        works.append(more)
    return works


def attention(s: Shape) -> list[Work]:
    """Causal: half of the T x T products, 2 T^2/2 D FLOPs each and head. Forward has two (q k^T, p v), backward five (q k^T
    again, dout v^T, dv, dq, dk). Backward also reads out and dout once for the row sums of their product."""
    product = s.batch * s.query_heads * s.sequence * s.sequence * s.head_size
    rows = s.batch * s.query_heads * s.sequence
    queries, keys = s.tokens * s.query * BF16, s.tokens * s.key * BF16
    shape = f"{s.batch} x {s.sequence}, {s.query_heads}/{s.key_value_heads} x {s.head_size}"
    forward = 2 * queries + 2 * keys + rows * FP32
    # q, dout, out in; dq out; k, v in; dk, dv out; lse in; row sums out and in.
    backward = 4 * queries + 4 * keys + 3 * rows * FP32
    return [
        Work("forward", "attention_forward", shape, s.layers, forward, 2 * product, tensor=True),
        Work("backward", "attention_backward", shape, s.layers, backward, s.backward_products * product, tensor=True),
    ]


def step(s: Shape) -> list[Work]:
    """Every operation of one optimizer step of one micro-step, largest shapes first within a phase."""
    n, c, f, layers = s.tokens, s.hidden, s.intermediate, s.layers
    row = n * c * BF16  # one (N, C) matrix
    rotated = s.query + s.key
    if n % s.chunk != 0:
        raise ValueError(f"{n} tokens are not whole pieces of {s.chunk} -> choose logits_bytes so that they are")
    chunks = n // s.chunk
    logits = s.chunk * s.vocabulary
    table = s.vocabulary * c
    p = s.shard_elements

    works = []
    works += linear("linear q, k, v", layers, n, s.query + 2 * s.key, c)
    works += linear("linear output", layers, n, c, s.query)
    works += linear("linear gate, up", layers, n, 2 * f, c)
    works += linear("linear down", layers, n, c, f)
    works += linear("linear vocabulary", 1, n, s.vocabulary, c, chunks)
    works += attention(s)

    def kernel(phase, name, shape, calls, moved, flops):
        works.append(Work(phase, name, shape, calls, moved, flops))

    nc, rms = f"{n} x {c}", n * FP32 + c * BF16  # rstd, weight
    kernel("forward", "embedding_forward", nc, 1, 2 * row + n * 4, 0)
    kernel("forward", "rmsnorm_forward, first", nc, 1, 2 * row + rms, 4 * n * c)
    kernel("forward", "rmsnorm_forward, residual added", nc, 2 * layers, 4 * row + rms, 5 * n * c)
    tables = s.sequence * s.head_size * FP32
    kernel("forward", "rope", f"{n} x {rotated}", layers, 2 * n * rotated * BF16 + tables, 3 * n * rotated)
    kernel("forward", "swiglu_forward", f"{n} x {f}", layers, 3 * n * f * BF16, 6 * n * f)
    # Two reads (a row of logits does not fit a block's shared memory) and one write.
    kernel("forward", "cross_entropy", f"{s.chunk} x {s.vocabulary}", chunks, 3 * logits * BF16, 7 * logits)

    # dy, dresidual, h in; dx out; the head's norm has no dresidual.
    norm_flops = 10 * n * c
    kernel("backward", "rmsnorm_backward, residual added", nc, 2 * layers, 4 * row + rms + c * FP32, norm_flops)
    kernel("backward", "rmsnorm_backward, head", nc, 1, 3 * row + rms + c * FP32, norm_flops)
    kernel("backward", "rope, inverse", f"{n} x {rotated}", layers, 2 * n * rotated * BF16 + tables, 3 * n * rotated)
    kernel("backward", "swiglu_backward", f"{n} x {f}", layers, 5 * n * f * BF16, 12 * n * f)
    # The table's gradient is zeroed whole; the rows of the tokens are read, added to and written.
    scattered = table * FP32 + row + 2 * n * c * FP32 + n * 4
    kernel("backward", "embedding_backward", f"{s.vocabulary} x {c}", 1, scattered, n * c)

    kernel("optimizer", "sum_of_squares", f"{p}", 1, p * FP32, 2 * p)
    # Parameter, m, v in and out, gradient in, the bf16 copy out.
    kernel("optimizer", "adamw", f"{p}", 1, p * (7 * FP32 + BF16), 14 * p)
    return works


def outside_step(s: Shape) -> list[Work]:
    """Kernels that run at aggregations and at the start, over a rank's fp32 shard."""
    p = s.shard_elements
    block = 256

    def kernel(name, bytes_per_element, flops_per_element):
        return Work("outside the step", name, f"{p}", 1, p * bytes_per_element, p * flops_per_element)

    return [
        kernel("initialize_normal", FP32, 0),
        kernel("fill", FP32, 0),
        kernel("cast, fp32 to bf16", FP32 + BF16, 0),
        kernel("axpby", 3 * FP32, 3),
        kernel("sgd", 3 * FP32 + BF16, 4),
        kernel("pseudo_gradient", 3 * FP32, 1),
        # delta, theta_old, momentum in; theta_old, momentum, theta and its bf16 copy out.
        kernel("outer_step, diloco", 6 * FP32 + BF16, 6),
        # x and error in; q, error and a scale a block out.
        kernel("quantize_int8", 3 * FP32 + 1 + FP32 / block, 5),
        # q and scales in, added to out.
        kernel("dequantize_int8, added", 1 + FP32 / block + 2 * FP32, 3),
    ]


def step_seconds(works: list[Work], gpu: Gpu) -> float:
    return sum(w.step_seconds(gpu) for w in works)


def model_flops_utilization(s: Shape, gpu: Gpu) -> float:
    return s.model_flops() / (gpu.tensor * step_seconds(step(s), gpu))


# ---- Markdown ----


def in_order(works: list[Work]) -> list[Work]:
    return sorted(works, key=lambda w: ("forward", "backward", "optimizer").index(w.phase))


def count(value: float, unit: str) -> str:
    """Three digits and a decimal prefix: 1.07 GB."""
    if value == 0:
        return "0"
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor * 0.9995:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f}" if seconds >= 1e-4 else f"{seconds * 1e6:.1f}"


def operations_table(works: list[Work]) -> list[str]:
    lines = [
        "| operation | shape | calls a step | bytes a call | FLOPs a call | "
        + " | ".join(f"{g.name} us a call, limit" for g in GPUS)
        + " |",
        "|---|---|---:|---:|---:|" + "---:|" * len(GPUS),
    ]
    phase = None
    for w in works:
        if w.phase != phase:
            phase = w.phase
            lines.append(f"| **{phase}** | | | | |" + " |" * len(GPUS))
        times = " | ".join(f"{microseconds(w.call_seconds(g))} {w.limit(g)}" for g in GPUS)
        calls = "" if phase == "outside the step" else w.calls
        lines.append(f"| {w.name} | {w.shape} | {calls} | {count(w.bytes, 'B')} | {count(w.flops, 'F')} | {times} |")
    return lines


def step_table(works: list[Work], s: Shape) -> list[str]:
    lines = ["| milliseconds a step | " + " | ".join(g.name for g in GPUS) + " |", "|---|" + "---:|" * len(GPUS)]

    def row(name, chosen):
        values = (1e3 * sum(w.step_seconds(g) for w in works if chosen(w)) for g in GPUS)
        lines.append(f"| {name} | " + " | ".join(f"{v:.1f}" for v in values) + " |")

    for phase in ("forward", "backward", "optimizer"):
        row(phase, lambda w, phase=phase: w.phase == phase)
    row("all", lambda w: True)
    row("of it: matrix products", lambda w: w.name.startswith("linear"))
    row("of it: attention", lambda w: w.name.startswith("attention"))
    row("of it: every other kernel", lambda w: not w.tensor)
    for name, shape in (
        ("MFU at these limits", s),
        ("MFU with 7 products in attention's backward, as it is written", replace(s, backward_products=7)),
    ):
        values = (f"{100 * model_flops_utilization(shape, g):.1f} %" for g in GPUS)
        lines.append(f"| {name} | " + " | ".join(values) + " |")
    values = (f"{s.tokens / step_seconds(works, g):,.0f}" for g in GPUS)
    lines.append("| tokens a second and GPU | " + " | ".join(values) + " |")
    return lines


def chunk_table() -> list[str]:
    """What the memory given to logits costs: pieces of few tokens read the vocabulary matrix and add to its gradient
    too often."""
    lines = [
        "| logits at once | tokens a piece | pieces | " + " | ".join(f"{g.name} ms, MFU" for g in GPUS) + " |",
        "|---|---:|---:|" + "---:|" * len(GPUS),
    ]
    for mebibytes in (64, 128, 256, 512, 1024):
        s = Shape(logits_bytes=mebibytes * MEBI)
        works = step(s)
        cells = (f"{1e3 * step_seconds(works, g):.1f}, {100 * model_flops_utilization(s, g):.1f} %" for g in GPUS)
        lines.append(f"| {mebibytes} MiB | {s.chunk} | {s.tokens // s.chunk} | " + " | ".join(cells) + " |")
    return lines


def report() -> str:
    s = Shape()
    works = step(s)
    return "\n".join([*operations_table(in_order(works) + outside_step(s)), "", *step_table(works, s), "", *chunk_table()])


# ---- measured times ----


def measured_table(record: dict) -> list[str]:
    """record: {"gpu": NAME, "seconds": {operation: median}}, operations called as in the tables. The GPU's limits are
    those whose name the device's contains; another device and unknown operations are refused with ValueError."""
    gpu = next((g for g in GPUS if g.name in record["gpu"]), None)
    if gpu is None:
        known = ", ".join(g.name for g in GPUS)
        raise ValueError(f"no limits are known for {record['gpu']} (known: {known}) -> add them to GPUS")
    s = Shape()
    works = {w.name: w for w in step(s) + outside_step(s)}
    lines = [
        f"Measured on {record['gpu']}: median of warm runs, CUDA events, random data.",
        "",
        "| operation | shape | us | us at the limit | share of the limit |",
        "|---|---|---:|---:|---:|",
    ]
    for name, seconds in record["seconds"].items():
        if name not in works:
            raise ValueError(f"{name} was timed, but there is no such operation -> add it to step or outside_step")
        w = works[name]
        limit = w.call_seconds(gpu)
        cells = f"{microseconds(seconds)} | {microseconds(limit)} {w.limit(gpu)} | {100 * limit / seconds:.0f} %"
        lines.append(f"| {w.name} | {w.shape} | {cells} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    pages.add_arguments(parser)
    parser.add_argument("--measured", type=Path, metavar="TIMES", help="a record of scripts/gpu_kernels.sh")
    arguments = parser.parse_args()
    if arguments.measured:
        print("\n".join(measured_table(json.loads(arguments.measured.read_text()))))
        return 0
    return pages.publish(arguments, "roofline", report(), "scripts/bench/roofline.py --write docs/kernels.md")


if __name__ == "__main__":
    sys.exit(main())
