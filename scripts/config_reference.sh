#!/usr/bin/env bash
# Writes the table of configuration keys into README.md, between its markers. TRAINER: the program to ask.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
trainer=${TRAINER:-$ROOT/build/default/src/trainer}
[ -x "$trainer" ] || die "$trainer is not there -> build it, or set TRAINER"
"$trainer" config-reference >"$ROOT/build/config-reference.md"
awk -v table="$ROOT/build/config-reference.md" '
  /<!-- config-reference end -->/ { inside = 0 }
  !inside { print }
  /<!-- config-reference begin -->/ { inside = 1; while ((getline line < table) > 0) print line }
' "$ROOT/README.md" >"$ROOT/build/README.md"
cp "$ROOT/build/README.md" "$ROOT/README.md"
