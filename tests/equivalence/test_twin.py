"""Federated runs with disjoint data equal an offline twin.

The twin is F processes of their own, each of which trains one group by itself, and the outer rules in float64 here,
straight from their definitions: theta_old is the model after the last aggregation, Delta the weighted mean over groups
of theta_old - theta.
"""

import itertools
import json
import os
import pathlib
import subprocess
import unittest
from typing import NamedTuple

import numpy as np
from lab import Config, Lab, Mesh, distance

EVERY, ROUNDS = 2, 3
STEPS = EVERY * ROUNDS - 1  # the last round is short: the run's last step aggregates
TOLERANCE = 1e-6

MESHES = [
    Mesh(2, 1, 1),
    Mesh(3, 1, 1),
    Mesh(4, 1, 1),
    Mesh(2, 2, 1),
    Mesh(2, 1, 2),
    Mesh(3, 2, 1),
    Mesh(3, 1, 2),
    Mesh(4, 2, 1),
    Mesh(2, 2, 2),
]


class Rule(NamedTuple):
    name: str
    eta: float
    momentum: float

    def apply(self, old: np.ndarray, delta: np.ndarray, state: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """The new model and the rule's state. State None: the first aggregation."""
        if self.name == "fedmom":
            ahead, before = old - self.eta * delta, old if state is None else state
            return ahead + self.momentum * (ahead - before), ahead
        m = delta if state is None else self.momentum * state + delta
        if self.name == "diloco":
            return old - self.eta * (delta + self.momentum * m), m
        return old - self.eta * m, m


# FedMom and DiLoCo with the same eta and momentum are one and the same.
RULES = [
    Rule("fedavg", 1, 0),
    Rule("fedavg", 0.8, 0),
    Rule("fedavgm", 1, 0.9),
    Rule("fedmom", 0.7, 0.9),
    Rule("diloco", 0.6, 0.8),
]


class Group:
    """One federation group as a process."""

    def __init__(self, config: pathlib.Path, group: int) -> None:
        self.path = config.with_suffix(f".{group}.f32")
        command = [os.environ["TWIN_GROUP"], str(config), str(group)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def order(self, text: str) -> int:
        self.send(text)
        return self.answer()

    def send(self, text: str) -> None:
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def answer(self) -> int:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"twin_group ended with code {self.process.wait()}")
        return int(line)

    @property
    def parameters(self) -> np.ndarray:
        self.order(f"save {self.path}")
        return np.fromfile(self.path, np.float32).astype(np.float64)

    @parameters.setter
    def parameters(self, values: np.ndarray) -> None:
        values.astype(np.float32).tofile(self.path)
        self.order(f"load {self.path}")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def twin(groups: list[Group], rule: Rule, weights: str) -> tuple[np.ndarray, float]:
    """Final parameters, and how far apart the groups were before the last aggregation."""
    for group in groups:
        group.order("reset")
    old, state = groups[0].parameters, None
    for round_ in range(ROUNDS):
        steps = min(EVERY, STEPS - round_ * EVERY)
        for group in groups:
            group.send(f"train {steps}")
        tokens = np.array([group.answer() for group in groups], np.float64)
        share = tokens / tokens.sum() if weights == "tokens" else np.full(len(groups), 1 / len(groups))
        local = [group.parameters for group in groups]
        delta = sum(w * (old - theta) for w, theta in zip(share, local, strict=True))
        old, state = rule.apply(old, delta, state)
        for group in groups:
            group.parameters = old
    return old, distance(local[0], local[1])


class Twin(unittest.TestCase):
    lab: Lab
    cases: dict[tuple[Mesh, Rule, str], str]

    @classmethod
    def setUpClass(cls) -> None:
        cls.lab, cls.cases = Lab("twin"), {}
        for number, (mesh, rule, weights) in enumerate(itertools.product(MESHES, RULES, ("equal", "tokens"))):
            cls.cases[mesh, rule, weights] = cls.lab.case(
                f"{mesh}-{rule.name}-{rule.eta}-{weights}",
                mesh,
                gradient_accumulation=2,
                data__batch_size=2,
                schedule__steps=STEPS,
                optimizer__lr=1e-3,
                federation__every=EVERY,
                federation__rule=rule.name,
                federation__eta=rule.eta,
                federation__momentum=None if rule.name == "fedavg" else rule.momentum,
                federation__weights=weights,
                federation__replicas=("all", "one")[number % 2],
                federation__schedule=("blocking", "overlap")[number // 2 % 2],
            )
        cls.lab.run()

    def config_of(self, mesh: Mesh) -> Config:
        return self.lab.cases[self.cases[mesh, RULES[0], "equal"]]

    def test_parameters_equal_the_offline_twin(self) -> None:
        """A group's processes see only its size: R x 1 and 1 x S share a twin."""
        worst = 0.0
        for groups_count, ranks in sorted({(m.federate, m.replicate * m.shard) for m in MESHES}):
            path = self.lab.folder / f"twin.{groups_count}.{ranks}.json"
            path.write_text(json.dumps(self.config_of(self.mesh_like(groups_count, ranks))))
            groups = [Group(path, g) for g in range(groups_count)]
            try:
                expected = {
                    (rule, weights): twin(groups, rule, weights) for rule in RULES for weights in ("equal", "tokens")
                }
            finally:
                for group in groups:
                    group.close()
            self.require_distinct(expected)
            for (mesh, rule, weights), name in self.cases.items():
                if (mesh.federate, mesh.replicate * mesh.shard) != (groups_count, ranks):
                    continue
                with self.subTest(case=name):
                    for parameters in self.lab.result(name).all_parameters():
                        off = distance(parameters, expected[rule, weights][0])
                        worst = max(worst, off)
                        self.assertLess(off, TOLERANCE)
        print(f"largest relative distance from the twin: {worst:.2g}")

    def mesh_like(self, groups: int, ranks: int) -> Mesh:
        return next(m for m in MESHES if (m.federate, m.replicate * m.shard) == (groups, ranks))

    def require_distinct(self, expected: dict) -> None:
        """A wrong rule, wrong weights or no aggregation at all would be seen."""
        for (a, (theta_a, apart)), (b, (theta_b, _)) in itertools.combinations(expected.items(), 2):
            self.assertGreater(distance(theta_a, theta_b), 30 * TOLERANCE, (a, b))
            self.assertGreater(apart, 30 * TOLERANCE)


if __name__ == "__main__":
    unittest.main()
