package nvmlsim

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// Holder is a running program that uses GPUs. Its use ends with the program,
// however it ends: each Holder locks a byte of the state file, which the kernel
// then unlocks, and processes of a Holder whose byte is not locked no longer
// count. This works across containers and PID namespaces.
type Holder struct {
	m      *Machine
	number uint64
	lock   *os.File
}

// holderBytes is the offset of the bytes that Holders lock, far beyond the end
// of the file: a byte need not exist to be locked.
const holderBytes = 1 << 40

// Hold creates a Holder that uses nothing yet. It returns NoPermission if the
// state is read-only.
func (m *Machine) Hold() (*Holder, error) {
	h := &Holder{m: m}
	err := m.update(func(s *State) error {
		s.Holders++
		h.number = s.Holders
		return nil
	})
	if err != nil {
		return nil, err
	}
	if h.lock, err = os.Open(m.store.Path()); err != nil {
		return nil, fmt.Errorf("hold GPUs: %w", err)
	}
	lock := unix.Flock_t{Type: unix.F_RDLCK, Start: holderBytes + int64(h.number), Len: 1}
	if err := unix.FcntlFlock(h.lock.Fd(), unix.F_OFD_SETLK, &lock); err != nil {
		return nil, errors.Join(fmt.Errorf("hold GPUs: lock %s: %w", m.store.Path(), err), h.lock.Close())
	}
	return h, nil
}

// held reports whether the Holder with this number still exists.
func (s *Store) held(number uint64) bool {
	lock := unix.Flock_t{Type: unix.F_WRLCK, Start: holderBytes + int64(number), Len: 1}
	err := unix.FcntlFlock(s.file.Fd(), unix.F_OFD_GETLK, &lock)
	return err != nil || lock.Type != unix.F_UNLCK
}

// living returns the processes except those whose Holder has ended.
func (m *Machine) living(all []Process) []Process {
	if m.store == nil || !slices.ContainsFunc(all, func(p Process) bool { return p.Holder != 0 }) {
		return all
	}
	return slices.DeleteFunc(slices.Clone(all), func(p Process) bool { return p.Holder != 0 && !m.store.held(p.Holder) })
}

// Held reports whether any Holder uses a GPU.
func (m *Machine) Held() bool {
	s := m.state()
	return s != nil && slices.ContainsFunc(s.GPUs, func(g GPUState) bool {
		return slices.ContainsFunc(m.living(g.Processes), func(p Process) bool { return p.Holder != 0 })
	})
}

// Use is one process on one CUDA device.
type Use struct {
	On     CUDADevice
	PID    uint32
	Name   string
	Memory uint64
	// Utilization and MPSClient as in Process.
	Utilization uint32
	MPSClient   bool
}

// Set replaces the uses of the Holder. On an error nothing changes: InUse if a
// device's compute mode excludes the Holder, Memory if a device doesn't have
// enough memory.
func (h *Holder) Set(uses []Use) error {
	return h.m.update(func(s *State) error {
		for i := range s.GPUs {
			s.GPUs[i].Processes = slices.DeleteFunc(s.GPUs[i].Processes, func(p Process) bool { return p.Holder == h.number })
		}
		for _, u := range uses {
			if err := u.On.admits(s.GPUs[u.On.GPU.pos], h.number, u.Memory); err != nil {
				return err
			}
			g := &s.GPUs[u.On.GPU.pos]
			g.Processes = append(g.Processes, Process{
				PID: u.PID, Name: u.Name, UsedMemory: u.Memory, Utilization: u.Utilization, MPSClient: u.MPSClient, Holder: h.number,
				GPUInstance: u.On.GPUInstance, ComputeInstance: u.On.ComputeInstance,
			})
		}
		return nil
	})
}

// Close ends the Holder and all its uses.
func (h *Holder) Close() error {
	return errors.Join(h.Set(nil), h.lock.Close())
}
