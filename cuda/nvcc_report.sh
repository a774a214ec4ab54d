# nvcc_report.sh REPORT command...: runs a compiler and keeps what it says in REPORT; shows it where it fails.
report=$1
shift
if ! "$@" >"$report.part" 2>&1; then
  cat "$report.part" >&2
  rm -f "$report" "$report.part"
  exit 1
fi
mv "$report.part" "$report"
