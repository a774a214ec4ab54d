"""Federations that must equal something simpler."""

import itertools
import unittest
from collections.abc import Callable

import numpy as np
from lab import Lab, Mesh, Result, distance

RULES = ("fedavg", "fedavgm", "fedmom", "diloco")
ROUND = {"federation__every": 3, "schedule__steps": 8}  # two rounds and a short one at the end


class Identities(unittest.TestCase):
    """Cases are collected by every test's own method, trained together, then compared."""

    lab: Lab
    checks: dict[str, list[tuple[str, str]]]

    @classmethod
    def setUpClass(cls) -> None:
        cls.lab, cls.checks = Lab("identities"), {}
        for collect in (
            cls.collect_identical_data,
            cls.collect_one_group,
            cls.collect_overlap,
            cls.collect_replicas,
            cls.collect_plain_diloco,
            cls.collect_every_step,
        ):
            collect()
        cls.lab.run()

    @classmethod
    def pair(cls, check: str, case: str, reference: str) -> None:
        cls.checks.setdefault(check, []).append((case, reference))

    @classmethod
    def collect_identical_data(cls) -> None:
        shapes = [Mesh(2, 1, 1), Mesh(3, 1, 1), Mesh(2, 2, 1), Mesh(2, 1, 3), Mesh(4, 1, 2), Mesh(4, 2, 2)]
        for rule, mesh in itertools.product(RULES, shapes):
            settings = ROUND | {"federation__rule": rule, "data__groups": "identical"}
            one = f"group-{rule}-{mesh.replicate}x{mesh.shard}"
            if one not in cls.lab.cases:
                cls.lab.case(one, Mesh(1, mesh.replicate, mesh.shard), **settings)
            case = cls.lab.case(f"identical-{rule}-{mesh}", mesh, **settings, federation__weights="tokens")
            cls.pair("identical", case, one)

    @classmethod
    def collect_one_group(cls) -> None:
        for mesh in (Mesh(1, 1, 1), Mesh(1, 2, 2)):
            off = cls.lab.case(f"off-{mesh}", mesh, schedule__steps=8, federation__every=10**6)
            for rule in RULES:
                outer = {} if rule == "fedavg" else {"federation__momentum": 0}
                settings = ROUND | {"federation__rule": rule, "federation__eta": 1} | outer
                cls.pair("one group", cls.lab.case(f"one-{rule}-{mesh}", mesh, **settings), off)

    @classmethod
    def collect_overlap(cls) -> None:
        ways = [
            ({"federation__replicas": "one", "federation__weights": "tokens"}, Mesh(2, 2, 2)),
            ({"federation__dtype": "bf16"}, Mesh(3, 1, 2)),
            ({"federation__dtype": "int8", "federation__offload": True}, Mesh(2, 2, 1)),
        ]
        for rule, (number, (way, mesh)) in itertools.product(RULES, enumerate(ways)):
            settings = ROUND | {"federation__rule": rule} | way
            name = f"{rule}-{number}"
            blocking = cls.lab.case(f"blocking-{name}", mesh, **settings)
            for order in ("eager", "deferred"):
                case = cls.lab.case(
                    f"overlap-{order}-{name}", mesh, **settings, federation__schedule="overlap", stream_order=order
                )
                cls.pair("overlap", case, blocking)

    @classmethod
    def collect_replicas(cls) -> None:
        for rule, schedule in itertools.product(RULES, ("blocking", "streaming")):
            settings = ROUND | {
                "federation__rule": rule,
                "federation__schedule": schedule,
                "federation__fragment_layers": 1,
            }
            name = f"{rule}-{schedule}"
            both = [
                cls.lab.case(f"replicas-{n}-{name}", Mesh(2, 2, 2), **settings, federation__replicas=n)
                for n in ("one", "all")
            ]
            cls.pair("replicas", *both)

    @classmethod
    def collect_plain_diloco(cls) -> None:
        for mesh in (Mesh(2, 1, 1), Mesh(3, 1, 2), Mesh(4, 2, 1)):
            average = cls.lab.case(f"average-{mesh}", mesh, **ROUND)
            outer = {"federation__rule": "diloco", "federation__eta": 1, "federation__momentum": 0}
            cls.pair("plain diloco", cls.lab.case(f"plain-{mesh}", mesh, **ROUND, **outer), average)

    @classmethod
    def collect_every_step(cls) -> None:
        sgd = {
            "optimizer__kind": "sgd",
            "optimizer__lr": 0.03,
            "gradient_clip": 0,
            "schedule__steps": 8,
            "federation__every": 1,
            "gradient_accumulation": 3,
        }
        # Groups with unequal numbers of target tokens need their weights; without masked targets they are equal.
        for mesh, weights in itertools.product(
            (Mesh(2, 1, 1), Mesh(3, 1, 1), Mesh(2, 2, 1), Mesh(4, 1, 1)), ("tokens", "equal")
        ):
            settings = sgd | {"data__ignore_token": 3 if weights == "tokens" else None}
            ddp = f"ddp-{weights}-{mesh.size}"
            if ddp not in cls.lab.cases:
                cls.lab.case(ddp, Mesh(1, mesh.size, 1), **settings)
            case = cls.lab.case(f"fl-{weights}-{mesh}", mesh, **settings, federation__weights=weights)
            cls.pair("every step", case, ddp)

    def each(self, check: str, compare: Callable[[Result, Result], None]) -> None:
        for case, reference in self.checks[check]:
            with self.subTest(case=case):
                compare(self.lab.result(case), self.lab.result(reference))

    def assert_same_bits(self, check: str) -> None:
        def compare(run: Result, other: Result) -> None:
            for key in ("loss", "grad_norm", "grad_norm_max"):
                np.testing.assert_array_equal(run.series(key), other.series(key), key)
            for parameters in run.all_parameters():
                np.testing.assert_array_equal(parameters, other.parameters())

        self.each(check, compare)

    def test_groups_with_identical_data_equal_one_group_bit_for_bit(self) -> None:
        self.assert_same_bits("identical")

    def test_one_group_without_outer_momentum_equals_no_federation(self) -> None:
        self.assert_same_bits("one group")

    def test_overlap_equals_blocking_bit_for_bit(self) -> None:
        self.assert_same_bits("overlap")

    def test_one_replica_equals_all_replicas_bit_for_bit(self) -> None:
        self.assert_same_bits("replicas")

    def test_diloco_with_eta_1_without_momentum_equals_fedavg_within_one_ulp(self) -> None:
        def compare(run: Result, average: Result) -> None:
            expected = average.parameters()
            ulp = np.spacing(np.abs(expected).max())
            for parameters in run.all_parameters():
                self.assertLessEqual(np.abs(parameters - expected).max(), ulp)

        self.each("plain diloco", compare)

    def test_aggregating_every_sgd_step_equals_data_parallelism(self) -> None:
        def compare(run: Result, ddp: Result) -> None:
            for parameters in run.all_parameters():
                self.assertLess(distance(parameters, ddp.parameters()), 1e-6)
            np.testing.assert_allclose(run.series("loss"), ddp.series("loss"), rtol=1e-6)

        self.each("every step", compare)

    def test_the_cases_are_worth_testing(self) -> None:
        """Rules, weights and data make a difference that the identities above would see."""
        last = {name: self.lab.result(name).parameters() for name in self.lab.cases}
        for a, b, least in (
            ("blocking-fedavg-0", "blocking-diloco-0", 1e-4),
            ("blocking-fedavg-0", "blocking-fedavg-1", 1e-4),
            ("replicas-all-diloco-blocking", "replicas-all-diloco-streaming", 1e-4),
            ("average-2x1x1", "off-1x1x1", 1e-4),
            ("group-fedavg-1x1", "group-diloco-1x1", 1e-4),
            ("fl-tokens-2x1x1", "fl-equal-2x1x1", 1e-4),
        ):
            self.assertGreater(distance(last[a], last[b]), least, (a, b))


if __name__ == "__main__":
    unittest.main()
