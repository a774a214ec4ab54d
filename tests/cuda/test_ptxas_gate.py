"""ptxas_gate.py against reports made up for the purpose, and its residency against NVIDIA's own calculator."""

import os
import random
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import ptxas_gate as gate
from ptxas_gate import Kernel, Usage

COPY = "_ZN6strata36_GLOBAL__N__5972bb09_4_t_cu_2f1bea574copyIfLi256EEEvPT_PKS2_"
REPORT = f"""ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{COPY}' for 'sm_80'
ptxas info    : Function properties for {COPY}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 1 barriers, 1024 bytes smem, 368 bytes cmem[0]
ptxas info    : Compile time = 15.628 ms
ptxas info    : Compiling entry function '{COPY}' for 'sm_90'
ptxas info    : Function properties for {COPY}
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 14 registers, used 1 barriers
"""


def kernel(**changes):
    usage = {"registers": 60, "static_shared": 512, "stack": 0, "spills": 0} | changes
    return Kernel({a: Usage(**usage) for a in gate.ARCHITECTURES}, threads=256, dynamic_shared=2048)


KEY = ("rope", "rope<bf16>")
TABLE = {KEY: gate.budget_of(*KEY, kernel())}
LAUNCHES = {"rope<bf16>": (256, 2048)}


class Reading(unittest.TestCase):
    def test_a_report(self):
        found = gate.read_report(REPORT)
        self.assertEqual(found[COPY, "sm_80"], Usage(12, 1024, 0, 0))
        self.assertEqual(found[COPY, "sm_90"], Usage(14, 0, 16, 12))

    def test_names_are_short_and_keep_their_arguments(self):
        for signature, short in (
            ("void strata::cuda::(anonymous namespace)::copy<__nv_bfloat16, (strata::Mode)1, true>(float*)",
             "copy<bf16, (Mode)1, true>"),
            ("strata::gpu::fill(float*, float)", "fill"),
            ("void strata::f<strata::Tile<64, (strata::K)2>, float>(int (*)(int))", "f<Tile<64, (K)2>, float>"),
        ):
            self.assertEqual(gate.short_name(signature), short)

    def test_reports_are_named_after_their_files(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "copies.ptxas"
            path.write_text(REPORT)
            self.assertEqual(list(gate.read_reports([path])), [("copies", "copy<float, 256>")])

    def test_a_table_survives_writing_and_reading(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "budget.csv"
            gate.write_table(path, TABLE)
            self.assertEqual(gate.read_table(path), TABLE)


class Gate(unittest.TestCase):
    def faults(self, found=None, launches=LAUNCHES, table=TABLE):
        return gate.faults(table, {KEY: found or kernel()}, launches)

    def test_a_kernel_within_its_budget_passes(self):
        self.assertEqual(self.faults(), [])
        self.assertEqual(self.faults(kernel(registers=64)), [])  # within the unit of allocation

    def test_each_excess_is_named(self):
        for change, word in (
            ({"registers": 65}, "registers"),
            ({"static_shared": 513}, "static shared"),
            ({"stack": 8}, "stack"),
            ({"spills": 4}, "spills"),
        ):
            found = self.faults(kernel(**change))
            self.assertTrue(found and all("rope.cu: rope<bf16>" in f for f in found), found)
            self.assertIn(word, found[0])

    def test_too_few_resident_blocks_are_a_fault_of_their_own(self):
        table = {KEY: gate.budget_of(*KEY, kernel())}
        table[KEY].blocks["sm_90"] += 1
        self.assertEqual(self.faults(table=table),
                         ["rope.cu: rope<bf16> on sm_90 keeps 4 blocks on a multiprocessor, its budget is 5"])

    def test_unlisted_and_vanished_kernels(self):
        self.assertIn("no row", gate.faults({}, {KEY: kernel()}, LAUNCHES)[0])
        self.assertIn("does not exist", gate.faults(TABLE, {}, LAUNCHES)[0])
        found = kernel()
        del found.usage["sm_100"]
        self.assertEqual(self.faults(found), ["rope.cu: rope<bf16> on sm_100 was not compiled"])

    def test_launches(self):
        self.assertIn("launched by no test", self.faults(launches={})[0])
        self.assertIn("512 threads", self.faults(launches={"rope<bf16>": (512, 2048)})[0])
        self.assertIn("4096 dynamic bytes", self.faults(launches={"rope<bf16>": (256, 4096)})[0])
        self.assertEqual(self.faults(launches=None), [])
        with self.assertRaises(ValueError):
            gate.updated({KEY: kernel()}, {})


class CommandLine(unittest.TestCase):
    def run_gate(self, *arguments):
        command = [sys.executable, gate.__file__, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True)

    def test_check_says_what_is_wrong_and_how_many_kernels_there_are(self):
        with tempfile.TemporaryDirectory() as folder:
            table, report = Path(folder) / "budget.csv", Path(folder) / "copies.ptxas"
            text = REPORT[: REPORT.index("ptxas info    : Compile time")]
            report.write_text("".join(text.replace("sm_80", a) for a in gate.ARCHITECTURES))
            found = gate.read_reports([report])
            for kernel in found.values():
                kernel.threads = 256
            gate.write_table(table, {key: gate.budget_of(*key, kernel) for key, kernel in found.items()})
            good = self.run_gate("check", "--table", table, report)
            self.assertEqual((good.returncode, "1 kernels" in good.stdout), (0, True), good)
            report.write_text(report.read_text().replace("Used 12", "Used 17"))
            bad = self.run_gate("check", "--table", table, report)
            self.assertEqual((bad.returncode, bad.stdout.count("17 registers, its budget is 16")), (1, 3), bad)

    def test_without_reports_it_is_skipped_in_plain_words(self):
        with tempfile.TemporaryDirectory() as folder:
            table = Path(folder) / "budget.csv"
            gate.write_table(table, {})
            done = self.run_gate("check", "--table", table)
            self.assertEqual((done.returncode, "skipped" in done.stdout), (77, True), done)


class Residency(unittest.TestCase):
    def test_by_hand(self):
        # sm_80: 128 registers x 32 = 4096 a warp, 4 of them in a quarter's 16384: 16 warps, so two blocks of 256 threads.
        self.assertEqual(gate.resident_blocks("sm_80", 128, 256, 0), 2)
        # 65 registers are handed out as 72: 7 warps a quarter, 28 in all, 3 blocks of 8 warps.
        self.assertEqual(gate.resident_blocks("sm_90", 65, 256, 0), 3)
        # 164 KiB hold one block of 100 KiB and its 1 KiB, 228 KiB hold two.
        self.assertEqual(gate.resident_blocks("sm_80", 32, 128, 100 * 1024), 1)
        self.assertEqual(gate.resident_blocks("sm_90", 32, 128, 100 * 1024), 2)
        self.assertEqual(gate.resident_blocks("sm_80", 32, 128, 163 * 1024 + 1), 0)
        self.assertEqual(gate.resident_blocks("sm_100", 16, 32, 0), 32)
        self.assertEqual(gate.resident_blocks("sm_100", 16, 1024, 0), 2)

    def test_as_nvidias_calculator(self):
        program = os.environ.get("OCCUPANCY_REFERENCE")
        if not program:
            self.skipTest("OCCUPANCY_REFERENCE is not set: no cuda_occupancy.h")
        generator = random.Random(1)
        cases = [
            (generator.choice(gate.ARCHITECTURES), generator.randint(16, 255), generator.randint(1, 1024),
             generator.choice((0, generator.randint(0, 240 * 1024))))
            for _ in range(3000)
        ]
        lines = "\n".join(f"{a[3:-1]} {r} {t} {s}" for a, r, t, s in cases)
        expected = subprocess.run([program], input=lines, text=True, capture_output=True, check=True).stdout.split()
        self.assertEqual(len(expected), len(cases))
        for case, blocks in zip(cases, expected):
            self.assertEqual(gate.resident_blocks(*case), int(blocks), case)


class Committed(unittest.TestCase):
    TABLE = gate.read_table(Path(__file__).resolve().parent / "budget.csv")

    def test_no_kernel_has_a_stack_and_every_one_fits(self):
        for budget in self.TABLE.values():
            self.assertEqual(budget.stack, 0, budget)
            self.assertGreaterEqual(budget.blocks["sm_90"], 1, budget)

    def test_attention_keeps_eight_warps_at_head_size_128(self):
        for kernel in ("attention_forward_kernel", "attention_queries_kernel", "attention_keys_kernel"):
            (budget,) = [b for b in self.TABLE.values() if b.kernel == f"{kernel}<128>"]
            for architecture in gate.ARCHITECTURES:
                self.assertGreaterEqual(budget.blocks[architecture] * budget.threads // 32, 8, budget)


if __name__ == "__main__":
    unittest.main()
