#!/usr/bin/env python3
"""A longer run at equal tokens: FSDP against FL+FSDP, FL+HSDP and DiLoCo, validated once an epoch.

Writes long_run.md and long_run.png to --out. Called by long_run.sh, which prepares the shards.
"""

import argparse
import json
import pathlib
from dataclasses import dataclass

import numpy as np

import runs
from runs import Mesh, Metrics

RANKS = 8
SEQUENCE = 256
BATCH = 1  # sequences a rank and step


@dataclass(frozen=True)
class Case:
    mesh: Mesh
    federation: dict


CASES = [
    Case(Mesh("FSDP", 1, 1, 8), {}),
    Case(Mesh("FL+FSDP", 4, 1, 2), {"every": 8, "rule": "fedavg"}),
    Case(Mesh("FL+HSDP", 2, 2, 2), {"every": 8, "rule": "fedavg"}),
    Case(Mesh("DiLoCo", 4, 1, 2), {"every": 32, "rule": "diloco"}),
]


def sequences(index: pathlib.Path) -> int:
    """Sequences in an epoch, from the description that prepare.py leaves beside the shard."""
    return (json.loads(index.read_text())["tokens"] - 1) // SEQUENCE


def config(case: Case, steps: int, epoch_steps: int, shards: pathlib.Path, vocab_size: int) -> dict:
    return {
        "model": {
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "vocab_size": vocab_size,
            "tie_word_embeddings": True,
        },
        "data": {
            "train": str(shards / "train"),
            "validation": str(shards / "validation"),
            "sequence_length": SEQUENCE,
            "batch_size": BATCH,
        },
        "mesh": {"federate": case.mesh.federate, "replicate": case.mesh.replicate, "shard": case.mesh.shard},
        "federation": case.federation,
        "precision": "bf16",
        "optimizer": {"lr": 3e-3},
        "schedule": {"kind": "cosine", "steps": steps, "warmup_steps": steps // 20, "min_lr": 1e-4},
        "evaluation": {"every": epoch_steps},
        "timeout_seconds": 3600,
    }


def table(results: list[tuple[Case, Metrics]]) -> list[str]:
    epochs = len(results[0][1].evaluation_loss)
    lines = [
        "| run | mesh | aggregates every | " + " | ".join(f"after epoch {e + 1}" for e in range(epochs)) + " | against FSDP |",
        "|---" * (epochs + 4) + "|",
    ]
    base = results[0][1].evaluation_loss[-1]
    for case, m in results:
        every = case.federation.get("every", "-")
        values = " | ".join(f"{np.exp(loss):.2f}" for loss in m.evaluation_loss)
        lines.append(f"| {case.mesh.name} | {case.mesh} | {every} | {values} | {np.exp(m.evaluation_loss[-1] - base):.3f} |")
    return lines


def draw(results: list[tuple[Case, Metrics]], out: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(9, 5.5), dpi=110, layout="constrained")
    for index, (case, m) in enumerate(results):
        window = max(1, len(m.loss) // 100)
        smooth = np.exp(np.convolve(m.loss, np.ones(window) / window, mode="valid"))
        axes.plot(m.tokens[window - 1 :], smooth, color=f"C{index}", alpha=0.5, linewidth=1)
        label = f"{case.mesh.name} {case.mesh}, validation"
        at = m.tokens[m.evaluation_step - 1]
        axes.plot(at, np.exp(m.evaluation_loss), color=f"C{index}", marker="o", linestyle="--", label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("tokens")
    axes.set_ylabel("perplexity (thin: training)")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", type=pathlib.Path, required=True)
    parser.add_argument("--shards", type=pathlib.Path, required=True, help="folder with train and validation")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--runs", type=pathlib.Path, required=True, help="folder for the run folders")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the table and the picture")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    epoch_steps = -(-sequences(arguments.shards / "train.json") // (RANKS * BATCH))
    steps = arguments.epochs * epoch_steps
    results = []
    for case in CASES:
        settings = config(case, steps, epoch_steps, arguments.shards, arguments.vocab_size)
        folder = arguments.runs / case.mesh.name.lower().replace("+", "_")
        results.append((case, runs.run(arguments.trainer, folder, case.mesh.ranks, settings)))
    tokens = int(results[0][1].tokens[-1])
    arguments.out.mkdir(parents=True, exist_ok=True)
    draw(results, arguments.out / "long_run.png")
    text = [
        "# A longer run at equal tokens",
        "",
        f"Made by `scripts/reproduce/long_run.sh`: {steps:,} steps, {tokens:,} tokens of Italian text "
        f"({arguments.epochs} epochs), {RANKS} ranks with {BATCH} sequence of {SEQUENCE} tokens each a step, a Llama of "
        "about 3 M parameters, bf16 with fp32 weights, one seed, learning rate 3e-3 for every run. Validation "
        "perplexity on the whole validation split: after the last step that of the averaged model, before it the mean "
        "over groups unless the step aggregated:",
        "",
        *table(results),
        "",
        "![perplexity](long_run.png)",
        "",
        "One learning rate serves all: FSDP's batch is 4 times (FL+FSDP, DiLoCo) and 2 times (FL+HSDP) a group's. A rate "
        "tuned for each would move these figures; the table says what changing the mesh alone does.",
        "",
    ]
    (arguments.out / "long_run.md").write_text("\n".join(text))
    print(arguments.out / "long_run.md")


if __name__ == "__main__":
    main()
