#!/bin/sh
# Twenty requests at four a second, and a report to look at. Usage: load_test.sh [REPORT.html]
set -eu
report=${1:-report.html}
laps-sd loadtest --rate 4 --requests 20 --max-tokens 32 --slo ttft:2000 --json "${report%.html}.json" --html "$report"
echo "open $report"
