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
		Phase: phases()[s.Phase], Message: s.Message, Restarts: int32(s.Restarts),
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

// phases returns each phase as it is sent.
func phases() map[Phase]mpspb.Phase {
	return map[Phase]mpspb.Phase{
		Running:  mpspb.Phase_PHASE_RUNNING,
		Starting: mpspb.Phase_PHASE_STARTING,
		Failed:   mpspb.Phase_PHASE_FAILED,
		Ending:   mpspb.Phase_PHASE_ENDING,
	}
}

// phaseFromWire returns Starting for a phase that it doesn't know: such a daemon
// can't be used yet.
func phaseFromWire(w mpspb.Phase) Phase {
	for p, sent := range phases() {
		if sent == w {
			return p
		}
	}
	return Starting
}
