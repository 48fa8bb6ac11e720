package journal

import "strings"

// claimDaemonPrefix starts the name of an MPS daemon that is one claim's.
const claimDaemonPrefix = "claim-"

// shareInfix ends what the name of a share has of the name of what is shared.
const shareInfix = "-mps"

// Daemon is the name of the MPS daemon that the grant's processes are clients of:
// that of the GPU or partition that is shared, or one of the claim's own. Empty
// where there is none.
func (r Record) Daemon(g Grant) string {
	switch {
	case g.MPS == nil || g.Admin:
		return ""
	case g.Share == nil:
		return r.OwnDaemonName()
	default:
		return g.SharedDaemonName()
	}
}

// OwnDaemonName is the name that an MPS daemon of the claim's own has.
func (r Record) OwnDaemonName() string { return claimDaemonPrefix + r.ClaimUID }

// SharedDaemonName is the name of the MPS daemon of what the device is a share of,
// by the device's name; empty where it is no share.
func (g Grant) SharedDaemonName() string {
	name := string(g.Device)
	return name[:max(0, strings.LastIndex(name, shareInfix))]
}
