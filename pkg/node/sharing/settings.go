package sharing

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// settingsSeen is what is known of a GPU's settings beside the journal.
type settingsSeen struct {
	// interval is the one that is known to be in effect; recheck: it is to be read again.
	interval string
	recheck  bool
	// unsupported is the reason why the interval can't be set.
	unsupported string
	// server is the GPU's MPS server when the compute mode was last found to be right, or
	// set; othersMode has a message if somebody else has set another mode.
	server     int
	othersMode string
}

// seen needs the lock.
func (m *Manager) seen(uuid gpu.UUID) *settingsSeen {
	if m.gpus[uuid] == nil {
		m.gpus[uuid] = &settingsSeen{}
	}
	return m.gpus[uuid]
}

// settings returns the journal's settings of a GPU. Unreadable ones count as the
// driver's initial values.
func (v *visit) settings(uuid gpu.UUID) holding.Settings {
	if s, ok := v.m.cfg.Journal.Settings(uuid); ok && s.BootID == v.m.cfg.BootID {
		return s
	}
	s := holding.Settings{GPU: uuid, BootID: v.m.cfg.BootID}
	if slices.ContainsFunc(v.m.cfg.Journal.UnreadableSettings(), func(u journal.UnreadableGPU) bool { return u.GPU == uuid }) {
		s.ComputeModeBefore, s.TimeSliceBefore = string(nvml.ComputeDefault), gpu.DefaultTimeSlice
	}
	return s
}

// save writes the settings to the journal, or deletes them if none is changed.
func (v *visit) save(s holding.Settings) error {
	if s.ComputeModeBefore == "" && s.TimeSliceBefore == "" {
		return v.m.cfg.Journal.DeleteSettings(s.GPU)
	}
	return v.m.cfg.Journal.PutSettings(s)
}

// applyMode applies the compute mode that claims need.
func (v *visit) applyMode(ctx context.Context, uuid gpu.UUID) error {
	switch {
	case v.m.cfg.ExclusiveProcess && v.needs.hasWhole(uuid):
		return v.setMode(ctx, uuid)
	case v.settings(uuid).ComputeModeBefore == "":
		v.m.setOthersMode(uuid, "")
		return nil
	case v.needs.keepsSettings(uuid):
		return nil
	default:
		return v.restoreMode(ctx, uuid)
	}
}

// setMode sets the compute mode that admits one process, the daemon's server. While
// the daemon is away it sets the mode that admits none: otherwise a client that
// doesn't find the daemon would be that one process, without limits. A mode that
// somebody else has set stays.
func (v *visit) setMode(ctx context.Context, uuid gpu.UUID) error {
	v.m.mu.Lock()
	server := v.m.server(uuid) // before the mode is read: a later one may come after a reset
	v.m.mu.Unlock()
	mode, err := v.mode(uuid)
	if errors.Is(err, nvml.ErrNotSupported) {
		if v.m.servedAll(uuid) {
			return nil // it was logged
		}
		v.m.sawMode(uuid, server)
		klog.FromContext(ctx).Info("The GPU has no compute modes: processes that aren't clients of its MPS daemon can use it too, without limits", "gpu", uuid)
		return nil
	}
	if err != nil {
		return err
	}
	s, want := v.settings(uuid), nvml.ComputeExclusiveProcess
	if v.m.isClosed(&v.needs, uuid) {
		want = nvml.ComputeProhibited
	}
	if left, err := v.leaveMode(ctx, s, mode); left || err != nil {
		return err
	}
	if err := v.changeMode(ctx, s, mode, want); err != nil {
		return err
	}
	v.m.sawMode(uuid, server)
	return nil
}

// leaveMode reports whether somebody else has set the mode, so that it stays. The
// error says that no MPS server can use the GPU in that mode.
func (v *visit) leaveMode(ctx context.Context, s holding.Settings, mode nvml.ComputeMode) (bool, error) {
	switch {
	case mode == nvml.ComputeProhibited && !s.Closed:
		return true, judgeMode(s.GPU, fmt.Errorf("the compute mode of the GPU is %s, which lets no process use it, and Tessera didn't set that: have whoever did set another (nvidia-smi -i %s -c DEFAULT)", mode, s.GPU))
	case mode == nvml.ComputeExclusiveThread:
		return true, nil
	case mode == nvml.ComputeDefault && s.ComputeModeBefore != "":
		opened, err := v.isOpenedByOthers(ctx, s)
		if !opened || err != nil {
			return false, err
		}
		return true, v.leaveOpen(s)
	}
	return false, nil
}

// isOpenedByOthers reports whether somebody else has set the default mode that was
// just read. A reset of the GPU sets it too, but ends the MPS server.
func (v *visit) isOpenedByOthers(ctx context.Context, s holding.Settings) (bool, error) {
	if s.OpenedByOthers || !v.m.servedAll(s.GPU) {
		return s.OpenedByOthers, nil
	}
	// The last report of the supervisor may be older than the mode.
	if err := v.m.refresh(ctx); err != nil {
		return false, fmt.Errorf("find out who has set the compute mode of the GPU: %w", err)
	}
	return v.m.servedAll(s.GPU), nil
}

// leaveOpen records that somebody else has set the default mode: with the next MPS
// server it would look like a reset of the GPU.
func (v *visit) leaveOpen(s holding.Settings) error {
	if !s.OpenedByOthers {
		s.OpenedByOthers, s.Closed = true, false
		if err := v.save(s); err != nil {
			return err
		}
	}
	v.m.setOthersMode(s.GPU, fmt.Sprintf("somebody has set the compute mode of the GPU to %s while MPS clients use it: processes that aren't clients can use it too, without limits; "+
		"to keep them off again: nvidia-smi -i %s -c EXCLUSIVE_PROCESS", nvml.ComputeDefault, s.GPU))
	return nil
}

// changeMode writes the compute mode to the journal, then sets it.
func (v *visit) changeMode(ctx context.Context, s holding.Settings, mode, want nvml.ComputeMode) error {
	remembered := s
	s.OpenedByOthers = false
	if s.ComputeModeBefore == "" && mode != want {
		s.ComputeModeBefore = string(mode)
	}
	s.Closed = s.Closed || want == nvml.ComputeProhibited
	if s != remembered {
		if err := v.save(s); err != nil {
			return err
		}
	}
	if mode != want {
		v.m.cfg.Steps.Reached("sharing.modeIntended")
		if err := v.writeMode(s.GPU, want); err != nil {
			return judgeMode(s.GPU, err)
		}
		v.m.cfg.Steps.Reached("sharing.modeSet")
		klog.FromContext(ctx).V(2).Info("Compute mode set", "gpu", s.GPU, "mode", want, "before", mode)
	}
	if !s.Closed || want == nvml.ComputeProhibited {
		return nil
	}
	if s.Closed = false; s.ComputeModeBefore == string(want) {
		s.ComputeModeBefore = "" // the original mode
	}
	if err := v.save(s); err != nil {
		return err
	}
	v.m.cfg.Steps.Reached("sharing.modeOpened")
	return nil
}

// mode reads the GPU's compute mode.
func (v *visit) mode(uuid gpu.UUID) (mode nvml.ComputeMode, err error) {
	if v.m.hw == nil {
		return "", gpu.ErrNoDriver
	}
	began := time.Now()
	mode, err = v.m.hw.ComputeMode(uuid)
	v.m.observe("mode", began, err)
	return mode, err
}

// writeMode sets the GPU's compute mode. judgeMode judges its error.
func (v *visit) writeMode(uuid gpu.UUID, mode nvml.ComputeMode) error {
	began := time.Now()
	err := v.m.hw.SetComputeMode(uuid, mode)
	v.m.observe("mode", began, err)
	return err
}

// restoreMode restores the compute mode, unless somebody else has changed it since.
func (v *visit) restoreMode(ctx context.Context, uuid gpu.UUID) error {
	if err := v.m.know(ctx, uuid); err != nil {
		return err // a daemon that no claim needs must end first
	}
	if names := v.unwanted(nil); len(names) > 0 { // their last claim has begun to leave just now
		return fmt.Errorf("MPS daemons that no claim needs still run, and it is tried again after their end: %s", strings.Join(names, ", "))
	}
	v.m.cfg.Steps.Reached("sharing.daemonsGone")
	s := v.settings(uuid)
	mode, err := v.mode(uuid)
	if err != nil && !errors.Is(err, nvml.ErrNotSupported) {
		return err
	}
	ours := mode == nvml.ComputeExclusiveProcess || mode == nvml.ComputeProhibited && s.Closed
	if before := nvml.ComputeMode(s.ComputeModeBefore); ours && mode != before {
		if err := v.writeMode(uuid, before); err != nil {
			return judgeMode(uuid, err)
		}
		v.m.cfg.Steps.Reached("sharing.modeBack")
		klog.FromContext(ctx).V(2).Info("Compute mode put back", "gpu", uuid, "mode", before)
	}
	s.ComputeModeBefore, s.Closed, s.OpenedByOthers = "", false, false
	if err := v.save(s); err != nil {
		return err
	}
	v.m.setOthersMode(uuid, "")
	v.m.cfg.Steps.Reached("sharing.modeForgotten")
	return nil
}

// server is the process id of the MPS server that has the whole GPU, as the
// supervisor says; 0 where none is known. Needs the lock.
func (m *Manager) server(uuid gpu.UUID) int {
	for _, s := range m.watch.found {
		if s.Phase == mps.Running && slices.Contains(s.Devices, uuid) {
			return s.ServerPID
		}
	}
	return 0
}

// sawMode notes that the GPU's compute mode was the one that claims need while it had
// this MPS server.
func (m *Manager) sawMode(uuid gpu.UUID, server int) {
	m.mu.Lock()
	m.seen(uuid).server = server
	m.mu.Unlock()
	m.setOthersMode(uuid, "")
}

// servedAll reports whether the GPU has had the same MPS server since its compute
// mode was seen to be right, and has it now. Then it was not reset, which takes the
// mode away and needs the server to be gone.
func (m *Manager) servedAll(uuid gpu.UUID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.server(uuid)
	return m.watch.current && now != 0 && m.seen(uuid).server == now
}

// setOthersMode records the compute mode that another program has set; empty if
// none has.
func (m *Manager) setOthersMode(uuid gpu.UUID, message string) {
	m.mu.Lock()
	seen := m.seen(uuid)
	same := seen.othersMode == message
	seen.othersMode = message
	m.mu.Unlock()
	if !same {
		m.cfg.ConditionsChanged()
	}
}

// applyTimeSlice applies the interval that claims need. Default means that no claim
// needs an interval: leave it, or restore the original value.
func (v *visit) applyTimeSlice(ctx context.Context, uuid gpu.UUID) error {
	want, known := v.interval(uuid)
	s := v.settings(uuid)
	switch {
	case !known || want == "" && s.TimeSliceBefore == "":
		return nil
	case want == "" && v.needs.keepsSettings(uuid):
		return nil
	case want == "":
		return v.restoreTimeSlice(ctx, uuid)
	default:
		err := v.setSlice(ctx, uuid, want)
		v.m.setUnsupported(uuid, err)
		return err
	}
}

// interval returns the interval that claims need of the GPU, "" for the default;
// known is false before policies have been read.
func (v *visit) interval(uuid gpu.UUID) (want string, known bool) {
	want = v.needs.timeSlices[uuid]
	if want == "" && v.needs.replicas[uuid] {
		v.m.mu.Lock()
		defer v.m.mu.Unlock()
		if v.m.intervals == nil {
			return "", false
		}
		want = v.m.intervals[uuid]
	}
	if want == gpu.DefaultTimeSlice {
		want = ""
	}
	return want, true
}
