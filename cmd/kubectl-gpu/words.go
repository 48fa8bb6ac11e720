package main

import (
	"fmt"
	"strings"

	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

// nothingSeen is printed instead of an empty table or map.
const nothingSeen = "No GPUs can be seen."

// kind is how a row names a device: "mig 3g.40gb", "mps 1/4", "gpu (admin access)".
func kind(u view.Use) string {
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

func memory(n int64) string {
	if n == 0 {
		return ""
	}
	return gibibytes(n)
}

// pods names the users of a claim, with the phases of pods in a wide table.
func pods(u view.Use, wide bool) string {
	out := u.Users()
	for i, p := range u.Pods {
		if wide && p.Phase != "" {
			out[i] = fmt.Sprintf("%s (%s)", p.Name, p.Phase)
		}
	}
	return strings.Join(out, ",")
}

// gibibytes writes an amount of memory in gibibytes.
func gibibytes(n int64) string {
	gib := float64(n) / (1 << 30)
	if gib >= 10 || gib == float64(int64(gib)) {
		return fmt.Sprintf("%dGi", int64(gib))
	}
	return fmt.Sprintf("%.1fGi", gib)
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
