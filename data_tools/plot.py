#!/usr/bin/env python3
"""Draws train and validation perplexity of a run, or of several, to a PNG.

    plot.py runs/italian                     writes runs/italian/perplexity.png
    plot.py runs/a runs/b --out both.png --x tokens --line unigram=1499 --line bigram=144

A run is a folder with metrics.jsonl, or such a file. A run that is still going, or that was killed, leaves its last
line unfinished: that line is left out.
"""

import argparse
import json
import math
import pathlib
import sys
from typing import NamedTuple

import numpy as np

from errors import DataToolError, UsageError, describe_os_error

SMOOTHING_WINDOWS = 40  # the smoothed curve averages over this fraction of the run


class Curve(NamedTuple):
    x: np.ndarray
    perplexity: np.ndarray


def read_metrics(path: pathlib.Path) -> list[dict]:
    path = path / "metrics.jsonl" if path.is_dir() else path
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror} -> give a run folder with a metrics.jsonl") from None
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if number == len(lines):  # no newline after it: still being written, or cut off
                break
            raise DataToolError(
                f"{path}:{number}: {error} -> only a last line may be unfinished; the file is damaged"
            ) from None
        records.append(record)
    return records


def curve(records: list[dict], split: str, x_key: str) -> Curve:
    """Points in order of x; of several for one step (a run that was resumed) the latest. Non-finite ones are gaps."""
    points: dict[float, float] = {}
    for record in records:
        x, y = record.get(x_key), record.get("perplexity")
        if record.get("split") == split and isinstance(x, (int, float)) and isinstance(y, (int, float)):
            points[x] = y if math.isfinite(y) and y > 0 else math.nan
    x = np.array(sorted(points), dtype=float)
    return Curve(x, np.array([points[value] for value in x], dtype=float))


def smoothed(values: np.ndarray) -> np.ndarray:
    """A centred geometric mean. Its window grows from the start, where the curve is steep, and is cut at the end."""
    logs = np.log(values)
    half = len(values) // SMOOTHING_WINDOWS // 2
    index = np.arange(len(logs))
    reach = np.minimum(index, half)
    finite = np.isfinite(logs)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, logs, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    low, high = index - reach, np.minimum(index + reach + 1, len(logs))
    with np.errstate(invalid="ignore"):
        return np.exp((sums[high] - sums[low]) / (counts[high] - counts[low]))


def draw(
    runs: dict[str, list[dict]], x_key: str, lines: dict[str, float], title: str | None, out: pathlib.Path
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(9, 5.5), dpi=120, layout="constrained")
    drawn = 0
    for index, (name, records) in enumerate(runs.items()):
        prefix = f"{name}: " if len(runs) > 1 else ""
        color = f"C{index}"
        train = curve(records, "train", x_key)
        validation = curve(records, "validation", x_key)
        drawn += len(train.x) + len(validation.x)
        if len(train.x):
            axes.plot(train.x, train.perplexity, color=color, alpha=0.25, linewidth=0.8)
            axes.plot(train.x, smoothed(train.perplexity), color=color, linewidth=1.6, label=f"{prefix}train")
        if len(validation.x):
            last = validation.perplexity[-1]
            axes.plot(
                validation.x,
                validation.perplexity,
                color=color if len(runs) > 1 else "C3",
                linestyle="--",
                marker="o",
                markersize=4,
                label=f"{prefix}validation (last {last:.4g})",
            )
    if drawn == 0:
        raise DataToolError(
            f"no point to draw: no record has split, {x_key} and perplexity -> is the run past its first step?"
        )
    for number, (name, value) in enumerate(lines.items()):
        axes.axhline(
            value,
            color="0.35",
            linewidth=1.0,
            linestyle=("dotted", "dashdot")[number % 2],
            label=f"{name} {value:.4g}",
        )
    axes.set_yscale("log")
    plain = ticker.FuncFormatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_locator(ticker.LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter(plain)
    axes.set_xlabel("step" if x_key == "step" else "tokens")
    axes.set_ylabel("perplexity")
    axes.set_title(title or ", ".join(runs))
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    figure.savefig(out)
    pyplot.close(figure)


def named_value(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not name or not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=PERPLEXITY")
    return name, number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN", help="run folders, or metrics.jsonl files")
    parser.add_argument("--out", type=pathlib.Path, help="the PNG (default: perplexity.png in the first run's folder)")
    parser.add_argument("--x", choices=("step", "tokens"), default="step", help="horizontal axis (default: step)")
    parser.add_argument(
        "--line",
        type=named_value,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a horizontal line to compare with",
    )
    parser.add_argument("--title")
    arguments = parser.parse_args()
    first = arguments.runs[0]
    out = arguments.out or (first if first.is_dir() else first.parent) / "perplexity.png"
    try:
        runs = {}
        for run in arguments.runs:
            name = (run if run.is_dir() else run.parent).resolve().name
            runs[name if name not in runs else str(run)] = read_metrics(run)
        draw(runs, arguments.x, dict(arguments.line), arguments.title, out)
    except DataToolError as error:
        print(f"plot.py: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"plot.py: {describe_os_error(error, out)}", file=sys.stderr)
        return 3
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
