package health

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Entry is a line of NVIDIA's XID catalog, with its meaning.
type Entry struct {
	Code uint64
	// Mnemonic is NVIDIA's name, e.g. "ROBUST_CHANNEL_GR_EXCEPTION"; empty for a code
	// that the catalog doesn't have.
	Mnemonic string
	// Resolution is the immediate action in the catalog's words, e.g. "RESTART_APP";
	// empty where the catalog has none.
	Resolution string
	// Description of the error in plain words; empty for the less common codes.
	Description string
	// Advice is a remedy, as a clause: "the program must restart".
	Advice string
	// Condition of the GPU after the XID where the driver names no recovery action;
	// empty if nothing is wrong with the GPU.
	Condition gpu.ConditionType
}

// Resolutions of which the code knows more than the table.
const (
	ignore             = "IGNORE"
	readRecoveryAction = "XID_154"
)

// Lookup returns the catalog's entry for the code. One that the catalog doesn't have
// gets an entry without mnemonic and resolution.
func Lookup(code uint64) Entry {
	i, ok := slices.BinarySearchFunc(catalog, code, func(e Entry, code uint64) int { return cmp.Compare(e.Code, code) })
	if !ok {
		e := unlisted
		e.Code = code
		return e
	}
	return catalog[i]
}

// Name returns code and description: "XID 31: GPU memory page fault".
func (e Entry) Name() string {
	return fmt.Sprintf("XID %d: %s", e.Code, cmp.Or(e.Description, e.Mnemonic, "unknown error"))
}

// InProgram reports whether a program's channel had the error, according to the
// mnemonic.
func (e Entry) InProgram() bool { return strings.HasPrefix(e.Mnemonic, "ROBUST_CHANNEL_") }
