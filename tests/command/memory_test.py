"""Peak resident memory of a run against the dry run's figure."""
import os
import re
import sys
import unittest

from program import Case, write_shard

MODEL = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": 8192, "head_dim": 64, "tie_word_embeddings": False}


class Planned(Case):
    """Models of a few hundred MiB, beside which the process's own memory is small."""

    def check(self, purpose, ranks=1, model=(), **changes):
        write_shard(self.folder / "train", [7 * i % 8191 for i in range(40000)])
        config = self.config(model=dict(MODEL, **dict(model)), schedule={"steps": 1}, **changes)
        plan = self.trainer("--config", config, "--dry-run").output
        table = dict(re.findall(r"^  (\w[\w ]*?) {2,}(.+)$", plan.partition("memory of a rank\n")[2], re.MULTILINE))
        planned = int(re.search(r"\((\d+) bytes\)", table["total"]).group(1))
        self.assertGreater(planned, 200 << 20)
        self.assertIn("MiB", table[purpose])  # what the configuration is here for
        process = self.start("--config", config, ranks=ranks)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self.assertEqual(process.returncode, 0, self.output())
        peak = usage.ru_maxrss << 10  # the largest process, where there are many
        print(f"planned {planned >> 20} MiB, peak {peak >> 20} MiB, beyond the plan {(peak - planned) >> 20} MiB",
              file=sys.stderr)
        self.assertLess(abs(peak - planned), 0.15 * planned)
        # What the trainer counted itself: all of it was planned, and nothing was planned in vain.
        counted = self.metrics()[-1]["memory"]["peak_bytes"]
        self.assertLess(abs(counted - planned), 0.001 * planned)
        stated = re.search(r"besides.* (\d+) MiB", plan)
        self.assertLess(peak - planned, 2 * (int(stated.group(1)) << 20))


class Memory(Planned):
    def test_fp32_with_a_small_batch(self):
        self.check("moments", precision="fp32", data={"sequence_length": 128, "batch_size": 1})

    def test_bf16_with_large_activations(self):
        self.check("activations", precision="bf16", model={"hidden_size": 256, "intermediate_size": 704}, data={"sequence_length": 512, "batch_size": 8})

    def test_full_recomputation(self):
        self.check("gradients", precision="bf16", recompute="full", data={"sequence_length": 256, "batch_size": 4})


class MemoryOfRanks(Planned):
    def test_two_ranks(self):
        """Two ranks with half of the state each, the slots for whole units, and scratch for reductions."""
        self.check("workspace", ranks=2, mesh={"shard": 2}, precision="fp32",
                   data={"sequence_length": 256, "batch_size": 2})


if __name__ == "__main__":
    sys.exit(unittest.main(verbosity=2))
