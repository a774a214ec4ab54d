"""Checkpoints from outside: runs that are stopped, killed, damaged and continued, on the same mesh and on others."""
import json
import os
import pathlib
import resource
import shutil
import signal
import struct
import time
import unittest

from program import DEADLINE, TRAINER, Case, ranks_of

MEASURED = {"time", "tokens_per_second", "mfu", "seconds", "aggregation_busy", "memory"}
DILOCO = {"rule": "diloco", "every": 3, "dtype": "int8"}


def without_times(lines):
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in lines]


def pop_federate_bytes(lines):
    """Their sum. A streaming fragment's bytes stand in the step by which they have arrived: that is a matter of time."""
    return sum(line["bytes"].pop("federate")["all_reduce"] for line in lines if line["split"] == "train")


def safetensors(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8:8 + length]), data[8 + length:]
    header.pop("__metadata__", None)
    in_order = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    return {name: body[slice(*entry["data_offsets"])] for name, entry in in_order}


def state(checkpoint):
    """(kind, unit, group) -> the bytes of the whole unit, put together from the parts by the manifest alone."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    pieces = {}
    for part in manifest["parts"]:
        tensors = list(safetensors(checkpoint / part["file"]).items())
        assert len(tensors) == len(part["pieces"])
        for kind, unit, group, begin, count, _ in part["pieces"]:
            names = [n for n, _ in tensors if n.startswith(kind + ".")]
            # units are numbered in the order in which a part names those of one kind
            name = names[sorted({p[1] for p in part["pieces"] if p[0] == kind}).index(unit)]
            pieces.setdefault((kind, unit, group), []).append((begin, count, dict(tensors)[name]))
    whole = {}
    for key, parts in pieces.items():
        parts.sort()
        assert parts[0][0] == 0 and all(a[0] + a[1] == b[0] for a, b in zip(parts, parts[1:])), key
        whole[key] = b"".join(p[2] for p in parts)
    return whole


def mesh(f, r, s):
    return {"federate": f, "replicate": r, "shard": s}


class ResumeCase(Case):
    def run_folder(self, name="run"):
        return self.folder / name

    def checkpoint(self, step, run="run"):
        return self.folder / run / "checkpoints" / f"step_{step:08}"

    def steps(self, run="run"):
        return sorted(int(p.name[5:]) for p in (self.folder / run / "checkpoints").iterdir()
                      if p.name[5:].isdigit())

    def manifest(self, step, run="run"):
        return json.loads((self.checkpoint(step, run) / "manifest.json").read_text())

    def train(self, ranks, *arguments, code=0, pieces=(), **config):
        result = self.trainer("--config", self.config(**config), *arguments, ranks=ranks)
        self.expect(result, code, *pieces)
        return result

    def spoil_lines_after(self, step, run):
        """Whatever was written later must be written again: make it recognisable."""
        path = self.folder / run / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line["step"] > step:
                line["loss"] = -1
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def check_bit_exact(self, ranks, at, streaming=False, **config):
        """Runs through, then again from the checkpoint of step `at`: metrics and all state end equal."""
        steps = 8
        config = dict(config, schedule={"steps": steps}, checkpoint={"every": at, "keep": 9},
                      data=dict(config.get("data", {}), **self.validation()), evaluation={"every": 4})
        self.train(ranks, **config)
        self.assertIn(at, self.steps())
        shutil.copytree(self.folder / "run", self.folder / "again")
        for step in self.steps("again"):
            if step > at:
                shutil.rmtree(self.checkpoint(step, "again"))
        self.spoil_lines_after(at, "again")
        self.train(ranks, "--resume", "auto", "--set", f"run_dir={self.folder / 'again'}",
                   pieces=[f"step {at}"], **config)
        again, run = without_times(self.metrics("again")), without_times(self.metrics("run"))
        if streaming:
            self.assertEqual(pop_federate_bytes(again), pop_federate_bytes(run))
        self.assertEqual(again, run)
        self.assertEqual(state(self.checkpoint(steps, "again")), state(self.checkpoint(steps)))
        self.assertEqual(self.steps("again"), self.steps())


class SameMesh(ResumeCase):
    def test_one_process(self):
        self.check_bit_exact(1, 5)

    def test_one_process_in_bf16(self):
        self.check_bit_exact(1, 5, precision="bf16", stream_order="deferred")

    def test_one_process_in_bf16_pure_with_stochastic_rounding(self):
        self.check_bit_exact(1, 5, precision="bf16_pure", optimizer={"stochastic_rounding": True})

    def test_one_group_with_outer_momentum(self):
        self.check_bit_exact(1, 5, federation={"rule": "diloco", "every": 3})

    def test_the_end_of_a_longer_run(self):
        """A finished run can be given more steps; one that has them all does nothing."""
        self.train(1, schedule={"steps": 4, "kind": "constant"})
        self.train(1, "--resume", "auto", schedule={"steps": 6, "kind": "constant"}, pieces=["schedule.steps: 4 -> 6"])
        self.assertEqual([m["step"] for m in self.metrics()], [1, 2, 3, 4, 5, 6])
        before = self.metrics()
        self.train(1, "--resume", "auto", schedule={"steps": 6, "kind": "constant"}, pieces=["nothing is left to do"])
        self.assertEqual(self.metrics(), before)
        self.train(1, run_dir=str(self.folder / "whole"), schedule={"steps": 6, "kind": "constant"})
        self.assertEqual(without_times(self.metrics("whole")), without_times(before))


class SameMeshOfRanks(ResumeCase):
    def test_two_replicas(self):
        self.check_bit_exact(2, 5, mesh=mesh(1, 2, 1), data={"batch_size": 1})

    def test_three_shards(self):
        self.check_bit_exact(3, 5, mesh=mesh(1, 1, 3), gradient_accumulation=2)

    def test_federated_shards_with_overlap_in_the_middle_of_a_round(self):
        self.check_bit_exact(4, 5, mesh=mesh(2, 1, 2), federation={"every": 3, "schedule": "overlap"})

    def test_overlap_right_after_an_aggregation(self):
        self.check_bit_exact(4, 6, mesh=mesh(2, 1, 2),
                             federation={"every": 3, "schedule": "overlap", "weights": "tokens"})

    def test_replicas_with_error_feedback_and_one_sender(self):
        self.check_bit_exact(4, 5, mesh=mesh(2, 2, 1), federation=dict(DILOCO, replicas="one"))

    def test_streaming_with_a_fragment_in_flight(self):
        federation = {"rule": "diloco", "schedule": "streaming", "every": 4, "tau": 2, "fragment_layers": 1}
        self.check_bit_exact(2, 5, streaming=True, mesh=mesh(2, 1, 1), federation=federation)
        kinds = {k["name"]: k["groups"] for k in self.manifest(5)["kinds"]}
        self.assertEqual(kinds, {"parameter": 2, "m": 2, "v": 2, "theta_old": 1, "momentum": 1, "delta": 1})


class OtherMesh(ResumeCase):
    def leg(self, f, r, s, batch, steps, *arguments, **more):
        return self.train(f * r * s, *arguments, mesh=mesh(f, r, s), data={"batch_size": batch},
                          schedule={"steps": steps, "kind": "constant"}, **more)

    def test_one_group_goes_from_mesh_to_mesh(self):
        """1x1x4 -> 1x2x2 -> 1x1x1 follow one run on one rank with the same global batch; so does 1x1x3 after it."""
        self.leg(1, 1, 4, 2, 3)
        self.leg(1, 2, 2, 2, 6, "--resume", "auto", pieces=["mesh.shard: 4 -> 2"])
        self.assertEqual(self.manifest(6)["sequences_consumed"], 48)
        self.leg(1, 1, 1, 8, 9, "--resume", "auto")
        shutil.copytree(self.folder / "run", self.folder / "alone")
        self.leg(1, 1, 3, 2, 12, "--resume", "auto")
        self.assertEqual(self.manifest(12)["sequences_consumed"], 72 + 3 * 6)
        chain = self.metrics()

        self.leg(1, 1, 1, 6, 12, "--resume", "auto", "--set", f"run_dir={self.folder / 'alone'}")
        self.leg(1, 1, 1, 8, 9, run_dir=str(self.folder / "whole"))
        one = self.metrics("whole") + self.metrics("alone")[9:]
        self.assertEqual([m["step"] for m in chain], list(range(1, 13)))
        for a, b in zip(chain, one):
            for key in ("loss", "grad_norm"):
                self.assertAlmostEqual(a[key], b[key], delta=1e-4 * b[key])
            self.assertEqual(a["tokens"], b["tokens"])

    def test_another_number_of_groups_after_an_aggregation(self):
        self.leg(2, 1, 2, 2, 3, federation=DILOCO)
        self.leg(1, 1, 1, 8, 6, "--resume", "auto", federation=DILOCO,
                 pieces=["mesh.federate was 2 and is 1: m and v are averaged over the 2 groups"])
        self.leg(3, 1, 1, 2, 9, "--resume", "auto", federation=DILOCO,
                 pieces=["mesh.federate was 1 and is 3: every group takes the same m and v"])
        lines = self.metrics()
        self.assertEqual([m["step"] for m in lines], list(range(1, 10)))
        self.assertEqual(self.manifest(9)["sequences_consumed"], 3 * 8 + 3 * 8 + 3 * 6)
        self.assertLess(lines[-1]["loss"], lines[0]["loss"])

    def test_another_number_of_groups_between_aggregations_is_refused(self):
        """The outer state that one group found on disk is the average it would have made itself."""
        self.leg(2, 1, 1, 2, 4, federation={"every": 3}, checkpoint={"every": 2})
        shutil.rmtree(self.checkpoint(4))
        self.leg(1, 1, 1, 2, 4, "--resume", "auto", federation={"every": 3}, code=2,
                 pieces=["mesh.federate was 2 and is 1", "step 2", "between two aggregations", "mesh.federate=2"])


class Damage(ResumeCase):
    def setUp(self):
        super().setUp()
        self.train(1, schedule={"steps": 6}, checkpoint={"every": 2, "keep": 2})
        self.assertEqual(self.steps(), [4, 6])
        self.part = self.checkpoint(6) / "part_00000.safetensors"

    def flip_bit(self):
        data = bytearray(self.part.read_bytes())
        data[-50] ^= 1
        self.part.write_bytes(data)

    def resume(self, how, code, *pieces):
        return self.train(1, "--resume", str(how), schedule={"steps": 6}, checkpoint={"every": 2, "keep": 2},
                          code=code, pieces=pieces)

    def test_a_flipped_bit(self):
        before = without_times(self.metrics())
        good = state(self.checkpoint(6))
        self.flip_bit()
        self.resume(self.checkpoint(6), 3, str(self.part), "checksum")
        self.resume("auto", 0, "IS DAMAGED", str(self.part), "resumed from", "step_00000004: step 4")
        self.assertEqual(without_times(self.metrics()), before)
        self.assertEqual(state(self.checkpoint(6)), good)
        self.assertTrue((self.folder / "run/checkpoints/step_00000006.damaged").exists())

    def test_a_cut_file(self):
        os.truncate(self.part, self.part.stat().st_size // 2)
        self.resume(self.checkpoint(6), 3, str(self.part), "bytes, the manifest says")

    def test_a_missing_file(self):
        self.part.unlink()
        self.resume(self.checkpoint(6), 3, str(self.part), "cannot be opened")

    def test_nothing_whole_is_left(self):
        self.flip_bit()
        (self.checkpoint(4) / "manifest.json").write_text("{}")
        self.resume("auto", 3, "step_00000006 IS DAMAGED", "is no manifest of a checkpoint")
        self.assertEqual(self.steps(), [4, 6])

    def test_a_checkpoint_that_is_not_there(self):
        self.resume(self.checkpoint(5), 3, "step_00000005", "is no checkpoint")

    def test_an_older_one_by_name(self):
        before = without_times(self.metrics())
        self.resume(f"{self.checkpoint(4)}/", 0, "step_00000006.superseded")  # as a shell completes it
        self.assertEqual(without_times(self.metrics()), before)
        self.assertEqual(self.steps(), [4, 6])
        inside = state(self.checkpoint(6).with_suffix(".superseded"))
        self.resume(self.checkpoint(4), 0, "it is now called step_00000006.superseded.2\n")
        self.assertEqual(self.steps(), [4, 6])
        for name in (".superseded", ".superseded.2"):
            self.assertEqual(state(self.checkpoint(6).with_suffix(name)), inside)

    def test_a_run_folder_by_name(self):
        """Stands for its newest whole checkpoint, its own or another run's; without any it is refused."""
        before = without_times(self.metrics())
        shutil.rmtree(self.checkpoint(6))
        self.resume(f"{self.folder / 'run'}/", 0, "resumed from", "step_00000004: step 4")
        self.assertEqual(without_times(self.metrics()), before)
        self.flip_bit()
        self.train(1, "--resume", str(self.folder / "run"), "--set", f"run_dir={self.folder / 'branch'}",
                   schedule={"steps": 6}, pieces=["IS DAMAGED", "step_00000004: step 4"])
        self.assertEqual(without_times(self.metrics("branch")), before[4:])
        self.assertEqual(self.steps(), [4, 6])
        shutil.rmtree(self.folder / "run/checkpoints")
        self.resume(self.folder / "run", 3, "this run folder holds no checkpoint", " -> ")
        self.assertEqual(without_times(self.metrics()), before)

    def test_what_may_not_change(self):
        resolved = (self.folder / "run/config.resolved.json").read_text()
        for change, piece in (("model.num_hidden_layers=3", "model.num_hidden_layers was 2"),
                              ("model.vocab_size=98", "model.vocab_size was 97"),
                              ("precision=bf16", 'precision was "fp32"'), ("seed=7", "seed was 42")):
            self.train(1, "--resume", "auto", "--set", change, schedule={"steps": 6}, code=2, pieces=[piece])
        self.assertEqual((self.folder / "run/config.resolved.json").read_text(), resolved)

    def test_a_folder_with_a_run_is_not_started_over(self):
        self.train(1, schedule={"steps": 6}, code=2, pieces=["already holds a run", "--resume auto"])
        (self.folder / "run/metrics.jsonl").unlink()
        self.train(1, schedule={"steps": 6}, code=2, pieces=["already holds a run"])

    def test_another_folder_takes_the_checkpoint_and_leaves_the_first_alone(self):
        self.train(1, "--resume", str(self.checkpoint(4)), "--set", f"run_dir={self.folder / 'branch'}",
                   schedule={"steps": 6})
        self.assertEqual([m["step"] for m in self.metrics("branch")], [5, 6])
        self.assertEqual(without_times(self.metrics("branch")), without_times(self.metrics()[4:]))
        self.assertEqual(self.steps(), [4, 6])
        # a run of its own in the way of someone else's checkpoint
        self.train(1, "--resume", str(self.checkpoint(4)), "--set", f"run_dir={self.folder / 'branch'}",
                   schedule={"steps": 6}, code=2, pieces=["already holds a run", "is not one of its checkpoints"])
        self.assertEqual([m["step"] for m in self.metrics("branch")], [5, 6])

    def test_inspect(self):
        self.expect(self.trainer("inspect", str(self.checkpoint(6)), "--verify"), 0, "step", "6 of 6",
                    "every byte agrees", "model.embed_tokens.weight", "fp32 97 x 32", "one process")
        said = self.trainer("inspect", str(self.folder / "run"))
        self.expect(said, 0, "last step", "step_00000004", "step_00000006", "rank 0", "step 6, done")
        self.assertRegex(said.output, r"last step +6: loss \d\.\d{1,5}, lr [0-9.e-]{1,12}, 192 tokens so far, [0-9.e+]{1,11} tokens/s")
        self.flip_bit()
        self.expect(self.trainer("inspect", str(self.checkpoint(6)), "--verify"), 3, str(self.part), "checksum")
        self.expect(self.trainer("inspect", str(self.folder / "run"), "--verify"), 3, "DAMAGED")
        self.expect(self.trainer("inspect", str(self.folder)), 2, "neither a checkpoint nor a run")


class Disk(ResumeCase):
    def test_nothing_to_resume_is_said(self):
        self.train(1, "--resume", "auto", pieces=["holds no checkpoint; starting at step 1"])
        self.assertEqual(len(self.metrics()), 6)

    def test_a_full_disk_leaves_the_last_good_one(self):
        self.train(1, schedule={"steps": 2})

        def small_files():
            resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000))
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

        config = self.config(schedule={"steps": 4})
        process = self.start_command([TRAINER, "--config", config, "--resume", "auto"], preexec_fn=small_files,
                                     restore_signals=False)
        self.expect(self.finish(process), 3, "writing failed", "free space")
        self.assertEqual(self.steps(), [2])
        self.assertEqual([p.name for p in (self.folder / "run/checkpoints").iterdir()], ["step_00000002"])
        self.train(1, "--resume", "auto", schedule={"steps": 4})
        self.assertEqual(self.steps(), [2, 4])

    def test_one_job_at_a_time(self):
        """The second job is refused and changes nothing. A job that was killed leaves a file but no lock."""
        process = self.start("--config", self.config(schedule={"steps": 1000000}, checkpoint={"every": 20}))
        self.wait_for_steps(process, 3)
        self.train(1, "--resume", "auto", schedule={"steps": 6}, code=2, pieces=["another job is writing"])
        self.assertEqual(json.loads((self.folder / "run/config.resolved.json").read_text())["schedule"]["steps"], 1000000)
        process.kill()
        process.wait()
        self.assertTrue((self.folder / "run/lock").exists())
        shutil.rmtree(self.folder / "run/checkpoints", ignore_errors=True)
        self.train(1, "--resume", "auto", schedule={"steps": 6})

    def test_a_folder_that_cannot_be_made(self):
        (self.folder / "run").mkdir()
        (self.folder / "run/checkpoints").write_text("in the way")
        self.train(1, schedule={"steps": 2}, code=3, pieces=["checkpoints", "check the folder"])

    def test_the_dry_run_knows_the_size(self):
        config = self.config(schedule={"steps": 3, "kind": "constant"}, mesh=mesh(2, 1, 1), federation=DILOCO)
        said = self.trainer("--config", config, "--dry-run")
        self.expect(said, 0, "checkpoint on disk")
        self.expect(self.trainer("--config", config, ranks=2), 0)
        stored = sum(len(b) for b in state(self.checkpoint(3)).values())
        self.assertIn(f"({stored} bytes)", said.output)


class Stopped(ResumeCase):
    def test_a_stopped_run_continues(self):
        """SIGTERM: exit code 75 and a checkpoint; what is resumed ends as a run that was never stopped."""
        def config(steps):
            return dict(mesh=mesh(2, 1, 1), federation=DILOCO, schedule={"steps": steps, "kind": "constant"})
        process = self.start("--config", self.config(**config(1000000)), ranks=2)
        self.wait_for_steps(process, 3)
        for pid in ranks_of(process):
            os.kill(pid, signal.SIGTERM)
        self.expect(self.finish(process), 75)
        stopped = self.steps()[-1]
        self.assertEqual(self.train_lines()[-1]["step"], stopped)
        end = stopped + 21
        self.train(2, "--resume", "auto", **config(end))
        self.train(2, run_dir=str(self.folder / "whole"), **config(end))
        self.assertEqual(without_times(self.metrics()), without_times(self.metrics("whole")))
        self.assertEqual(state(self.checkpoint(end)), state(self.checkpoint(end, "whole")))


class Lost(ResumeCase):
    """A rank that hangs or dies takes the others with it, and the records tell."""

    def start_long(self, **config):
        config = self.config(mesh=mesh(1, 1, 3), schedule={"steps": 1000000}, **config)
        process = self.start("--config", config, ranks=3)
        self.wait_for_steps(process, 3)
        pids = {}
        for path in (self.folder / "run/status").iterdir():
            (pids[int(path.name[5:])],) = struct.unpack_from("<i", path.read_bytes(), 16)
        self.assertEqual(sorted(pids.values()), ranks_of(process))
        return process, pids

    def expect_nobody(self, pids):
        deadline = time.monotonic() + 20
        def alive(pid):
            try:
                return "\nState:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
            except OSError:
                return False
        while any(alive(p) for p in pids.values()):
            self.assertLess(time.monotonic(), deadline, "ranks are left")
            time.sleep(0.1)

    def test_a_rank_that_hangs(self):
        process, pids = self.start_long(timeout_seconds=3)
        os.kill(pids[1], signal.SIGSTOP)
        result = self.finish(process)
        self.expect_nobody(pids)
        self.assertEqual(result.code, 4, result.output)
        self.assertRegex(result.output, r"step \d+, unit [a-z0-9. ]+: (?:all-gather|reduce-scatter|all-reduce) in group "
                                        r"(shard|world|group) \(ranks 0 1 2\): nothing for 3 s; rank\(s\) 1 did not")
        said = self.trainer("inspect", str(self.folder / "run"))
        self.expect(said, 0, "waiting for rank(s) 1", "silent first: rank 1")

    def test_a_rank_that_is_killed(self):
        process, pids = self.start_long()
        # The launcher would end the others within the same milliseconds, too soon to tell who went first.
        stat = pathlib.Path(f"/proc/{pids[2]}/stat").read_text()
        launcher = int(stat.rpartition(")")[2].split()[1])
        os.kill(launcher, signal.SIGSTOP)
        os.kill(pids[2], signal.SIGKILL)
        time.sleep(1)
        os.kill(launcher, signal.SIGCONT)
        result = self.finish(process)
        self.expect_nobody(pids)
        self.assertNotEqual(result.code, 0)
        said = self.trainer("inspect", str(self.folder / "run"))
        # Its death may end a neighbour within the same millisecond.
        self.assertEqual(said.code, 0, said.output)
        self.assertRegex(said.output, r"silent first: (rank|one of ranks)( [01])* 2\b")
        self.assertRegex(said.output, r"rank 2 +pid \d+ on .*: step \d+, ")


if __name__ == "__main__":
    unittest.main()
