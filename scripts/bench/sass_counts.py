#!/usr/bin/env python3
"""Counts instructions in the innermost loops of kernels, from the text of `cuobjdump -sass`.

    cuobjdump -sass kernels.o | sass_counts.py [--architecture sm_80] [--write docs/kernels.md]

A loop is what lies between a backward branch and its target. Listed are the loops that hold tensor core instructions
(or, in kernels without any, 16-byte accesses), with what one turn of them issues for a warp.
"""

import argparse
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "cuda"))
import pages
import ptxas_gate
from ptxas_gate import short_name

ARCHITECTURE = re.compile(r"^arch = (sm_\w+)")
FUNCTION = re.compile(r"^\s*Function : (\w+)")
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
TARGET = re.compile(r"0x([0-9a-f]+)\s*$")

# Column: what an opcode must begin with.
COLUMNS = {
    "HMMA.16816": "HMMA.16816.F32.BF16",
    "LDSM x4": "LDSM.16.M",
    "LDGSTS 16 B": "LDGSTS.E",
    "LDG 16 B": "LDG.E",
    "STG 16 B": "STG.E",
    "MUFU.EX2": "MUFU.EX2",
    "barriers": "BAR.SYNC",
}


def column_of(opcode: str) -> str | None:
    """The column that an instruction counts in: loads and stores only at their full width."""
    for column, begin in COLUMNS.items():
        if not opcode.startswith(begin):
            continue
        if column == "LDSM x4" and not opcode.endswith(".4"):
            return None
        if column.endswith("16 B") and ".128" not in opcode:
            return None
        return column
    return None


@dataclass
class Loop:
    begin: int  # addresses of its first and last instruction
    end: int
    instructions: int
    counts: Counter

    def holds(self, other) -> bool:
        return self is not other and self.begin <= other.begin and other.end <= self.end


class Function:
    """A kernel's instructions: (address, opcode, operands)."""

    def __init__(self):
        self.code = []

    def loops(self) -> list:
        ends = {}  # of each loop's first instruction: the last branch back to it
        for address, opcode, operands in self.code:
            if opcode.startswith("BRA") and (m := TARGET.search(operands)) and int(m[1], 16) < address:
                ends[int(m[1], 16)] = address
        return [self.loop(begin, end) for begin, end in sorted(ends.items())]

    def loop(self, begin: int, end: int) -> Loop:
        opcodes = [opcode for address, opcode, _ in self.code if begin <= address <= end and opcode != "NOP"]
        return Loop(begin, end, len(opcodes), Counter(filter(None, map(column_of, opcodes))))

    def hot_loops(self) -> list:
        """The innermost loops that multiply on tensor cores; in a kernel without any, those with 16-byte accesses."""
        tensor = any(column_of(opcode) == "HMMA.16816" for _, opcode, _ in self.code)
        wanted = ("HMMA.16816",) if tensor else ("LDG 16 B", "STG 16 B")
        loops = [loop for loop in self.loops() if any(loop.counts[column] for column in wanted)]
        return [loop for loop in loops if not any(loop.holds(other) for other in loops)]


def read_sass(text: str, architecture: str) -> dict:
    """{symbol: Function} of one architecture."""
    functions, current, wanted = {}, None, False
    for line in text.splitlines():
        if m := ARCHITECTURE.match(line):
            wanted, current = m[1] == architecture, None
        elif wanted and (m := FUNCTION.match(line)):
            current = functions.setdefault(m[1], Function())
        elif current is not None and (m := INSTRUCTION.match(line)):
            current.code.append((int(m[1], 16), m[2], m[3].strip()))
    return functions


def demangled(symbols: list) -> dict:
    return {symbol: short_name(signature) for symbol, signature in ptxas_gate.demangled(symbols).items()}


def table(functions: dict, architecture: str) -> str:
    lines = [
        f"| kernel, loop on {architecture} | instructions | " + " | ".join(COLUMNS) + " |",
        "|---|---:|" + "---:|" * len(COLUMNS),
    ]
    names = demangled(list(functions))
    for symbol in sorted(functions, key=lambda s: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", names[s])]):
        for number, loop in enumerate(functions[symbol].hot_loops(), 1):
            cells = " | ".join(str(loop.counts[c] or "") for c in COLUMNS)
            lines.append(f"| `{names[symbol]}`, {number} | {loop.instructions} | {cells} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", default="sm_80")
    parser.add_argument("--only", default="", help="kernels whose name matches this")
    pages.add_arguments(parser)
    arguments = parser.parse_args()
    functions = read_sass(sys.stdin.read(), arguments.architecture)
    if not functions:
        print(f"error: no kernel for {arguments.architecture} in the input")
        return 1
    names = demangled(list(functions))
    chosen = {s: f for s, f in functions.items() if re.search(arguments.only, names[s])}
    return pages.publish(arguments, "sass", table(chosen, arguments.architecture), "scripts/bench/sass_counts.sh")


if __name__ == "__main__":
    sys.exit(main())
