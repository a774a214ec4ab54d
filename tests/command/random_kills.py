"""random_kills.py N [SEED]: kills all ranks of a training N times, at random moments, and resumes it each time; then
compares metrics and state with those of a run that was left alone. TRAINER and MPIEXEC name the programs.

A checkpoint is due every second step, so about half of the kills fall into a save."""
import os
import random
import signal
import sys
import time

import program
from program import DEADLINE, ranks_of
from resume_test import ResumeCase, mesh, state, without_times

STEPS_BETWEEN = 4  # at most, between two kills
STEPS_A_KILL = 16  # of the whole run: a fast machine does several steps between a look and the kill


class RandomKills(ResumeCase):
    def lines(self):
        path = self.folder / "run" / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def saving(self):
        folder = self.folder / "run" / "checkpoints"
        return folder.exists() and any(p.suffix == ".partial" for p in folder.iterdir())

    def wait_until(self, process, reached):
        deadline = time.monotonic() + DEADLINE
        while not reached() and process.poll() is None:
            self.assertLess(time.monotonic(), deadline, self.output())
            time.sleep(0.001)

    def wait_for_a_moment(self, process, rng):
        where = rng.random()
        if where < 0.2:  # while it starts and loads
            time.sleep(rng.uniform(0, 0.6))
            return "while starting"
        before = self.lines()
        self.wait_until(process, lambda: self.lines() != before)  # it may be cut first
        target = self.lines() + rng.randrange(STEPS_BETWEEN)
        self.wait_until(process, lambda: self.lines() >= target)
        if where < 0.6:
            self.wait_until(process, self.saving)
            time.sleep(rng.uniform(0, 0.01))
            return "while saving"
        time.sleep(rng.uniform(0, 0.03))
        return "while training"

    def kill(self, process):
        """All ranks, those that the launcher has yet to start included."""
        deadline = time.monotonic() + DEADLINE
        while process.poll() is None:
            for pid in ranks_of(process):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # the launcher was faster, seeing the first of them gone
            self.assertLess(time.monotonic(), deadline, "the launcher does not end")
            time.sleep(0.01)

    def kill_and_compare(self, kills, seed):
        rng = random.Random(seed)
        config = dict(mesh=mesh(2, 1, 2), federation={"rule": "diloco", "every": 3, "dtype": "int8", "schedule": "overlap"},
                      schedule={"steps": 8 + STEPS_A_KILL * kills}, checkpoint={"every": 2, "keep": 2})
        path = self.config(**config)
        moments = {}
        for _ in range(kills):
            process = self.start("--config", path, "--resume", "auto", ranks=4)
            moment = self.wait_for_a_moment(process, rng)
            if process.poll() is not None:  # a fast machine was at the last step before all kills were spent
                self.assertEqual(process.returncode, 0, self.output())
                break
            self.kill(process)
            self.assertNotIn("DAMAGED", self.output())
            moments[moment] = moments.get(moment, 0) + 1
        self.assertTrue(moments, "not one kill came in time")
        self.train(4, "--resume", "auto", **config)
        self.train(4, run_dir=str(self.folder / "whole"), **config)
        last = config["schedule"]["steps"]
        self.assertEqual(without_times(self.metrics()), without_times(self.metrics("whole")))
        self.assertEqual(state(self.checkpoint(last)), state(self.checkpoint(last, "whole")))
        print(f"{sum(moments.values())} kills ({', '.join(f'{n} {m}' for m, n in sorted(moments.items()))}), {last} steps: "
              "metrics and state are those of a run that was left alone")


if __name__ == "__main__":
    program.DEADLINE = 3600  # for the two long runs
    case = RandomKills()
    case.setUp()
    try:
        case.kill_and_compare(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    finally:
        case.doCleanups()
