"""The bytes that trainings count equal the plan, the equations, and what MPI was asked to move."""

import unittest
from collections.abc import Callable
from typing import NamedTuple

from lab import Lab, Mesh, Result, unit_sizes

EVERY, STEPS = 2, 5  # aggregations after steps 2, 4 and, being the last, 5


class Strategy(NamedTuple):
    name: str
    mesh: Mesh
    settings: dict = {}


STRATEGIES = [
    Strategy("one process", Mesh(1, 1, 1)),
    Strategy("DDP", Mesh(1, 3, 1)),
    Strategy("FSDP", Mesh(1, 1, 4)),
    Strategy("FSDP of five", Mesh(1, 1, 5), {"gradient_accumulation": 3}),
    Strategy("HSDP", Mesh(1, 2, 3), {"gradient_accumulation": 3, "reduce_dtype": "bf16"}),
    Strategy("FL", Mesh(3, 1, 1)),
    Strategy("FL+FSDP", Mesh(2, 1, 3), {"precision": "bf16"}),
    Strategy("FL+HSDP", Mesh(2, 2, 2)),
    Strategy("FL+HSDP, one replica", Mesh(2, 3, 2), {"federation__replicas": "one", "gradient_accumulation": 3}),
    Strategy("FL+HSDP, tied", Mesh(3, 2, 1), {"federation__replicas": "one", "model__tie_word_embeddings": True}),
    Strategy("FL+FSDP, overlap, tokens", Mesh(2, 1, 2), {"federation__schedule": "overlap", "federation__weights": "tokens"}),
    Strategy(
        "FL+HSDP, streaming",
        Mesh(2, 2, 2),
        {"federation__schedule": "streaming", "federation__rule": "diloco", "federation__fragment_layers": 1},
    ),
    Strategy("FL+FSDP, int8", Mesh(2, 1, 2), {"federation__dtype": "int8", "federation__rule": "diloco"}),
]
SIZES = {"fp32": 4, "bf16": 2}
FIELDS = {
    ("shard", "all-gather"): "shard_all_gather",
    ("shard", "reduce-scatter"): "shard_reduce_scatter",
    ("replicate", "all-reduce"): "replicate_all_reduce",
    ("replicate", "broadcast"): "replicate_broadcast",
    ("federate", "all-reduce"): "federate_all_reduce",
    ("federate", "all-gather"): "federate_all_reduce",
}


def all_reduce(count: int, size: int, place: int) -> int:
    """Elements received: everyone else's version of the own chunk, then everyone else's chunk."""
    own = count // size + (1 if place < count % size else 0)
    return (size - 1) * own + count - own


def equations(run: Result, step: int, rank: int, decoders: bool) -> dict[str, int]:
    """Equations 1 to 5 in their physical form: bytes one rank receives, of the decoder units or the edge units."""
    config, (F, R, S) = run.config, run.mesh
    f, r, s = rank // (R * S), rank // S % R, rank % S
    micro_steps = config.get("gradient_accumulation", 1)
    compute, reduced = SIZES[config["precision"]], SIZES[config.get("reduce_dtype", "fp32")]
    aggregates = F > 1 and (step % EVERY == 0 or step == STEPS)
    sender = config["federation"].get("replicas", "all") == "all" or R == 1 or r == s % R
    out = dict.fromkeys(FIELDS.values(), 0)
    for name, elements in unit_sizes(config["model"]).items():
        if name.startswith("decoder") != decoders:
            continue
        shard = -(-elements // (8 * S)) * 8  # padded so that every shard is a multiple of 8 elements
        out["shard_all_gather"] += micro_steps * (2 if decoders else 1) * shard * (S - 1) * compute
        out["shard_reduce_scatter"] += micro_steps * shard * (S - 1) * reduced
        out["replicate_all_reduce"] += all_reduce(shard, R, r) * reduced
        if not aggregates:
            continue
        if sender:
            if config["federation"].get("dtype") == "int8":  # with an fp32 scale for every 256 values
                out["federate_all_reduce"] += (F - 1) * (shard + 4 * -(-shard // 256))
            else:
                out["federate_all_reduce"] += all_reduce(shard, F, f) * 4
        else:
            out["replicate_broadcast"] += shard * 4
    return out


def by_field(groups: dict, traffics: tuple[str, ...]) -> dict[str, int]:
    out = dict.fromkeys(FIELDS.values(), 0)
    for group in ("shard", "replicate", "federate"):
        for traffic in traffics:
            for collective, entry in groups[group].get(traffic, {}).items():
                out[FIELDS[group, collective]] += entry["received"]
    return out


def added(parts: list[dict[str, int]]) -> dict[str, int]:
    return {key: sum(part[key] for part in parts) for key in parts[0]}


class Bytes(unittest.TestCase):
    lab: Lab

    @classmethod
    def setUpClass(cls) -> None:
        cls.lab = Lab("bytes")
        for strategy in STRATEGIES:
            cls.lab.case(
                strategy.name.replace(" ", "_"),
                strategy.mesh,
                **({"federation__every": EVERY, "schedule__steps": STEPS} | strategy.settings),
            )
        cls.lab.run()

    def each(self, compare: Callable[[Result], None]) -> None:
        for name in self.lab.cases:
            with self.subTest(strategy=name):
                compare(self.lab.result(name))

    @staticmethod
    def schedule(run: Result) -> str:
        return run.config["federation"].get("schedule", "blocking")

    def test_counters_of_every_rank_equal_the_plan_exactly(self) -> None:
        def compare(run: Result) -> None:
            for rank in range(run.mesh.size):
                seen = run.bytes(rank)
                for traffic in ("training", "edge"):
                    plan = added([by_field(step, (traffic,)) for step in seen["planned"]])
                    self.assertEqual(by_field(seen["counted"], (traffic,)), plan, (rank, traffic))

        self.each(compare)

    def test_counters_of_every_rank_equal_the_equations_exactly(self) -> None:
        def compare(run: Result) -> None:
            if self.schedule(run) == "streaming":  # fragments have steps of their own
                return
            for rank in range(run.mesh.size):
                for decoders, traffic in ((True, "training"), (False, "edge")):
                    expected = added([equations(run, step, rank, decoders) for step in range(1, STEPS + 1)])
                    self.assertEqual(by_field(run.bytes(rank)["counted"], (traffic,)), expected, (rank, traffic))

        self.each(compare)

    def test_metrics_of_every_step_equal_plan_and_equations_exactly(self) -> None:
        def compare(run: Result) -> None:
            seen = [self.fields(line["bytes"]) for line in run.metrics]
            plan = [by_field(step, ("training", "edge")) for step in run.bytes(0)["planned"]]
            if self.schedule(run) != "blocking":  # an aggregation's bytes may come in a later step
                self.assertEqual(added(seen), added(plan))
                return
            self.assertEqual(seen, plan)
            for step in range(1, STEPS + 1):
                expected = added([equations(run, step, 0, decoders) for decoders in (True, False)])
                self.assertEqual(seen[step - 1], expected, step)

        self.each(compare)

    @staticmethod
    def fields(groups: dict) -> dict[str, int]:
        return {f"{group}_{name}": count for group, names in groups.items() for name, count in names.items()}

    def test_counters_equal_what_mpi_was_asked_to_move(self) -> None:
        def compare(run: Result) -> None:
            for rank in range(run.mesh.size):
                seen = run.bytes(rank)
                for direction in ("sent", "received"):
                    counted = sum(
                        entry[direction]
                        for group in seen["counted"].values()
                        for traffic in group.values()
                        for entry in traffic.values()
                    )
                    self.assertEqual(seen["intercepted"][direction], counted, (rank, direction))
                self.assertEqual(seen["intercepted"]["sent"] > 0, run.mesh.size > 1)

        self.each(compare)


if __name__ == "__main__":
    unittest.main()
