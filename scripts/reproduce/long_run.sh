#!/usr/bin/env bash
# FSDP against FL+FSDP, FL+HSDP and DiLoCo over more than 1,000 steps at equal tokens, validated once an epoch.
# Writes docs/long_run.md and docs/long_run.png. Runs that are already done are not repeated.
source "$(dirname "${BASH_SOURCE[0]}")/../lib/common.sh"
