"""sass_counts.py on instructions made up for the purpose."""

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "bench"))
import sass_counts

KERNEL = "_ZN6strata3gpu5flash6kernelILi128EEEvv"


def listing(architecture, *instructions):
    lines = ["Fatbin elf code:", f"arch = {architecture}", f"\tcode for {architecture}", f"\t\tFunction : {KERNEL}"]
    for i, text in enumerate(instructions):
        lines.append(f"        /*{16 * i:04x}*/                   {text} ;      /* 0x00000a0000017a02 */")
    return "\n".join(lines)


LOOPS = listing(
    "sm_80",
    "MOV R1, c[0x0][0x28]",  # 0x00
    "LDGSTS.E.BYPASS.128 [R4], [R2.64], P0",  # 0x10: the outer loop's first
    "LDSM.16.M88.4 R4, [R0]",  # 0x20: the inner loop's first
    "LDSM.16.MT88.4 R8, [R0+0x800]",
    "LDSM.16.M88.2 R8, [R0+0x800]",
    "HMMA.16816.F32.BF16 R12, R4, R8, R12",
    "@P1 HMMA.16816.F32.BF16 R12, R4, R9, R12",
    "NOP",
    "@!P0 BRA 0x20",  # 0x80
    "BAR.SYNC.DEFER_BLOCKING 0x0",
    "@P2 BRA 0x10",  # 0xa0
    "LDG.E.128.CONSTANT R4, [R2.64]",
    "BRA 0xc0",  # 0xc0: the end that loops on itself
)


class Counts(unittest.TestCase):
    def only(self, text, architecture="sm_80"):
        (function,) = sass_counts.read_sass(text, architecture).values()
        return function

    def test_the_innermost_loop_that_multiplies(self):
        (loop,) = self.only(LOOPS).hot_loops()
        self.assertEqual((loop.begin, loop.end), (0x20, 0x80))
        self.assertEqual(loop.instructions, 6)  # no NOP
        self.assertEqual(loop.counts, {"HMMA.16816": 2, "LDSM x4": 2})

    def test_every_loop(self):
        self.assertEqual([(l.begin, l.end) for l in self.only(LOOPS).loops()], [(0x10, 0xA0), (0x20, 0x80)])

    def test_wide_accesses_where_nothing_multiplies(self):
        text = listing("sm_90", "LDG.E.64 R2, [R4.64]", "LDG.E.128 R2, desc[UR4][R4.64]", "STG.E.128 [R4.64], R2",
                       "@P0 BRA 0x0")
        (loop,) = self.only(text, "sm_90").hot_loops()
        self.assertEqual(loop.counts, {"LDG 16 B": 1, "STG 16 B": 1})

    def test_one_architecture_alone(self):
        both = listing("sm_80", "EXIT") + "\n" + LOOPS.replace("sm_80", "sm_90")
        self.assertEqual(len(self.only(both, "sm_80").code), 1)
        self.assertEqual(sass_counts.read_sass(both, "sm_100"), {})

    def test_the_table(self):
        table = sass_counts.table(sass_counts.read_sass(LOOPS, "sm_80"), "sm_80")
        self.assertIn("| `kernel<128>`, 1 | 6 | 2 | 2 | ", table)


if __name__ == "__main__":
    unittest.main()
