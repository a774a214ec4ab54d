#!/usr/bin/env python3
"""Plants faults in the kernels, one at a time, and shows which tests see them.

Each fault of mutations.py is an exact replacement in one file. The tree is copied, the fault is put into the copy, the
emulated kernel tests concerned are built there and run in every mode. It fails where a fault goes unseen, where one does
not apply or compile, and where the tree without a fault fails.

    mutate.py                 every fault; --write docs/mutations.md keeps the table
    mutate.py --sample        a few that are cheap
    mutate.py --only NAME ... these

An interrupted run goes on where it stopped, as long as the tree stays as it is.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import pages
from mutations import MUTATIONS, Mutation

COPIED = ("CMakeLists.txt", "cuda", "src", "tests/CMakeLists.txt", "tests/support", "tests/kernels", "third_party")
SECONDS_PER_RUN = 300  # a fault may keep a test from ending


@dataclass(frozen=True)
class Mode:
    name: str
    build: str  # plain, race or asan
    environment: dict


def plain(name: str, **environment) -> Mode:
    """One schedule alone, where the tests would run all of them."""
    only = {"STRATA_KERNEL_TESTS_ONE_SCHEDULE": "1"}
    return Mode(name, "plain", only | {f"STRATA_EMULATION_{k.upper()}": v for k, v in environment.items()})


MODES = (
    plain("forward, early", threads="forward", copies="early"),
    plain("forward, late", threads="forward", copies="late"),
    plain("reverse, early", threads="reverse", blocks="reverse", copies="early"),
    plain("reverse, late", threads="reverse", blocks="reverse", copies="late"),
    plain("random", threads="random", blocks="random", copies="late", seed="1"),
    Mode("race", "race", {}),
    Mode("asan", "asan", {}),
)
BUILDS = tuple(dict.fromkeys(mode.build for mode in MODES))


class Refused(Exception):
    """The list of faults, or the tree without any, is not as it must be."""


def applied(text: str, mutation: Mutation) -> str:
    found = text.count(mutation.old)
    if found != 1:
        raise Refused(f"{mutation.name}: its text is {found} times in {mutation.file} -> once is needed")
    return text.replace(mutation.old, mutation.new)


def check_list(mutations, root: Path) -> None:
    """Throws Refused where a fault does not apply to the tree, changes nothing, or a name is taken twice."""
    names = [m.name for m in mutations]
    for name in names:
        if names.count(name) > 1:
            raise Refused(f"two faults are called {name}")
    for mutation in mutations:
        text = (root / mutation.file).read_text()
        if applied(text, mutation) == text:
            raise Refused(f"{mutation.name} changes nothing")


def copy_tree(target: Path) -> None:
    """What git knows of COPIED and is there. A file that is the same already is left alone, so that it is not built again."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", *COPIED],
                            capture_output=True, text=True, check=True).stdout.splitlines()
    wanted = {name for name in listed if (ROOT / name).is_file()}
    for name in wanted:
        source, copy = ROOT / name, target / name
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)
    for folder in COPIED:
        for copy in (target / folder).rglob("*"):
            if copy.is_file() and str(copy.relative_to(target)) not in wanted:
                copy.unlink()


class Workshop:
    """The copy of the tree. Its build folder lies where the tree's own does, so that ccache knows what it finds there."""

    def __init__(self, source: Path, jobs: int):
        self.source, self.build_folder, self.jobs = source, source / "build" / "default", jobs
        source.mkdir(parents=True, exist_ok=True)
        copy_tree(source)
        launcher = shutil.which("ccache")
        configure = ["cmake", "-S", source, "-B", self.build_folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                     "-DSTRATA_CUDA=OFF", f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher or ''}"]
        done = subprocess.run(configure, capture_output=True, text=True)
        if done.returncode != 0:
            raise Refused(f"configuring failed:\n{done.stdout}{done.stderr}")

    def build(self, programs: set, modes: list) -> str | None:
        """What the compiler said where the build fails."""
        builds = {mode.build for mode in modes}
        targets = sorted(f"{program}_{build}" for program in programs for build in builds)
        command = ["cmake", "--build", self.build_folder, "--parallel", str(self.jobs), "--target", *targets]
        done = subprocess.run(command, capture_output=True, text=True)
        return None if done.returncode == 0 else done.stdout + done.stderr

    def run(self, mode: Mode, program: str, tests: str) -> str | None:
        """The end of the output where the tests fail, None where they pass. Tests that do not exist fail."""
        path = self.build_folder / "tests" / "kernels" / f"{program}_{mode.build}"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("STRATA_EMULATION_")}
        command = [path, tests, "--abort", "--warn", "NoTests"]
        try:
            done = subprocess.run(command, env=environment | mode.environment, capture_output=True, text=True,
                                  errors="replace", timeout=SECONDS_PER_RUN)
        except subprocess.TimeoutExpired:
            return f"no end after {SECONDS_PER_RUN} s"
        return None if done.returncode == 0 else (done.stdout + done.stderr)[-4000:]

    def check_healthy(self, program: str, tests: str, modes: list) -> None:
        """Throws Refused where the tests fail without a fault."""
        if (output := self.build({program}, modes)) is not None:
            raise Refused(f"the tree without a fault does not build:\n{output}")
        for mode in modes:
            if (output := self.run(mode, program, tests)) is not None:
                raise Refused(f"{program} {tests} fails without a fault in mode {mode.name}:\n{output}")

    def seen_by(self, mutation: Mutation, modes: list) -> dict:
        """{mode: whether it sees the fault}."""
        path = self.source / mutation.file
        healthy = path.read_text()
        path.write_text(applied(healthy, mutation))
        try:
            if (output := self.build({mutation.program}, modes)) is not None:
                raise Refused(f"{mutation.name} does not compile:\n{output}")
            return {mode.name: self.run(mode, mutation.program, mutation.tests) is not None for mode in modes}
        finally:
            path.write_text(healthy)


class Journal:
    """What is known already of this very tree: by fault, and by program and tests without a fault, the modes that ran and
    whether their tests failed."""

    def __init__(self, path: Path, source: Path):
        self.path = path
        digest = hashlib.sha256(repr(MODES).encode())
        for folder in COPIED:
            for file in sorted([source / folder, *(source / folder).rglob("*")]):
                if file.is_file():
                    digest.update(str(file.relative_to(source)).encode() + file.read_bytes())
        self.tree, self.known = digest.hexdigest(), {}
        if path.exists() and (before := json.loads(path.read_text()))["tree"] == self.tree:
            self.known = before["known"]

    def of(self, what) -> dict:
        """what: a Mutation, or the program and tests of a run without one."""
        return self.known.get(repr(what), {})

    def missing(self, what, modes: list) -> list:
        return [mode for mode in modes if mode.name not in self.of(what)]

    def add(self, what, seen: dict) -> None:
        self.known.setdefault(repr(what), {}).update(seen)
        self.path.write_text(json.dumps({"tree": self.tree, "known": self.known}, indent=1))


def table(results: list) -> str:
    """results: (mutation, {mode: whether it saw the fault})."""
    lines = [
        "| fault | file | " + " | ".join(mode.name for mode in MODES) + " |",
        "|---|---|" + ":-:|" * len(MODES),
    ]
    marks = {True: "x", False: "", None: "not run"}
    for mutation, seen in results:
        cells = " | ".join(marks[seen.get(mode.name)] for mode in MODES)
        lines.append(f"| {mutation.name} | {Path(mutation.file).name} | {cells} |")
    counts = " | ".join(str(sum(seen.get(mode.name) is True for _, seen in results)) for mode in MODES)
    lines.append(f"| **seen, of {len(results)}** | | {counts} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults alone")
    parser.add_argument("--sample", action="store_true", help="the faults marked as the sample")
    parser.add_argument("--builds", nargs="+", choices=BUILDS, default=BUILDS, help="modes that are built so alone")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "mutation", help="where the copy is built")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    pages.add_arguments(parser)
    arguments = parser.parse_args()
    chosen = [m for m in MUTATIONS if not arguments.sample or m.sample]
    if arguments.only:
        chosen = [m for m in MUTATIONS if m.name in arguments.only]
        if len(chosen) != len(arguments.only):
            print(f"error: there are no such faults among {arguments.only}")
            return 2
    try:
        check_list(MUTATIONS, ROOT)
        workshop = Workshop(arguments.work / "tree", arguments.jobs)
        journal = Journal(arguments.work / "journal.json", workshop.source)
        modes = [mode for mode in MODES if mode.build in arguments.builds]
        for program, tests in sorted({(m.program, m.tests) for m in chosen}):
            if missing := journal.missing((program, tests), modes):
                workshop.check_healthy(program, tests, missing)
                journal.add((program, tests), {mode.name: False for mode in missing})
        print(f"without a fault all pass; {len(chosen)} faults follow", flush=True)
        for mutation in chosen:
            if missing := journal.missing(mutation, modes):
                began = time.monotonic()
                journal.add(mutation, workshop.seen_by(mutation, missing))
                seen = [mode for mode, failed in journal.of(mutation).items() if failed]
                what = ", ".join(seen) or "NOT SEEN"
                print(f"{mutation.name}: {what} ({time.monotonic() - began:.0f} s)", flush=True)
        results = [(mutation, journal.of(mutation)) for mutation in chosen]
    except Refused as fault:
        print(f"error: {fault}")
        return 1
    unseen = [mutation.name for mutation, seen in results if not any(seen.values())]
    if unseen:
        print(f"{len(unseen)} of {len(results)} faults were seen by no test: {', '.join(unseen)}")
        return 1
    print(f"all {len(results)} faults were seen")
    return pages.publish(arguments, "mutations", table(results), "scripts/mutation.sh")


if __name__ == "__main__":
    sys.exit(main())
