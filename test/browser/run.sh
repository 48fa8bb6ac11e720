#!/usr/bin/env bash
# Tests the page of `kubectl gpu web` in Chromium, which is installed by apt if it isn't
# there. With PICTURES, also writes the pictures of docs/user/operate.md to that directory;
# these want the font Inter.
#
# usage: test/browser/run.sh [ARGUMENT OF go test ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

missing=()
command -v chromium >/dev/null || missing+=(chromium)
if [ -n "${PICTURES:-}" ]; then
	PICTURES=$(realpath "$PICTURES")
	dpkg -s fonts-inter >/dev/null 2>&1 || missing+=(fonts-inter)
fi
if [ ${#missing[@]} -gt 0 ]; then
	command -v apt-get >/dev/null || {
		echo "test/browser: install ${missing[*]}" >&2
		exit 1
	}
	echo "installing ${missing[*]}"
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
"${GO:-go}" test -count 1 -v -timeout 10m "$@" . ${PICTURES:+-args -pictures "$PICTURES"}
