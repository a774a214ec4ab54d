"""roofline.py against numbers worked out by hand."""

import re
import sys
import unittest
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "bench"))
import roofline  # first: it puts scripts/lib on the path
import pages
from roofline import GPUS, MEBI, Shape, Work, attention, gemm, linear, step, step_seconds

A100, H200 = GPUS
# One layer, 2 x 4 tokens, small enough to count on paper: C 8, F 16, 2 query heads and 1 key head of size 4, V 32.
SMALL = Shape(batch=2, sequence=4, hidden=8, intermediate=16, layers=1, query_heads=2, key_value_heads=1,
              head_size=4, vocabulary=32, shard=2)


def only(works, name):
    (found,) = [w for w in works if w.name == name]
    return found


class Sizes(unittest.TestCase):
    def test_llama_8b_has_its_published_parameters(self):
        self.assertEqual(Shape().parameters, 8_030_261_248)  # Meta's model card: 8.03 B; the safetensors index: this number
        self.assertEqual(Shape().layer_parameters, 218_112_000)

    def test_model_flops_by_hand(self):
        # Weights of products: 8 x 16 (q, k, v) + 8 x 8 (output) + 3 x 8 x 16 + 8 x 32 (vocabulary) = 832; 6 FLOPs each
        # and 6 x 4 x 8 of attention a token; 8 tokens.
        self.assertEqual(SMALL.model_flops(), 8 * (6 * 832 + 192))

    def test_pieces_of_logits_are_those_of_the_trainer(self):
        self.assertEqual(Shape().chunk, 256)  # 64 MiB / (128256 x 2 B) = 261 rows, down to a multiple of 128
        self.assertEqual(Shape(logits_bytes=1).chunk, 128)
        self.assertEqual(Shape(logits_bytes=1 << 40).chunk, 4096)
        with self.assertRaises(ValueError):
            step(Shape(logits_bytes=384 * 128256 * 2))  # 4096 tokens are not whole pieces of 384


class Operations(unittest.TestCase):
    def test_gemm(self):
        w = gemm("forward", "x", 3, 4, 5, 6)
        self.assertEqual((w.flops, w.bytes), (240, (24 + 30 + 20) * 2))
        self.assertEqual(gemm("backward", "x", 1, 4, 5, 6, 4).bytes, (24 + 30) * 2 + 20 * 4)
        self.assertEqual(gemm("backward", "x", 1, 4, 5, 6, 4, True).bytes, (24 + 30) * 2 + 20 * 8)

    def test_linear_in_pieces_does_the_same_arithmetic(self):
        whole = sum(w.calls * w.flops for w in linear("x", 2, 8, 5, 3))
        pieces = sum(w.calls * w.flops for w in linear("x", 2, 8, 5, 3, 4))
        self.assertEqual(whole, 2 * 3 * 2 * 8 * 5 * 3)
        self.assertEqual(pieces, whole)

    def test_attention_by_hand(self):
        forward, backward = attention(SMALL)
        # A head's causal product: 2 x 4 x 4 / 2 x 4 = 64 FLOPs; 2 sequences x 2 heads x 2 or 5 products.
        self.assertEqual((forward.flops, backward.flops), (4 * 2 * 64, 4 * 5 * 64))
        self.assertEqual(attention(replace(SMALL, backward_products=7))[1].flops, 4 * 7 * 64)
        # q, out 8 x 8, k, v 8 x 4 of 2 bytes; 16 rows of lse.
        self.assertEqual(forward.bytes, 2 * 128 + 2 * 64 + 64)
        self.assertEqual(backward.bytes, 4 * 128 + 4 * 64 + 3 * 64)

    def test_row_kernels_by_hand(self):
        works = step(SMALL)
        row = 8 * 8 * 2
        self.assertEqual(only(works, "rmsnorm_forward, first").bytes, 2 * row + 8 * 4 + 16)
        self.assertEqual(only(works, "rmsnorm_forward, residual added").bytes, 4 * row + 8 * 4 + 16)
        self.assertEqual(only(works, "rmsnorm_backward, residual added").bytes, 4 * row + 8 * 4 + 16 + 32)
        self.assertEqual(only(works, "rope").bytes, 2 * 8 * 12 * 2 + 4 * 4 * 4)
        self.assertEqual(only(works, "swiglu_forward").bytes, 8 * 16 * 3 * 2)
        self.assertEqual(only(works, "swiglu_backward").bytes, 8 * 16 * 5 * 2)
        self.assertEqual(only(works, "cross_entropy").bytes, 8 * 32 * 3 * 2)
        self.assertEqual(only(works, "embedding_backward").bytes, 32 * 8 * 4 + row + 2 * 8 * 8 * 4 + 32)

    def test_optimizer_moves_thirty_bytes_a_parameter(self):
        # Layer: 8 x 16 + 8 x 8 + 3 x 8 x 16 + 2 x 8 = 592; embedding and head 2 x 256, final norm 8: 1112; half of them.
        self.assertEqual(SMALL.parameters, 1112)
        self.assertEqual(only(step(SMALL), "adamw").bytes, 556 * 30)
        self.assertEqual(only(step(SMALL), "sum_of_squares").bytes, 556 * 4)

    def test_products_and_attention_are_the_models_flops_and_one_more_product_of_attention(self):
        s = Shape()
        tensor = sum(w.calls * w.flops for w in step(s) if w.tensor)
        again = s.layers * attention(s)[1].flops / 5  # backward computes q k^T again
        self.assertEqual(tensor - again, s.model_flops())


class Times(unittest.TestCase):
    def test_the_longer_of_memory_and_compute_counts(self):
        w = Work("", "x", "", 1, 2e12, 312e12, tensor=True)
        self.assertEqual((w.memory_seconds(A100), w.compute_seconds(A100)), (1, 1))
        self.assertEqual(Work("", "x", "", 1, 4e12, 312e12, True).call_seconds(A100), 2)
        self.assertEqual(Work("", "x", "", 5, 1, 624e12, True).step_seconds(A100), 10)
        self.assertEqual(Work("", "x", "", 1, 1, 624e12, True).limit(A100), "compute")
        self.assertEqual(Work("", "x", "", 1, 0, 67e12).call_seconds(H200), 1)

    def test_gate_up_by_hand(self):
        # 2 x 4096 x 28672 x 4096 = 962,072,674,304 FLOPs at 312e12 a second: 3,083.6 us.
        w = only(step(Shape()), "linear gate, up")
        self.assertAlmostEqual(w.call_seconds(A100) * 1e6, 3083.566, places=2)
        self.assertAlmostEqual(w.call_seconds(H200) * 1e6, 971.790, places=2)

    def test_adamw_by_hand(self):
        # 8,030,261,248 / 8 = 1,003,782,656 parameters x 30 bytes at 2e12 a second: 15,056.7 us.
        self.assertAlmostEqual(only(step(Shape()), "adamw").call_seconds(A100) * 1e6, 15056.740, places=2)

    def test_utilization_is_the_share_of_ideal_time(self):
        s = Shape()
        ideal = s.model_flops() / H200.tensor
        self.assertAlmostEqual(roofline.model_flops_utilization(s, H200), ideal / step_seconds(step(s), H200))
        self.assertLess(roofline.model_flops_utilization(s, H200), 1)


class Pages(unittest.TestCase):
    def test_text_between_the_markers_is_replaced(self):
        begin, end = "<!-- x begins -->", "<!-- x ends -->"
        self.assertEqual(pages.replaced(f"a\n{begin}\nold\n{end}\nz", "x", "new"), f"a\n{begin}\nnew\n{end}\nz")
        with self.assertRaises(ValueError):
            pages.replaced(f"a\n{begin}\nold\n", "x", "new")

    def test_counts_have_three_digits(self):
        self.assertEqual(roofline.count(0, "B"), "0")
        self.assertEqual(roofline.count(999, "B"), "999 B")
        self.assertEqual(roofline.count(999_600, "B"), "1 MB")
        self.assertEqual(roofline.count(1_234_000, "B"), "1.23 MB")

    def test_every_operation_is_timed_on_the_device_under_its_name(self):
        source = (Path(__file__).resolve().parent / "time_kernels.cpp").read_text()
        literals = set(re.findall(r'"([^"\n]*)"', source))
        for work in step(Shape()) + roofline.outside_step(Shape()):
            base, comma, kind = work.name.rpartition(", ")
            whole = work.name in literals
            in_parts = base in literals and comma + kind in literals
            self.assertTrue(whole or in_parts, work.name)

    def test_measured_times_stand_beside_the_limit(self):
        # 4096 x 5120 read and written in bf16 and 1 MiB of tables: 84.9 MB, 17.7 us at 4.8e12 bytes/s.
        table = "\n".join(roofline.measured_table({"gpu": "NVIDIA H200", "seconds": {"rope": 35.4e-6}}))
        self.assertIn("| rope | 4096 x 5120 | 35.4 | 17.7 memory | 50 % |", table)
        with self.assertRaises(ValueError):
            roofline.measured_table({"gpu": "Tesla T4", "seconds": {}})
        with self.assertRaises(ValueError):
            roofline.measured_table({"gpu": "NVIDIA H200", "seconds": {"gap": 1}})


if __name__ == "__main__":
    unittest.main()
