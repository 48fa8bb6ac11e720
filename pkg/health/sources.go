package health

import (
	"slices"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// findings returns the reports of the sources.
func (r Reading) findings() []finding {
	var all []finding
	for _, c := range r.Conditions {
		all = append(all, finding{t: c.Type, source: FromReading, clause: c.Message})
	}
	for _, d := range r.DaemonFaults {
		if r.At.Sub(d.Since) >= daemonFailsAfter {
			all = append(all, finding{t: gpu.MPSDaemonFailed, source: FromMPSDaemon, clause: d.Message})
		}
	}
	if r.Vitals == nil {
		return all
	}
	return append(all, findingsOf(*r.Vitals)...)
}

// findingsOf returns the reports of the sources among the vitals.
func findingsOf(v gpu.Vitals) []finding {
	var all []finding
	if f, ok := fromRecovery(v.Recovery); ok {
		all = append(all, f)
	}
	if m := v.RowRemap; m != nil && m.Failed {
		all = append(all, finding{t: gpu.RowRemapFailed, source: FromRowRemap, clause: "a faulty row of GPU memory could not be replaced; run NVIDIA's field diagnostics"})
	}
	if m := v.RowRemap; m != nil && m.Pending {
		all = append(all, finding{t: gpu.RowRemapPending, source: FromRowRemap, clause: "a faulty row of GPU memory is replaced at the next reset of the GPU"})
	}
	if e := v.SRAMThresholdExceeded; e != nil && *e {
		all = append(all, finding{t: gpu.NeedsInspection, source: FromSRAM, clause: "more uncorrectable errors of SRAM than NVIDIA accepts; have the GPU replaced"})
	}
	if len(v.NVLinksDown) > 0 {
		all = append(all, finding{t: gpu.NVLinkDown, source: FromNVLink, clause: "these NVLinks, which were active, are down: ", links: union(nil, v.NVLinksDown)})
	}
	return all
}

// namesNoRecovery reports whether the catalog of XIDs decides: the driver has no recovery
// actions, or the GPU is lost.
func (r Reading) namesNoRecovery() bool {
	isLost := slices.ContainsFunc(r.Conditions, func(c gpu.Condition) bool { return c.Type == gpu.Lost })
	return isLost || r.Vitals != nil && r.Vitals.Recovery == gpu.RecoveryUnsupported
}

// fromRecovery returns the finding for a recovery action, and false for none.
func fromRecovery(a gpu.RecoveryAction) (finding, bool) {
	t, what := recovery(a)
	return finding{t: t, source: FromRecoveryAction, clause: what}, t != ""
}

// recovery returns the condition and its message for a recovery action; empty for
// none.
func recovery(a gpu.RecoveryAction) (gpu.ConditionType, string) {
	switch a {
	case gpu.RecoveryReset:
		return gpu.ResetRequired, "the driver asks for a reset of the GPU"
	case gpu.RecoveryDrainAndReset:
		return gpu.ResetRequired, "the driver asks to end all programs on the GPU and then to reset it"
	case gpu.RecoveryBusReset:
		return gpu.BusResetRequired, "the driver asks for a reset of the GPU's PCIe bus"
	case gpu.RecoveryReboot, gpu.RecoverySystemReboot:
		return gpu.RebootRequired, "the driver asks for a reboot of the node"
	case gpu.RecoveryDrainP2P:
		return gpu.PeersMustDrain, "the driver asks to end all programs that use the GPU from other GPUs"
	case gpu.RecoveryIMEX:
		return gpu.IMEXRecoveryRequired, "the driver asks to recover the node's IMEX domain"
	case gpu.RecoveryOther:
		return gpu.NeedsInspection, "the driver asks for a recovery that this version doesn't know"
	case gpu.RecoveryUnsupported, gpu.RecoveryNotRead, gpu.RecoveryNone:
		return "", ""
	default:
		return recovery(gpu.RecoveryOther)
	}
}

// advice returns the remedy after the XID, as a clause: for an error of the GPU that
// of the driver, and that of the catalog where the driver names none.
func advice(e Entry, a gpu.RecoveryAction) string {
	if e.Condition == "" {
		return e.Advice
	}
	switch _, what := recovery(a); {
	case a == gpu.RecoveryNone:
		return "the driver asks for no recovery of the GPU"
	case what == "" || a == gpu.RecoveryOther:
		return e.Advice
	default:
		return what
	}
}

// unreported returns the cause after a reading in which its source didn't report it.
// If all sources agree that it is over, goneAt is set.
func (c Cause) unreported(r Reading) Cause {
	switch {
	case len(r.Conditions) > 0 || r.Vitals == nil || !c.over(r):
		c.goneAt = time.Time{}
	case c.goneAt.IsZero() || r.At.Before(c.goneAt): // the clock may be set back
		c.goneAt = r.At
	}
	return c
}

// over reports whether the reading, which doesn't report the cause, has evidence that
// it is over.
func (c Cause) over(r Reading) bool {
	if r.Load.Since(c.Load) && c.endsByLoad() {
		return true
	}
	switch v := r.Vitals; c.Source {
	case FromRecoveryAction:
		return v.Recovery != gpu.RecoveryUnsupported
	case FromXID:
		return v.Recovery == gpu.RecoveryNone
	case FromRowRemap:
		return v.RowRemap != nil
	case FromNVLink: // a plugin that has started again doesn't know of links that are down
		return !slices.ContainsFunc(c.Links, func(link int) bool { return !slices.Contains(v.NVLinksUp, link) })
	case FromSRAM:
		return v.SRAMThresholdExceeded != nil
	case FromReading:
		return true
	case FromMPSDaemon:
		return r.daemonsServe()
	case FromPrepare, FromRecord: // no reading says anything of it
		return false
	default: // of a newer version
		return false
	}
}

// daemonsServe reports whether all MPS daemons of the GPU are known to serve.
func (r Reading) daemonsServe() bool { return r.DaemonsKnown && len(r.DaemonFaults) == 0 }

// endsByLoad reports whether the cause is over once the driver was loaded again,
// unless its source reports it again. It isn't if the reason outlives that, and the
// driver may say nothing about it for another reason: about rows while the GPU has
// partitions.
func (c Cause) endsByLoad() bool {
	return c.Source != FromReading && c.Source != FromSRAM && c.Type != gpu.RowRemapFailed
}

// mayRecur reports whether the next reading may report the cause again.
func (c Cause) mayRecur() bool {
	switch c.Source {
	case FromRecoveryAction, FromRowRemap, FromSRAM, FromNVLink, FromReading, FromMPSDaemon:
		return true
	case FromXID, FromPrepare, FromRecord:
		return false
	default: // of a newer version, which may still report it
		return true
	}
}
