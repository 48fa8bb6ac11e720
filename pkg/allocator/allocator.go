// Package allocator decides whether the scheduler of a Kubernetes version
// allocates shares safely: older versions allocate the same part of a GPU twice. It also
// decides whether the scheduler allocates devices whose taints have no effect.
//
// Controller and plugin both import it: the controller offers less on such a
// version, and the plugin explains why it refuses a claim.
package allocator

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/util/version"
)

// A device that consumes shared counters and can be allocated several times is
// not charged for them by older allocators: they charge what is allocated once.
// The scheduler then allocates the same silicon again, through another device
// of the same counters.
const (
	// Issue is where Kubernetes tracks it.
	Issue = "kubernetes/kubernetes#139034"
	// Fixed is the first version that charges every device.
	Fixed = "1.36.2"
)

// ChargesShared reports whether the allocator of a version, as the API server's
// /version spells it, charges counters for devices that are allocated several
// times. It is false for a version that can't be parsed.
//
// Pre-releases of the fixed version don't count as fixed, nor do vendors' builds of
// exactly that version, because it isn't known which commit they were built from.
// Pre-releases of 1.37.0 don't either, because the early ones lack the fix.
func ChargesShared(gitVersion string) bool {
	v, err := version.ParseSemantic(gitVersion)
	if err != nil || v.LessThan(version.MustParseSemantic(Fixed)) {
		return false
	}
	if v.Major() == 1 && v.Minor() == 37 && v.Patch() == 0 {
		stage, _, _ := strings.Cut(v.PreRelease(), ".")
		return stage != "alpha" && stage != "beta" && stage != "rc"
	}
	return true
}

// CountsCapacity reports whether all schedulers that may run beside an API server of a
// version are safe with devices that can be allocated several times. That of 1.34
// isn't: it compares a request with the capacity of another device of the slice, and
// crashes if there is none (kubernetes/kubernetes#133705). Kubernetes allows it beside
// an API server of 1.35. Older API servers don't store such devices. It is false for a
// version that can't be parsed.
func CountsCapacity(gitVersion string) bool {
	v, err := version.ParseSemantic(gitVersion)
	return err == nil && (v.Major() != 1 || v.Minor() != 34 && v.Minor() != 35)
}

// HeedsEffectNone reports whether all schedulers that may run beside an API server of a
// version allocate devices with a taint of the effect None. That of 1.34 with the feature
// gate DRADeviceTaints doesn't, and Kubernetes allows it beside an API server of 1.35. Older
// API servers don't store that effect. It is false for a version that can't be parsed.
func HeedsEffectNone(gitVersion string) bool {
	v, err := version.ParseSemantic(gitVersion)
	return err == nil && v.AtLeast(version.MustParseSemantic("1.36.0-alpha.0"))
}

// ExplainCapacity returns the reason and the remedy for a version for which
// CountsCapacity is false, without a full stop.
func ExplainCapacity(gitVersion string) string {
	if _, err := version.ParseSemantic(gitVersion); err != nil {
		return fmt.Sprintf("The scheduler of Kubernetes 1.34 crashes on devices that can be allocated several times (kubernetes/kubernetes#133705), "+
			"and the API server's version, %q, doesn't say whether it may run in this cluster: let the controller read /version", gitVersion)
	}
	return fmt.Sprintf("The scheduler of Kubernetes 1.34, which may run beside an API server of Kubernetes %s, crashes on devices that can be allocated several times "+
		"(kubernetes/kubernetes#133705): upgrade to Kubernetes 1.36 or later", gitVersion)
}

// Explain returns a sentence about a version for which ChargesShared is false: the
// reason and the remedy. The version may be empty.
func Explain(gitVersion string) string {
	if gitVersion == "" {
		gitVersion = "of an unknown version"
	}
	return fmt.Sprintf("Kubernetes %s can allocate the same part of a GPU twice where shares that are allocated several times consume counters (%s); "+
		"Kubernetes %s, 1.37.0 and later are fixed.", gitVersion, Issue, Fixed)
}
