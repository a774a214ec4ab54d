"""The list of faults applies to the tree as it is, and the runner refuses what is not as it must be."""

import sys
import unittest
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import mutate
from mutations import MUTATIONS, Mutation

FAULT = Mutation("a fault", "a.cu", "wait<1>();", "wait<2>();", "kernels_flat", "sums*")


class List(unittest.TestCase):
    def test_every_fault_applies_once(self):
        mutate.check_list(MUTATIONS, mutate.ROOT)
        self.assertGreaterEqual(len(MUTATIONS), 25)

    def test_every_kernel_file_has_a_fault(self):
        sources = {path.name for path in (mutate.ROOT / "cuda" / "kernels").glob("*.cu")}
        without_kernels = {"attention.cu"}  # checks arguments and chooses
        self.assertEqual(sources - without_kernels - {Path(m.file).name for m in MUTATIONS}, set())


class Runner(unittest.TestCase):
    def test_a_text_is_replaced_once(self):
        self.assertEqual(mutate.applied("x wait<1>(); y", FAULT), "x wait<2>(); y")
        for text in ("x", "wait<1>(); wait<1>();"):
            with self.assertRaises(mutate.Refused):
                mutate.applied(text, FAULT)

    def test_a_list_with_two_of_a_name_or_an_idle_fault_is_refused(self):
        first = MUTATIONS[0]
        with self.assertRaises(mutate.Refused):
            mutate.check_list([first, first], mutate.ROOT)
        with self.assertRaises(mutate.Refused):
            mutate.check_list([replace(first, new=first.old)], mutate.ROOT)

    def test_the_table_says_which_mode_saw_what(self):
        modes = {mode.name: False for mode in mutate.MODES}
        other = {"race": True, "asan": True}
        table = mutate.table([(FAULT, modes | {"race": True}), (replace(FAULT, name="other"), other)])
        self.assertIn("| a fault | a.cu |  |  |  |  |  | x |  |", table)
        self.assertIn("| other | a.cu | not run | not run | not run | not run | not run | x | x |", table)
        self.assertIn("| **seen, of 2** | | 0 | 0 | 0 | 0 | 0 | 2 | 1 |", table)


if __name__ == "__main__":
    unittest.main()
