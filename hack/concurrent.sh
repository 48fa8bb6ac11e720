#!/usr/bin/env bash
# Lists the packages that the race detector can find something in: those whose
# code or tests start goroutines, use channels or locks. Tests that need a build
# tag don't count. With "not", lists the other packages that have tests.
#
# usage: hack/concurrent.sh [not]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

concurrent='^[[:space:]]*(go (func|[A-Za-z_.]+\()|select \{)|\<chan\>|"sync"|"sync/atomic"|errgroup|\.Go\('

"${GO:-go}" list -f '{{if or .TestGoFiles .XTestGoFiles}}{{$d := .Dir}}{{.ImportPath}}{{range .GoFiles}} {{$d}}/{{.}}{{end}}{{range .CgoFiles}} {{$d}}/{{.}}{{end}}{{range .TestGoFiles}} {{$d}}/{{.}}{{end}}{{range .XTestGoFiles}} {{$d}}/{{.}}{{end}}{{end}}' ./... |
	while read -r package files; do
		found=
		# shellcheck disable=SC2086 # several files
		if grep -qE "$concurrent" $files; then found=yes; fi
		if [ "${1:-}" = not ]; then
			[ -n "$found" ] || echo "$package"
		else
			[ -z "$found" ] || echo "$package"
		fi
	done
