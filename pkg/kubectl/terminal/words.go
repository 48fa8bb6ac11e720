package terminal

import (
	"fmt"
	"strings"

	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

// NothingSeen is printed instead of an empty table or map.
const NothingSeen = "No GPUs can be seen."

// Kind is how a row names a device: "mig 3g.40gb", "mps 1/4", "gpu (admin access)".
func Kind(u view.Use) string {
	out := u.Type
	if u.Profile != "" {
		out += " " + u.Profile
	}
	if u.Count > 0 {
		out += fmt.Sprintf(" %d/%d", u.Number+1, u.Count)
	}
	if u.AdminAccess {
		out += " (admin access)"
	}
	if u.Leftover {
		out += " (no longer offered)"
	}
	return out
}

// Memory writes an amount of memory in gibibytes; "" for none.
func Memory(n int64) string {
	if n == 0 {
		return ""
	}
	return Gibibytes(n)
}

// Pods names the users of a claim, with the phases of pods in a wide table.
func Pods(u view.Use, wide bool) string {
	out := u.Users()
	for i, p := range u.Pods {
		if wide && p.Phase != "" {
			out[i] = fmt.Sprintf("%s (%s)", p.Name, p.Phase)
		}
	}
	return strings.Join(out, ",")
}

// Gibibytes writes an amount of memory in gibibytes.
func Gibibytes(n int64) string {
	gib := float64(n) / (1 << 30)
	if gib >= 10 || gib == float64(int64(gib)) {
		return fmt.Sprintf("%dGi", int64(gib))
	}
	return fmt.Sprintf("%.1fGi", gib)
}

// Count writes a number of things: "1 pod", "2 pods".
func Count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// Shown returns a run of a command, with its output, to stand below a help's examples.
func Shown(run string) string {
	return "\n\n  " + strings.ReplaceAll(strings.TrimSpace(run), "\n", "\n  ")
}
