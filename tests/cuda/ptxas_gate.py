#!/usr/bin/env python3
"""Holds what ptxas reports of each kernel against a committed table of budgets (budget.csv).

    ptxas_gate.py check    --table budget.csv [--launches LOG] report.ptxas ...
    ptxas_gate.py update   --table budget.csv  --launches LOG  report.ptxas ...
    ptxas_gate.py markdown --table budget.csv [--write|--check docs/kernels.md]

The table has a row for every kernel instantiation: how it is launched (threads of a block and dynamic shared memory, the
most that any test launches) and what it may use (registers a thread, static shared memory, stack), with the blocks that
must then fit on a multiprocessor. Checked are: no spills; nothing over its budget; enough resident blocks; no kernel
without a row and no row without a kernel. With a launch log (cuda/emulation/launch_log.h) also that some test launches
each kernel, and none wider or with more memory than its row says.
"""

import argparse
import csv
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "lib"))
import pages

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
SKIPPED = 77  # ctest's SKIP_RETURN_CODE


# ---- residency: the CUDA programming guide's table of compute capabilities ----


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of compute capability 8.0, 9.0 and 10.0. Registers are handed out by warp, 256 at a time, from four equal parts;
    shared memory in units of 128 bytes, of which the system takes 1 KiB for every block."""

    shared: int
    shared_per_block: int
    registers: int = 65536
    warps: int = 64
    blocks: int = 32


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(shared=164 * 1024, shared_per_block=163 * 1024),
    "sm_90": Multiprocessor(shared=228 * 1024, shared_per_block=227 * 1024),
    "sm_100": Multiprocessor(shared=228 * 1024, shared_per_block=227 * 1024),
}


def rounded_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def resident_blocks(architecture: str, registers: int, threads: int, shared: int) -> int:
    """Blocks that are on a multiprocessor at once; 0 where not even one fits."""
    m = MULTIPROCESSORS[architecture]
    warps = rounded_up(threads, 32) // 32
    if threads > 1024 or shared > m.shared_per_block:
        return 0
    by_shared = m.shared // rounded_up(shared + 1024, 128)
    warps_by_registers = m.registers // 4 // rounded_up(max(registers, 1) * 32, 256) * 4
    return min(m.blocks, m.warps // warps, by_shared, warps_by_registers // warps)


# ---- ptxas's report ----


@dataclass
class Usage:
    """One kernel on one architecture."""

    registers: int = 0
    static_shared: int = 0
    stack: int = 0
    spills: int = 0  # bytes stored and loaded


def demangled(symbols: list) -> dict:
    if not symbols:
        return {}
    found = subprocess.run(["c++filt"], input="\n".join(symbols), text=True, capture_output=True, check=True).stdout
    return dict(zip(symbols, found.splitlines()))


def short_name(signature: str) -> str:
    """`void strata::cuda::(anonymous namespace)::copy<__nv_bfloat16, 128>(float*)` -> `copy<bf16, 128>`."""
    name = re.sub(r"\(anonymous namespace\)::", "", signature)
    name = re.sub(r"\b(?:\w+::)+", "", name).replace("__nv_bfloat16", "bf16")
    depth = 0
    for i, c in enumerate(name):
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0:  # the parameters begin
            name = name[:i]
            break
    return re.sub(r"^(?:static )?void ", "", name)


ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(sm_\w+)'")
FUNCTION = re.compile(r"Function properties for (\w+)")
MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
STATIC = re.compile(r"(\d+) bytes smem")


def read_report(text: str) -> dict:
    """{(symbol, architecture): Usage}. Functions that were not inlined count with the kernel named before them."""
    kernels, current = {}, None
    for line in text.splitlines():
        if m := ENTRY.search(line):
            current = kernels.setdefault((m[1], m[2]), Usage())
        elif m := MEMORY.search(line):
            if current is None:
                raise ValueError(f"a function before any kernel: {line}")
            current.stack = max(current.stack, int(m[1]))
            current.spills += int(m[2]) + int(m[3])
        elif m := USED.search(line):
            current.registers = max(current.registers, int(m[1]))
            if m := STATIC.search(line):
                current.static_shared = max(current.static_shared, int(m[1]))
    return kernels


@dataclass
class Kernel:
    """What was found of one kernel: usage by architecture, and its launches where they are known."""

    usage: dict = field(default_factory=dict)
    threads: int = 0
    dynamic_shared: int = 0


def read_reports(paths: list) -> dict:
    """{(file, kernel): Kernel} of reports named after their sources: rope.ptxas is of rope.cu."""
    kernels = {}
    for path in paths:
        usages = read_report(path.read_text())
        names = demangled(sorted({symbol for symbol, _ in usages}))
        for (symbol, architecture), usage in usages.items():
            kernel = kernels.setdefault((path.stem, short_name(names[symbol])), Kernel())
            if architecture in kernel.usage:
                raise ValueError(f"{path.stem}.cu: two kernels are called {short_name(names[symbol])} -> rename one")
            kernel.usage[architecture] = usage
    return kernels


# ---- launches, as the emulation logs them ----


def read_launches(text: str) -> dict:
    """{kernel: (threads, dynamic bytes)}, the most over all programs. A log names kernels by address."""
    by_program = {}
    for line in text.splitlines():
        program, address, threads, dynamic = line.split("\t")
        by_program.setdefault(program, {}).setdefault(int(address, 16), []).append((int(threads), int(dynamic)))
    launches = {}
    for program, kernels in by_program.items():
        symbols = {}
        for line in subprocess.run(["nm", program], text=True, capture_output=True, check=True).stdout.splitlines():
            parts = line.split()
            if len(parts) == 3 and int(parts[0], 16) in kernels and parts[1] in "tTwW":
                symbols[int(parts[0], 16)] = parts[2]
        names = demangled(sorted(symbols.values()))
        for address, shapes in kernels.items():
            if address not in symbols:
                raise ValueError(f"{program} has no function at {address:x} -> is it the one that wrote the log?")
            name = short_name(names[symbols[address]])
            threads, dynamic = launches.get(name, (0, 0))
            launches[name] = (max(threads, *(s[0] for s in shapes)), max(dynamic, *(s[1] for s in shapes)))
    return launches


# ---- the table ----


@dataclass
class Budget:
    file: str
    kernel: str
    threads: int
    dynamic_shared: int
    static_shared: int
    stack: int
    registers: dict  # by architecture
    blocks: dict


FIXED = ("file", "kernel", "threads", "dynamic_shared", "static_shared", "stack")
HEADER = [*FIXED, *(f"{what} {a}" for a in ARCHITECTURES for what in ("registers", "blocks"))]


def read_table(path: Path) -> dict:
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        if rows.fieldnames != HEADER:
            raise ValueError(f"{path}: the columns are {rows.fieldnames}, expected {HEADER}")
        table = {}
        for row in rows:
            budget = Budget(
                row["file"], row["kernel"], *(int(row[c]) for c in FIXED[2:]),
                {a: int(row[f"registers {a}"]) for a in ARCHITECTURES},
                {a: int(row[f"blocks {a}"]) for a in ARCHITECTURES},
            )
            if (budget.file, budget.kernel) in table:
                raise ValueError(f"{path}: {budget.file} {budget.kernel} has two rows")
            table[budget.file, budget.kernel] = budget
        return table


def write_table(path: Path, table: dict) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(HEADER)
        for _, b in sorted(table.items()):
            fixed = [getattr(b, column) for column in FIXED]
            rows.writerow([*fixed, *(v for a in ARCHITECTURES for v in (b.registers[a], b.blocks[a]))])


def budget_of(file: str, name: str, kernel: Kernel) -> Budget:
    """The budget that the kernel meets now: registers up to the unit in which they are handed out (8 a thread)."""
    static = max(u.static_shared for u in kernel.usage.values())
    registers = {a: min(255, rounded_up(u.registers, 8)) for a, u in kernel.usage.items()}
    shared = static + kernel.dynamic_shared
    blocks = {a: resident_blocks(a, registers[a], kernel.threads, shared) for a in kernel.usage}
    stack = max(u.stack for u in kernel.usage.values())
    return Budget(file, name, kernel.threads, kernel.dynamic_shared, static, stack, registers, blocks)


# ---- the gate ----


def faults(table: dict, kernels: dict, launches: dict | None) -> list:
    """What is wrong, a line each; empty where all is well."""
    found = []
    for key in sorted(kernels.keys() - table.keys()):
        found.append(f"{key[0]}.cu: {key[1]} has no row in the table")
    for key in sorted(table.keys() - kernels.keys()):
        found.append(f"{key[0]}.cu: {key[1]} has a row in the table and does not exist")
    for key in sorted(table.keys() & kernels.keys()):
        budget, kernel = table[key], kernels[key]
        for architecture in ARCHITECTURES:
            name = f"{key[0]}.cu: {key[1]} on {architecture}"
            if (usage := kernel.usage.get(architecture)) is None:
                found.append(f"{name} was not compiled")
                continue
            if usage.spills:
                found.append(f"{name} spills: {usage.spills} bytes stored and loaded")
            for what, used, allowed in (
                ("registers", usage.registers, budget.registers[architecture]),
                ("bytes of static shared memory", usage.static_shared, budget.static_shared),
                ("bytes of stack", usage.stack, budget.stack),
            ):
                if used > allowed:
                    found.append(f"{name} uses {used} {what}, its budget is {allowed}")
            shared = usage.static_shared + budget.dynamic_shared
            blocks = resident_blocks(architecture, usage.registers, budget.threads, shared)
            wanted = budget.blocks[architecture]
            # A kernel that needs more shared memory than an architecture has is never launched there: 0 is its budget.
            if blocks < wanted:
                found.append(f"{name} keeps {blocks} blocks on a multiprocessor, its budget is {wanted}")
        if launches is None:
            continue
        if key[1] not in launches:
            found.append(f"{key[0]}.cu: {key[1]} is launched by no test")
            continue
        threads, dynamic = launches[key[1]]
        if threads > budget.threads:
            found.append(f"{key[0]}.cu: {key[1]} is launched with {threads} threads, its row says {budget.threads}")
        if dynamic > budget.dynamic_shared:
            row = budget.dynamic_shared
            found.append(f"{key[0]}.cu: {key[1]} is launched with {dynamic} dynamic bytes, its row says {row}")
    return found


def updated(kernels: dict, launches: dict) -> dict:
    table = {}
    for (file, name), kernel in kernels.items():
        if name not in launches:
            raise ValueError(f"{file}.cu: {name} is launched by no test -> test it, or remove it")
        kernel.threads, kernel.dynamic_shared = launches[name]
        table[file, name] = budget_of(file, name, kernel)
    return table


def markdown(table: dict) -> str:
    lines = [
        "| kernel | threads | shared memory, static + dynamic | "
        + " | ".join(f"{a}: registers, blocks (warps)" for a in ARCHITECTURES) + " |",
        "|---|---:|---:|" + "---:|" * len(ARCHITECTURES),
    ]
    previous = None
    for (file, name), b in sorted(table.items()):
        if file != previous:
            lines.append(f"| **{file}.cu** | | |" + " |" * len(ARCHITECTURES))
            previous = file
        warps = rounded_up(b.threads, 32) // 32
        cells = (f"{b.registers[a]}, {b.blocks[a]} ({b.blocks[a] * warps})" for a in ARCHITECTURES)
        lines.append(f"| `{name}` | {b.threads} | {b.static_shared} + {b.dynamic_shared} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("check", "update", "markdown"))
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--launches", type=Path)
    pages.add_arguments(parser)
    parser.add_argument("reports", type=Path, nargs="*")
    arguments = parser.parse_intermixed_args()  # reports may follow options
    try:
        if arguments.command == "markdown":
            table = markdown(read_table(arguments.table))
            return pages.publish(arguments, "ptxas", table, "scripts/ptxas_budget.sh")
        if not arguments.reports:
            print("skipped: no report of ptxas, since there is no nvcc here")
            return SKIPPED
        kernels = read_reports(arguments.reports)
        launches = read_launches(arguments.launches.read_text()) if arguments.launches else None
        if arguments.command == "update":
            write_table(arguments.table, updated(kernels, launches or {}))
            return 0
        found = faults(read_table(arguments.table), kernels, launches)
    except ValueError as error:
        print(f"error: {error}")
        return 1
    for fault in found:
        print(fault)
    if found:
        print(f"{len(found)} faults -> mend the kernels; where the change is meant: scripts/ptxas_budget.sh")
        return 1
    print(f"{len(kernels)} kernels on {', '.join(ARCHITECTURES)}: within their budgets, nothing spilled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
