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
