# shellcheck shell=bash
# Sourced by the scripts beside it.
# refused runs a command that must fail with a message that has REASON.
refused() { # REASON COMMAND...
	local reason=$1 message
	shift
	if message=$("$@" 2>&1); then
		echo "not refused: $*" >&2
		return 1
	fi
	grep -F "$reason" <<<"$message" || { echo "refused, and not by \"$reason\": $message" >&2; return 1; }
}

# in_force waits until refused succeeds: admission policies are in force some moments after they have
# been created. It fails after a minute.
in_force() { # REASON COMMAND...
	for _ in {1..300}; do
		refused "$@" 2>/dev/null && return
		sleep 0.2
	done
	refused "$@"
}
