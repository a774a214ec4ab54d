"""The training loop from outside: what it records, how it stops, what it refuses."""
import json
import math
import os
import pathlib
import re
import shutil
import signal
import sys
import unittest

from program import DEADLINE, MODEL, MPIEXEC, TRAINER, Case, learnable_ids, ranks_of, write_shard

TIMES = {"data", "forward", "backward", "optimizer", "aggregation", "total"}
TRAIN_KEYS = {"step", "split", "loss", "perplexity", "perplexity_rank_mean", "lr", "grad_norm", "grad_norm_max",
              "tokens", "tokens_per_second", "mfu", "time", "aggregation_busy", "bytes", "aggregated", "memory"}
VALIDATION_KEYS = {"step", "split", "loss", "perplexity", "loss_spread", "tokens", "seconds"}
BYTES = {"shard": {"all_gather", "reduce_scatter"}, "replicate": {"all_reduce", "broadcast"},
         "federate": {"all_reduce"}}
MEASURED = {"time", "tokens_per_second", "mfu", "seconds", "aggregation_busy"}  # what differs between two equal runs


def without_times(lines):
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in lines]


class LineChecks(Case):
    def check_lines(self, lines, ranks):
        for step, m in enumerate(lines, 1):
            self.assertEqual(set(m), TRAIN_KEYS)
            self.assertEqual(m["step"], step)
            self.assertAlmostEqual(m["perplexity"], math.exp(m["loss"]), delta=1e-12 * m["perplexity"])
            self.assertEqual(set(m["time"]), TIMES)
            parts = [m["time"][k] for k in TIMES - {"total"}]
            self.assertGreaterEqual(min(parts), 0)
            self.assertGreater(m["time"]["forward"], 0)
            self.assertGreater(m["time"]["backward"], 0)
            self.assertAlmostEqual(sum(parts), m["time"]["total"], delta=1e-9)
            self.assertEqual(m["tokens"], step * ranks * 2 * 16)
            self.assertAlmostEqual(m["tokens_per_second"] * m["time"]["total"], ranks * 2 * 16, delta=1e-3)
            self.assertGreater(m["grad_norm"], 0)
            self.assertGreaterEqual(m["grad_norm_max"], m["grad_norm"])
            self.assertEqual({k: set(v) for k, v in m["bytes"].items()}, BYTES)
            self.assertGreater(m["memory"]["peak_bytes"], 0)
        self.assertLess(lines[-1]["loss"], lines[0]["loss"] - 0.5)


class Metrics(LineChecks):
    def test_one_process(self):
        """Keys are the design's, values are sane, and with one rank the rank mean is the perplexity."""
        config = self.config(schedule={"steps": 100, "kind": "constant"}, peak_tflops=0.5)
        self.expect(self.trainer("--config", config), 0)
        lines = self.metrics()
        self.assertEqual(len(lines), 100)
        self.check_lines(lines, 1)
        self.assertAlmostEqual(lines[0]["loss"], math.log(MODEL["vocab_size"]), delta=0.3)
        for m in lines:
            self.assertEqual(m["lr"], 0.01)
            self.assertAlmostEqual(m["perplexity_rank_mean"], m["perplexity"], delta=1e-9 * m["perplexity"])
            self.assertEqual(m["grad_norm"], m["grad_norm_max"])
            self.assertFalse(m["aggregated"])
            self.assertEqual(sum(sum(group.values()) for group in m["bytes"].values()), 0)
            self.assertGreater(m["mfu"], 0)
            self.assertLess(m["mfu"], 1)

    def test_unknown_peak_is_null(self):
        self.expect(self.trainer("--config", self.config()), 0, "MFU n/a")
        self.assertEqual({m["mfu"] for m in self.metrics()}, {None})

    def test_validation_every_n_steps(self):
        """Every third step and at the end, on the sequences that were asked for, from a model that learns."""
        config = self.config(data=self.validation(), schedule={"steps": 7}, evaluation={"every": 3, "sequences": 5})
        self.expect(self.trainer("--config", config), 0)
        lines = [m for m in self.metrics() if m["split"] == "validation"]
        self.assertEqual([m["step"] for m in lines], [3, 6, 7])
        for m in lines:
            self.assertEqual(set(m), VALIDATION_KEYS)
            self.assertEqual(m["tokens"], 5 * 16)
            self.assertAlmostEqual(m["perplexity"], math.exp(m["loss"]), delta=1e-12 * m["perplexity"])
            self.assertIsNone(m["loss_spread"])
            self.assertGreater(m["seconds"], 0)
        self.assertLess(lines[-1]["loss"], lines[0]["loss"])
        self.assertEqual(len(self.train_lines()), 7)

    def test_validation_leaves_the_run_alone(self):
        self.expect(self.trainer("--config", self.config()), 0)
        self.expect(self.trainer("--config", self.config(data=self.validation(), evaluation={"every": 1},
                                                         run_dir=str(self.folder / "other"))), 0)
        ours, theirs = without_times(self.train_lines()), without_times(self.train_lines("other"))
        for line in ours + theirs:
            del line["memory"]
        self.assertEqual(ours, theirs)

    def test_resolved_configuration_gives_the_same_run(self):
        config = self.config(data=self.validation(), evaluation={"every": 2}, gradient_accumulation=2,
                             precision="bf16", seed=7)
        self.expect(self.trainer("--config", config, "--set", "optimizer.lr=0.02"), 0)
        resolved = str(self.folder / "run" / "config.resolved.json")
        self.expect(self.trainer("--config", resolved, "--set", f"run_dir={self.folder}/again"), 0)
        self.assertEqual(without_times(self.metrics()), without_times(self.metrics("again")))
        self.expect(self.trainer("--config", resolved, "--set", f"run_dir={self.folder}/seed", "--set", "seed=8"), 0)
        self.assertNotEqual(without_times(self.metrics()), without_times(self.metrics("seed")))
        ours, theirs = (json.loads((self.folder / run / "config.resolved.json").read_text())
                        for run in ("run", "again"))
        self.assertEqual(ours.pop("run_dir"), str(self.folder / "run"))
        theirs.pop("run_dir")
        self.assertEqual(ours, theirs)

    def test_an_overflowing_perplexity_is_null(self):
        """exp(loss) of a confident and wrong model is past fp64: JSON has no infinity."""
        config = self.config(model={"initializer_range": 300.0}, schedule={"steps": 1})
        self.expect(self.trainer("--config", config), 0)
        (m,) = self.metrics()
        self.assertGreater(m["loss"], 710)
        self.assertIsNone(m["perplexity"])


class MetricsOfRanks(LineChecks):
    def test_federated(self):
        """Four ranks as FL+FSDP: rank mean, bytes and aggregation of every step."""
        config = self.config(mesh={"federate": 2, "shard": 2}, federation={"every": 4}, data=self.validation(),
                             evaluation={"every": 3}, schedule={"steps": 30, "kind": "constant"})
        self.expect(self.trainer("--config", config, ranks=4), 0)
        lines = self.train_lines()
        self.assertEqual(len(lines), 30)
        self.check_lines(lines, 4)
        for m in lines:
            # exp is convex: the mean of exponentials is at least the exponential of the mean.
            self.assertGreaterEqual(m["perplexity_rank_mean"], m["perplexity"] * (1 - 1e-12))
            self.assertEqual(m["aggregated"], m["step"] % 4 == 0 or m["step"] == 30)
            self.assertEqual(m["bytes"]["federate"]["all_reduce"] > 0, m["aggregated"])
            self.assertEqual(m["bytes"]["replicate"], {"all_reduce": 0, "broadcast": 0})
            self.assertEqual(m["bytes"]["shard"], lines[0]["bytes"]["shard"])
            self.assertGreater(m["bytes"]["shard"]["all_gather"], 0)
            self.assertGreater(m["bytes"]["shard"]["reduce_scatter"], 0)
        self.assertGreater(max(m["perplexity_rank_mean"] / m["perplexity"] for m in lines), 1 + 1e-6)
        for m in self.metrics():
            if m["split"] == "validation":  # one model just after an aggregation, two between
                self.assertEqual(m["loss_spread"] is None, m["step"] % 4 == 0 or m["step"] == 30)
        self.assertEqual([m["step"] for m in self.metrics() if m["split"] == "validation"],
                         [3, 6, 9, 12, 15, 18, 21, 24, 27, 30])


class Signals(Case):
    """Signals reach ranks that stand still, so how many steps may follow does not depend on the clock."""

    def stop(self, ranks, signals, to_all=False, **changes):
        config = self.config(schedule={"steps": 1000000, "warmup_steps": 0}, **changes)
        process = self.start("--config", config, ranks=ranks)
        self.wait_for_steps(process, 3)
        pids = ranks_of(process)
        self.assertEqual(len(pids), ranks)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        before = len(self.metrics())
        for pid in pids if to_all else pids[-1:]:
            for s in signals:
                os.kill(pid, s)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        result = self.finish(process)
        lines = self.metrics()
        self.assertEqual([m["step"] for m in lines], list(range(1, len(lines) + 1)))
        return result, before, len(lines)


class Stop(Signals):
    def test_each_signal(self):
        for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            with self.subTest(s.name):
                result, before, after = self.stop(1, [s], run_dir=str(self.folder / "run"))
                self.expect(result, 75)
                self.assertGreater(after, before)
                # The step whose line was about to be written, the one that was running, and one more should it
                # have ended while the signal was being taken.
                self.assertLessEqual(after, before + 3)
                (self.folder / "run").rename(self.folder / s.name)

    def test_second_signal(self):
        """Another signal while the run is stopping changes nothing. A SIGINT after one kills at once (which of the
        two comes first here is the system's choice): that tears no line either."""
        self.expect(self.stop(1, [signal.SIGTERM, signal.SIGUSR1])[0], 75,
                    "stopped by a signal after step", "--resume auto")
        (self.folder / "run").rename(self.folder / "first")
        result, _, _ = self.stop(1, [signal.SIGTERM, signal.SIGINT])
        self.assertIn(result.code, (75, -signal.SIGINT), result.output)


    def test_threads_that_compute_take_no_signals(self):
        """A handler must not run on a thread that computes (train/signals.h says why)."""
        process = self.start("--config", self.config(schedule={"steps": 1000000}, threads=2))
        self.wait_for_steps(process, 3)
        stops = sum(1 << (s - 1) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))
        takers = []
        for task in pathlib.Path(f"/proc/{process.pid}/task").iterdir():
            blocked = int(re.search(r"^SigBlk:\t(\w+)", (task / "status").read_text(), re.M)[1], 16) & stops
            self.assertIn(blocked, (0, stops))
            if blocked == 0:
                takers.append(int(task.name))
        self.assertEqual(len(takers), 1)
        self.assertNotEqual(takers[0], process.pid)
        process.terminate()
        self.expect(self.finish(process), 75)


class StopOfRanks(Signals):
    def test_one_signal_or_all(self):
        """A signal to any one rank, or to all, stops four ranks at one step."""
        for name, signals, to_all in (("one", [signal.SIGTERM], False), ("all", [signal.SIGINT], True)):
            with self.subTest(name):
                result, before, after = self.stop(4, signals, to_all, mesh={"federate": 2, "shard": 2})
                self.expect(result, 75)
                # The signalled rank may be three steps past the last line. It tells the others with the step after,
                # and they know one step later.
                self.assertLessEqual(after, before + 6)
                (self.folder / "run").rename(self.folder / name)

    def test_second_signal(self):
        result, _, _ = self.stop(4, [signal.SIGTERM, signal.SIGUSR1], True, mesh={"shard": 4})
        self.expect(result, 75)


class NonFinite(Case):
    def test_learning_rate(self):
        """The first update ruins the weights, the second step sees it. Its line is not written."""
        result = self.trainer("--config", self.config(optimizer={"lr": 1e30}))
        self.expect(result, 5, "not finite at step 2", "weights were not touched")
        self.assertEqual([m["step"] for m in self.metrics()], [1])

    def test_initial_weights(self):
        result = self.trainer("--config", self.config(model={"initializer_range": 1e38}))
        self.expect(result, 5, "not finite at step 1")
        self.assertEqual(self.metrics(), [])


class NonFiniteRanks(Case):
    def test_every_rank_leaves(self):
        for mesh in ({"shard": 4}, {"federate": 2, "replicate": 2}):
            with self.subTest(**mesh):
                result = self.trainer("--config", self.config(optimizer={"lr": 1e30}, mesh=mesh), ranks=4)
                self.expect(result, 5, "not finite at step 2", "on 4 rank(s)")
                self.assertEqual([m["step"] for m in self.metrics()], [1])
                (self.folder / "run").rename(self.folder / "_".join(mesh))


class RefusalChecks(Case):
    def refused(self, code, *pieces, sets=(), ranks=1, **changes):
        sets = [part for s in sets for part in ("--set", s)]
        result = self.trainer("--config", self.config(**changes), *sets, ranks=ranks)
        self.expect(result, code, " -> ", *pieces)


class Refusals(RefusalChecks):
    """What the parser, the data reader and the mesh refuse has unit tests; here: that the program says so and
    leaves with the right code, before it makes a run folder."""

    def test_configuration(self):
        self.refused(2, "optimizer.rl", 'did you mean "optimizer.lr"', sets=["optimizer.rl=1"])
        self.refused(2, "optimizer.lr", "1e400", sets=["optimizer.lr=1e400"])
        self.refused(2, "optimizer.lr=nan", sets=["optimizer.lr=nan"])
        self.refused(2, "seed", "9223372036854775808", "2^63 - 1", sets=["seed=9223372036854775808"])
        self.refused(2, "num_key_value_heads", "3", model={"num_attention_heads": 4, "num_key_value_heads": 3})
        self.refused(2, "head_dim", "33", model={"head_dim": 33})
        self.refused(2, "hidden_size", "-8", model={"hidden_size": -8})
        self.refused(2, "data.batch_size", "0", data={"batch_size": 0})
        self.refused(2, "schedule.steps", '"many"', schedule={"steps": "many"})
        self.assertFalse((self.folder / "run").exists())

    def test_small_head_size_is_refused_by_the_kernels_limit(self):
        self.refused(2, "head_dim", "16", "32 to 256", model={"head_dim": 16})

    def test_data(self):
        prefix = self.folder / "train"
        bin_, idx = pathlib.Path(f"{prefix}.bin"), pathlib.Path(f"{prefix}.idx")
        whole, index = bin_.read_bytes(), idx.read_bytes()
        bin_.write_bytes(whole[:-100])
        self.refused(3, "train.idx", "byte 34", "has 8094", run_dir=str(self.folder / "a"))
        bin_.write_bytes(whole)
        idx.write_bytes(index[:9] + b"\2" + index[10:])
        self.refused(3, "train.idx", "byte 9", "version 2", run_dir=str(self.folder / "b"))
        idx.write_bytes(b"X" + index[1:])
        self.refused(3, "train.idx", "byte 0", "MMIDIDX", run_dir=str(self.folder / "c"))
        ids = learnable_ids(4097, 1)
        ids[2000] = 97
        write_shard(prefix, ids)
        self.refused(3, "train.bin", "byte 4000", "token 2000 is 97", "ids 0 to 96", schedule={"steps": 200},
                     run_dir=str(self.folder / "d"))
        self.refused(3, "none.bin", "no such shard", "data_tools/prepare.py", data={"train": str(self.folder / "none")},
                     run_dir=str(self.folder / "e"))

    def test_a_step_without_any_target(self):
        """Every target masked is no loss of 0. The first such step ends the run and no checkpoint is written."""
        write_shard(self.folder / "train", [7] * 4097)
        data = {"ignore_token": 7, **self.validation()}
        self.refused(3, "step 1: all 32 targets of its 2 sequences are data.ignore_token (7)", data=data)
        self.assertEqual(self.metrics(), [])
        self.assertFalse((self.folder / "run/checkpoints").exists())
        ids = learnable_ids(4097, 1)
        write_shard(self.folder / "train", [i if i != 7 else 8 for i in ids[:3000]] + [7] * 1097)
        self.refused(3, "targets of its 2 sequences are data.ignore_token (7)", data=data, schedule={"steps": 200},
                     run_dir=str(self.folder / "mixed"))
        self.assertGreater(min(m["loss"] for m in self.metrics("mixed")), 0)

    def test_a_validation_set_without_any_target(self):
        write_shard(self.folder / "validation", [7] * 513)
        config = self.config(data={"ignore_token": 7, **self.validation()})
        self.expect(self.trainer("--config", config), 0, "every target of the validation sequences", "(7)")
        (m,) = [m for m in self.metrics() if m["split"] == "validation"]
        self.assertEqual((m["loss"], m["perplexity"], m["tokens"]), (None, None, 0))

    def test_a_folder_that_holds_a_run(self):
        self.expect(self.trainer("--config", self.config()), 0)
        before = self.metrics()
        self.refused(2, "already holds a run", "--resume")
        self.assertEqual(self.metrics(), before)


class RefusalsOfRanks(RefusalChecks):
    def test_a_step_without_any_target(self):
        write_shard(self.folder / "train", [7] * 4097)
        for mesh in ({"shard": 4}, {"federate": 2, "replicate": 2}):
            self.refused(3, "step 1: all 128 targets of its 8 sequences are data.ignore_token (7)", ranks=4, mesh=mesh,
                         data={"ignore_token": 7}, run_dir=str(self.folder / "_".join(mesh)))

    def test_bad_data_ends_every_rank(self):
        ids = learnable_ids(4097, 1)
        ids[2000] = 97
        write_shard(self.folder / "train", ids)
        self.refused(3, "token 2000 is 97", ranks=4, mesh={"shard": 4}, schedule={"steps": 200})

    def test_world_that_the_mesh_does_not_fill(self):
        self.refused(2, "federate 2 x replicate 1 x shard 2 = 4 ranks, but 3", ranks=3, mesh={"federate": 2, "shard": 2})
        self.refused(2, "federate 2 x replicate 1 x shard 2 = 4 ranks, but 1", mesh={"federate": 2, "shard": 2})

    def test_ranks_with_different_configurations(self):
        config = self.config(mesh={"shard": 2})
        result = self.finish(self.start_command(
            [MPIEXEC, "-n", "1", TRAINER, "--config", config, ":",
             "-n", "1", TRAINER, "--config", config, "--set", "optimizer.lr=0.5"]))
        self.expect(result, 2, "rank 1 has another configuration than rank 0", "optimizer/lr", "0.5", "0.01", " -> ")
        self.assertFalse((self.folder / "run").exists())

    def test_ranks_of_which_one_resumes(self):
        config = self.config(mesh={"shard": 2}, timeout_seconds=30)
        result = self.finish(self.start_command(
            [MPIEXEC, "-n", "1", TRAINER, "--config", config, "--resume", "auto", ":",
             "-n", "1", TRAINER, "--config", config]))
        self.expect(result, 2, "rank 1 was started with no --resume and rank 0 with --resume auto", " -> ")
        self.assertFalse((self.folder / "run").exists())

    def test_what_all_ranks_refuse_is_said_once(self):
        config, none = self.config(), str(self.folder / "none.json")
        for code, piece, arguments in (
                (2, "--sett", ["--config", config, "--sett", "seed=1"]), (2, "no --config", []),
                (2, "--ranks is only", ["--config", config, "--ranks", "4"]), (2, none, ["--config", none]),
                (2, "unknown key", ["--config", config, "--set", "sede=1"]),
                (2, "1 ranks, but 4", ["--config", config]), (2, "4 ranks", ["bench", "step"]),
                (3, "none.bin", ["--config", config, "--set", "mesh.shard=4", "--set", f"data.train={self.folder}/none"]),
                (5, "not finite at step", ["--config", config, "--set", "mesh.shard=4", "--set", "optimizer.lr=1e30"])):
            with self.subTest(piece):
                shutil.rmtree(self.folder / "run", ignore_errors=True)
                result = self.trainer(*arguments, ranks=4)
                self.expect(result, code)
                self.assertEqual(result.output.count(piece), 1, result.output)
                self.assertEqual(result.output.count("error: "), 1, result.output)
                self.assertLessEqual(result.output.count("MPI_Abort("), 1, result.output)  # the launcher's own line

    def test_what_one_rank_refuses_is_said_with_its_rank(self):
        """While the others wait for it, and while they refuse something else."""
        good, bad = self.config(mesh={"shard": 3}), str(self.folder / "none.json")
        for ranks, pieces in (((good, good, bad), ["[rank 2] error: " + bad]),
                              ((bad, good, good), ["error: " + bad]),
                              ((bad + "0", bad + "1", bad + "2"), [f"error: {bad}0", f"rank(s) 1: {bad}1", f"rank(s) 2: {bad}2"]),
                              ((bad + "0", bad + "1", bad + "1"), [f"error: {bad}0", f"error: rank(s) 1 2: {bad}1"])):
            with self.subTest(ranks):
                command = [part for path in ranks for part in ("-n", "1", TRAINER, "--config", path, ":")]
                result = self.finish(self.start_command([MPIEXEC, *command[:-1]]))
                self.expect(result, 2, *pieces)
                self.assertEqual(result.output.count("none.json"), len(pieces), result.output)

    def test_a_refused_command_line_beside_one_that_starts_no_mpi(self):
        """It says why. The code is the launcher's: where a process leaves in the middle of MPI's start, Hydra reports that
        process's code or 1, whichever it learns first."""
        result = self.finish(self.start_command([MPIEXEC, "-n", "1", TRAINER, "--help", ":", "-n", "1", TRAINER, "--hlep"]))
        self.assertIn(result.code, (1, 2), result.output)
        self.assertIn("error: The following argument was not expected: --hlep", result.output)


class Truncated(Case):
    def cut(self, ranks, **changes):
        process = self.start("--config", self.config(schedule={"steps": 1000000}, **changes), ranks=ranks)
        self.wait_for_steps(process, 3)
        os.truncate(f"{self.folder}/train.bin", 0)
        self.expect(self.finish(process), 3, "train.bin", "shrank", " -> ")

    def test_one_process(self):
        """The pages of the mapping are gone: not a crash by SIGBUS but an error with the file's name."""
        self.cut(1)

    def test_four_ranks(self):
        self.cut(4, mesh={"shard": 4})


class DryRun(Case):
    def test_memory_by_purpose(self):
        config = self.config(mesh={"federate": 2, "replicate": 2, "shard": 2})
        result = self.trainer("--config", config, "--dry-run")
        self.expect(result, 0, "memory of a rank", "ranks needed")
        rows = {}
        for line in result.output.partition("memory of a rank\n")[2].splitlines():
            if not line.startswith("  "):
                break
            rows[line[2:20].strip()] = line[20:]
        self.assertLessEqual({"weights", "gradients", "moments", "outer state", "activations", "workspace", "data",
                              "total"}, set(rows))
        # The resolved configuration comes first and reads back.
        resolved = json.loads(result.output[:result.output.index("\n}\n") + 2])
        self.assertEqual(resolved["mesh"], {"federate": 2, "replicate": 2, "shard": 2})
        self.assertFalse((self.folder / "run").exists())


if __name__ == "__main__":
    sys.exit(unittest.main(verbosity=2))
