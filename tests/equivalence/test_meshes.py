"""One federation group: every mesh trains the same model on the same global batch."""

import unittest
from collections.abc import Callable

import numpy as np
from lab import Lab, Mesh, Result, distance, meshes

STEPS = 20
TOLERANCE = 2e-6
CLIP = 0.2
# Sequences a step, split over three micro-steps: one family for the powers of two and three, one for five.
FAMILIES = {144: (2, 3, 4, 6, 8, 16), 90: (5, 10)}
# The ways to run a mesh are dealt out over the meshes; none may change a number.
VARIATIONS = [
    {},
    {"accumulate": "full"},
    {"prefetch": 2, "stream_order": "deferred"},
    {"reshard_after_forward": False, "recompute": "full"},
    {"gradient_accumulation": 1},
    {"accumulate": "full", "prefetch": 0, "reshard_after_forward": False},
]


class MeshesAgree(unittest.TestCase):
    lab: Lab
    pairs: list[tuple[str, str]]  # case, its reference on one process

    @classmethod
    def setUpClass(cls) -> None:
        cls.lab, cls.pairs = Lab("meshes"), []
        turn = 0
        for sequences, worlds in FAMILIES.items():
            for tied in (False, True):
                kind = f"{sequences}-{'tied' if tied else 'untied'}"
                reference = cls.add(f"{kind}-one", Mesh(1, 1, 1), sequences, tied, {})
                for mesh in (m for world in worlds for m in meshes(world, federate=1)):
                    variation = VARIATIONS[turn % len(VARIATIONS)]
                    turn += 1
                    case = cls.add(f"{kind}-{mesh}-{turn}", mesh, sequences, tied, variation)
                    cls.pairs.append((case, reference))
        cls.lab.run()

    @classmethod
    def add(cls, name: str, mesh: Mesh, sequences: int, tied: bool, variation: dict) -> str:
        micro_steps = variation.get("gradient_accumulation", 3)
        batch, rest = divmod(sequences, mesh.size * micro_steps)
        assert rest == 0
        settings = {
            "model__tie_word_embeddings": tied,
            "data__batch_size": batch,
            "gradient_accumulation": micro_steps,
            "gradient_clip": CLIP,
            "schedule__steps": STEPS,
        }
        return cls.lab.case(name, mesh, **(settings | variation))

    def each_pair(self, compare: Callable[[Result, Result], None]) -> None:
        for case, reference in self.pairs:
            with self.subTest(case=case):
                compare(self.lab.result(case), self.lab.result(reference))

    def test_losses_and_norms(self) -> None:
        worst = 0.0

        def compare(run: Result, one: Result) -> None:
            nonlocal worst
            for key in ("loss", "grad_norm", "grad_norm_max"):
                worst = max(worst, np.abs(run.series(key) / one.series(key) - 1).max())
                np.testing.assert_allclose(run.series(key), one.series(key), rtol=TOLERANCE, err_msg=key)
            np.testing.assert_array_equal(run.series("tokens"), one.series("tokens"))

        self.each_pair(compare)
        print(f"largest relative difference of losses and norms: {worst:.2g}")

    def test_first_gradients_of_every_unit(self) -> None:
        worst = 0.0

        def compare(run: Result, one: Result) -> None:
            nonlocal worst
            expected = one.gradients()
            for unit, gradient in run.gradients().items():
                worst = max(worst, distance(gradient, expected[unit]))
                self.assertLess(distance(gradient, expected[unit]), TOLERANCE, unit)

        self.each_pair(compare)
        print(f"largest relative distance of gradients: {worst:.2g}")

    def test_replicas_are_identical(self) -> None:
        def compare(run: Result, _: Result) -> None:
            first, *others = run.all_parameters()
            for other in others:
                np.testing.assert_array_equal(other, first)

        self.each_pair(compare)

    def test_the_case_is_worth_testing(self) -> None:
        """Clipping is active, the model learns, and other data gives other numbers."""
        one, other = self.lab.result("144-tied-one"), self.lab.result("90-tied-one")
        self.assertTrue((one.series("grad_norm") > CLIP).all())
        self.assertLess(one.series("loss")[-1], one.series("loss")[0])
        self.assertGreater(abs(one.series("loss")[0] - other.series("loss")[0]), 1e-4)


if __name__ == "__main__":
    unittest.main()
