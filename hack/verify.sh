#!/usr/bin/env bash
# Checks what a machine can check, and changes nothing: what would be rewritten
# is rewritten in a copy and compared. Every check runs; the failed ones are
# named again at the end.
#
# usage: hack/verify.sh [CHECK...]   default: all but language, in the order below
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
PATH="$root/_output/tools:$PATH"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# files lists the repository's own files, committed or about to be.
files() {
	git ls-files -co --exclude-standard -- "$@" | while IFS= read -r f; do
		[ ! -e "$f" ] || printf '%s\n' "$f"
	done
}

# check_generate makes every generated file again in a copy of the tree.
check_generate() {
	local copy=$scratch/copy
	mkdir "$copy"
	files | tar -cf - -T - | tar -xf - -C "$copy"
	cp -r "$copy" "$scratch/before"
	hack/generate.sh "$copy"
	if ! diff -ru "$scratch/before" "$copy"; then
		echo "generated files are not what their sources say: run make generate"
		return 1
	fi
}

check_format() {
	golangci-lint fmt --diff || {
		echo "not formatted: run make format"
		return 1
	}
}

check_lint() { golangci-lint run ./...; }

# check_logcheck is the one that knows contextual logging.
check_logcheck() { logcheck -check-contextual -check-deprecations ./...; }

# check_modules holds every go.mod and go.sum to what its code imports.
check_modules() {
	local mod rc=0
	for mod in $(files '*go.mod'); do
		go -C "$(dirname "$mod")" mod tidy -diff || {
			echo "$mod: run go mod tidy there"
			rc=1
		}
	done
	return $rc
}

check_scripts() {
	local script rc=0
	for script in $(files '*.sh' .ci/run); do
		bash -n "$script" || rc=1
		[ -x "$script" ] || {
			echo "$script: not executable"
			rc=1
		}
	done
	return $rc
}

# check_chart lints the chart and compares what it renders; it builds Helm,
# which takes a few minutes the first time.
check_chart() { go test -count 1 ./deployments/helm/...; }

# check_image builds the image and lists what it has.
check_image() { go test -count 1 -tags image -run TestImage ./deployments/container/contents; }

# check_words keeps out what is only true on one person's machine, and a TODO
# that names no issue.
check_words() {
	local rc=0 here
	here=$(mktemp)
	{
		pwd
		go env GOMODCACHE
		go env GOPROXY | tr ',|' '\n\n' | sed -nE 's|^https?://([^/]+).*|\1|p'
	} >"$here"
	if files | xargs grep -nIF -f "$here"; then
		rc=1
	fi
	rm "$here"
	if files '*.go' '*.sh' '*.yaml' Makefile | grep -v '^hack/verify.sh$' | xargs grep -nE '\bTODO\b' | grep -v 'TODO(#[0-9]'; then
		rc=1
	fi
	return $rc
}

# check_commits checks the messages of the commits that this branch adds to
# main, or of those after $BASE.
check_commits() { hack/commits.sh ${BASE:+"$BASE"}; }

# check_removed wants the commits since this rule to name the tests and stories that they
# removed.
check_removed() { go run ./hack/removedtests --since=2026-11-26T15:00:00Z "${BASE:+$BASE..}HEAD"; }

# check_language keeps out words that a reader has to read twice.
check_language() { files | go run ./hack/language; }

# check_joints counts where the parts of the programs meet.
check_joints() { go run ./hack/joints; }

# check_links follows the relative links of every page.
check_links() {
	local page link rc=0
	for page in $(files '*.md'); do
		while IFS= read -r link; do
			[ -e "$(dirname "$page")/$link" ] || {
				echo "$page: $link is not there"
				rc=1
			}
		done < <(grep -oE '\]\([^)# ]+' "$page" | cut -c3- | grep -v ':' || true)
	done
	return $rc
}

# check_packages wants a package of more than twelve files, tests and generated ones
# aside, to say why it is one.
check_packages() {
	local dir rc=0
	for dir in $(files '*.go' | grep -v '_test\.go$' | xargs grep -LE '^// Code generated ' | sed 's|/[^/]*$||' | sort | uniq -c | awk '$1 > 12 { print $2 }'); do
		go doc "./$dir" | tr -s '\n ' '  ' | grep 'one package' >/dev/null || {
			echo "$dir: it has more than 12 files: say in its comment why it is one package (with these words), or divide it"
			rc=1
		}
	done
	return $rc
}

checks=("$@")
[ ${#checks[@]} -gt 0 ] || checks=(scripts words language links packages commits removed joints format generate modules chart image lint logcheck)

failed=()
for check in "${checks[@]}"; do
	began=$SECONDS
	echo "verify: $check"
	# Not as a condition: there, set -e would not hold inside the check.
	set +e
	(
		set -e
		"check_$check"
	) >"$scratch/$check.log" 2>&1
	rc=$?
	set -e
	if [ $rc -eq 0 ]; then
		echo "verify: $check ok ($((SECONDS - began)) s)"
		[ "$check" != joints ] || sed 's/^/    /' "$scratch/$check.log" # they are to be seen
	else
		sed 's/^/    /' "$scratch/$check.log"
		echo "verify: $check FAILED ($((SECONDS - began)) s)"
		failed+=("$check")
	fi
done

[ ${#failed[@]} -eq 0 ] || {
	echo "verify: failed: ${failed[*]}"
	exit 1
}
echo "verify: ok"
