package holding

import "strings"

// claimDaemonPrefix starts the name of an MPS daemon that is one claim's.
const claimDaemonPrefix = "claim-"

// Daemon is the name of the MPS daemon that the holding's processes are clients of:
// that of the GPU or partition that is shared, or one of the claim's own. Empty
// where there is none.
func (r Record) Daemon(g Holding) string {
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

// IsOwnDaemon reports whether the MPS daemon of that name is a claim's own.
func IsOwnDaemon(name string) bool { return strings.HasPrefix(name, claimDaemonPrefix) }

// SharedDaemonName returns the name of the MPS daemon of the device that is
// shared, derived from the share's name; empty if the device is not a share.
func (g Holding) SharedDaemonName() string { return string(g.Device.SharedDevice()) }
