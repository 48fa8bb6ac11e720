package mps

import (
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps/mpspb"
)

// ToWire returns the daemon as it is sent.
func ToWire(d Daemon) *mpspb.Daemon {
	w := &mpspb.Daemon{Name: d.Name, ThreadPercentage: int32(d.ThreadPercentage), MemoryMib: d.MemoryMiB}
	for _, uuid := range d.Devices {
		w.Devices = append(w.Devices, string(uuid))
	}
	return w
}

// FromWire is the opposite of ToWire.
func FromWire(w *mpspb.Daemon) Daemon {
	d := Daemon{Name: w.GetName(), ThreadPercentage: int(w.GetThreadPercentage()), MemoryMiB: w.GetMemoryMib()}
	for _, uuid := range w.GetDevices() {
		d.Devices = append(d.Devices, gpu.UUID(uuid))
	}
	return d
}

// StateToWire returns the state as it is sent.
func StateToWire(s State) *mpspb.State {
	return &mpspb.State{
		Daemon: ToWire(s.Daemon), Pid: int32(s.PID), PipeDir: s.PipeDir, ShmDir: s.ShmDir,
		Phase: phaseToWire(s.Phase), Message: s.Message, Restarts: int32(s.Restarts),
		ServerPid: int32(s.ServerPID), Trouble: s.Trouble, Revision: uint64(s.Revision),
	}
}

// StateFromWire is the opposite of StateToWire.
func StateFromWire(w *mpspb.State) State {
	return State{
		Daemon: FromWire(w.GetDaemon()), PID: int(w.GetPid()), PipeDir: w.GetPipeDir(), ShmDir: w.GetShmDir(),
		Phase: phaseFromWire(w.GetPhase()), Message: w.GetMessage(), Restarts: int(w.GetRestarts()),
		ServerPID: int(w.GetServerPid()), Trouble: w.GetTrouble(), Revision: Revision(w.GetRevision()),
	}
}

// ReportToWire returns the report as it is sent.
func ReportToWire(r Report) *mpspb.States {
	w := &mpspb.States{Revision: uint64(r.Revision)}
	for _, s := range r.Daemons {
		w.States = append(w.States, StateToWire(s))
	}
	return w
}

// ReportFromWire is the opposite of ReportToWire.
func ReportFromWire(w *mpspb.States) Report {
	r := Report{Revision: Revision(w.GetRevision())}
	for _, s := range w.GetStates() {
		r.Daemons = append(r.Daemons, StateFromWire(s))
	}
	return r
}

func phaseToWire(p Phase) mpspb.Phase {
	switch p {
	case Running:
		return mpspb.Phase_PHASE_RUNNING
	case Starting:
		return mpspb.Phase_PHASE_STARTING
	case Failed:
		return mpspb.Phase_PHASE_FAILED
	case Ending:
		return mpspb.Phase_PHASE_ENDING
	default:
		return mpspb.Phase_PHASE_UNSPECIFIED
	}
}

// phaseFromWire returns Starting for a phase that it doesn't know: such a daemon
// can't be used yet.
func phaseFromWire(p mpspb.Phase) Phase {
	switch p {
	case mpspb.Phase_PHASE_RUNNING:
		return Running
	case mpspb.Phase_PHASE_FAILED:
		return Failed
	case mpspb.Phase_PHASE_ENDING:
		return Ending
	default:
		return Starting
	}
}
