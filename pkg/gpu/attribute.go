package gpu

import (
	"fmt"
	"strconv"
	"strings"
)

// Values of the attributes memoryEnforcement and computeEnforcement of devices.
const (
	EnforcementHardware   = "hardware"
	EnforcementPerProcess = "perProcess"
	EnforcementCeiling    = "ceiling"
	EnforcementNone       = "none"
)

// SemanticVersion writes a dotted version of up to three numbers as the semantic
// version that attributes must have: "580.159.04" is "580.159.4", "13.0" is "13.0.0".
// It returns false for anything else.
func SemanticVersion(s string) (string, bool) {
	parts := strings.Split(s, ".")
	if len(parts) > 3 {
		return "", false
	}
	var numbers [3]uint64
	for i, p := range parts {
		n, err := strconv.ParseUint(p, 10, 32)
		if err != nil {
			return "", false
		}
		numbers[i] = n
	}
	return fmt.Sprintf("%d.%d.%d", numbers[0], numbers[1], numbers[2]), true
}
