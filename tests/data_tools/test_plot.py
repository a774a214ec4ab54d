"""plot.py draws what metrics.jsonl holds, also of a run that was cut off."""

import json
import struct

import numpy as np
import plot
import pytest
from conftest import run_tool
from errors import DataToolError


@pytest.fixture
def run_folder(tmp_path):
    lines = []
    for step in range(1, 51):
        lines.append({"step": step, "split": "train", "perplexity": 1000 / step, "tokens": 64 * step})
        if step % 10 == 0:
            lines.append({"step": step, "split": "validation", "perplexity": 1100 / step, "tokens": 64 * step})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_draws_a_picture_of_an_unfinished_run(run_folder):
    with open(run_folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 51, "split": "tra')
    result = run_tool("plot.py", run_folder, "--line", "bigram=144", "--x", "tokens")
    assert result.returncode == 0, result.stderr
    png = (run_folder / "perplexity.png").read_bytes()
    width, height = struct.unpack(">II", png[16:24])
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and width > 800 and height > 400
    records = plot.read_metrics(run_folder)
    assert len(records) == 55
    train = plot.curve(records, "train", "tokens")
    assert train.x.tolist() == [64.0 * step for step in range(1, 51)]
    assert train.perplexity.tolist() == [1000 / step for step in range(1, 51)]
    assert plot.curve(records, "validation", "step").x.tolist() == [10, 20, 30, 40, 50]


def test_a_damaged_line_inside_is_an_error_with_its_number(run_folder):
    path = run_folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[3] = lines[3][:20]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataToolError, match="metrics.jsonl:4"):
        plot.read_metrics(run_folder)


def test_runs_without_points_or_files_are_refused(tmp_path):
    assert run_tool("plot.py", tmp_path).returncode == 2
    (tmp_path / "metrics.jsonl").write_text("")
    empty = run_tool("plot.py", tmp_path)
    assert empty.returncode == 3 and "no point to draw" in empty.stderr


def test_a_repeated_step_counts_once_and_a_non_finite_one_is_a_gap():
    records = [
        {"step": s, "split": "train", "perplexity": p} for s, p in ((1, 9.0), (2, 8.0), (2, 7.0), (3, float("inf")))
    ]
    found = plot.curve(records, "train", "step")
    assert found.x.tolist() == [1, 2, 3] and found.perplexity[1] == 7.0 and np.isnan(found.perplexity[2])


def test_smoothing_keeps_a_line_on_log_paper_and_bridges_gaps():
    values = np.exp(np.linspace(5, 1, 200))
    assert plot.smoothed(values)[:-5] == pytest.approx(values[:-5], rel=1e-9)
    values[50] = np.nan
    assert np.isfinite(plot.smoothed(values)).all()
