#!/usr/bin/env bash
# Checks the messages of commits: a subject of at most 72 characters that says
# what the commit does ("Adopt running daemons", "mps: Adopt running daemons"),
# then an empty line and a body that says why. Merges are left out.
#
# usage: hack/commits.sh [BASE]
#
# It checks the commits after BASE. Without BASE, on a branch, those that aren't
# on main; on main, or where main isn't in the clone, the last one. Commits made
# before the rule was are history.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

began=2026-11-22T00:00:00Z

base_of_branch() {
	local main
	for main in main origin/main; do
		git rev-parse -q --verify "$main^{commit}" >/dev/null || continue
		if [ "$(git rev-parse "$main")" != "$(git rev-parse HEAD)" ]; then
			git merge-base "$main" HEAD && return
		fi
	done
	return 1
}

if [ $# -gt 0 ]; then
	range=("$1..HEAD")
elif base=$(base_of_branch); then
	range=("$base..HEAD")
else
	range=(-1 HEAD)
fi

# Words that look like a past tense, a gerund or a third person, and are none.
imperative='^(embed|feed|need|shed|speed|seed|exceed|proceed|bring|string|ring|ping|[a-z]*ss|focus|bias|canvas|alias)$'

# wrong prints what is wrong with a commit's message.
wrong() { # SUBJECT SECOND-LINE BODY
	local said=${1#*: } first
	first=${said%%[ ,]*}
	first=${first,,}
	[ ${#1} -le 72 ] || echo "its subject has ${#1} characters, 72 are allowed"
	[[ $1 != *. ]] || echo "its subject ends with a full stop"
	[[ $1 == *": "* || $1 == [A-Z]* ]] || echo "its subject starts neither with a capital letter nor with a package and a colon"
	if [[ $first =~ (ed|ing|s)$ && ! $first =~ $imperative ]]; then
		echo "its subject starts with \"$first\": write what the commit does, as in \"Add\" or \"Fix\""
	fi
	[ -z "$2" ] || echo "its second line isn't empty"
	[[ $3 =~ [^[:space:]] ]] || echo "it has no body that says why"
}

commits=$(git rev-list --no-merges --since="$began" "${range[@]}")
rc=0
for commit in $commits; do
	message=$(git log -1 --format=%B "$commit")
	said=$(wrong "$(sed -n 1p <<<"$message")" "$(sed -n 2p <<<"$message")" "$(sed 1,2d <<<"$message")")
	if [ -n "$said" ]; then
		git log -1 --format='%h %s' "$commit"
		sed 's/^/    /' <<<"$said"
		rc=1
	fi
done
exit $rc
