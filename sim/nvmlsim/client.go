package nvmlsim

import (
	"fmt"
	"io"

	"golang.org/x/sys/unix"
)

// clientBytes is the offset of the bytes that sessions lock, one for each GPU
// that they see, far beyond those that Holders lock. As with Holders, the kernel
// unlocks them when a session's process ends.
const clientBytes = 1 << 41

// attach locks the bytes of the session's GPUs from the first Init on.
func (m *Machine) attach() error {
	m.initMu.Lock()
	defer m.initMu.Unlock()
	m.inits++
	if m.inits > 1 {
		return nil
	}
	return m.lockGPUs(unix.F_RDLCK)
}

// Shutdown is nvmlShutdown: Uninitialized if it was called as often as Init.
func (m *Machine) Shutdown() error {
	m.initMu.Lock()
	defer m.initMu.Unlock()
	if m.inits == 0 {
		return Uninitialized
	}
	m.inits--
	if m.inits > 0 {
		return nil
	}
	return m.lockGPUs(unix.F_UNLCK)
}

// detach ends the session as a client of its GPUs. Closing the state file doesn't: it
// stays open, and locked, as long as its header is mapped.
func (m *Machine) detach() error {
	m.initMu.Lock()
	defer m.initMu.Unlock()
	if m.inits == 0 {
		return nil
	}
	m.inits = 0
	return m.lockGPUs(unix.F_UNLCK)
}

func (m *Machine) lockGPUs(kind int16) error {
	if m.store == nil {
		return nil
	}
	for _, g := range m.gpus {
		lock := unix.Flock_t{Type: kind, Whence: io.SeekStart, Start: clientBytes + int64(g.pos), Len: 1}
		if err := unix.FcntlFlock(m.store.file.Fd(), unix.F_OFD_SETLK, &lock); err != nil {
			return fmt.Errorf("lock or unlock GPU %d in %s: %w", g.pos, m.store.Path(), err)
		}
	}
	return nil
}

// otherClients reports whether another session has initialized NVML and sees the
// GPU.
func (g *GPU) otherClients() bool {
	if g.m.store == nil {
		return false
	}
	lock := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart, Start: clientBytes + int64(g.pos), Len: 1}
	err := unix.FcntlFlock(g.m.store.file.Fd(), unix.F_OFD_GETLK, &lock)
	return err != nil || lock.Type != unix.F_UNLCK
}

// ResetIdle is "nvidia-smi --gpu-reset" of this GPU: Reset, but InUse also while another
// session has initialized NVML and sees the GPU, such as that of a monitor. It is
// NotSupported in a guest, whose hypervisor doesn't let it, and before Ampere for a
// GPU with NVLinks, which could only be reset together with the GPUs at their other
// ends.
func (g *GPU) ResetIdle() error {
	board, _ := g.board()
	linked := g.id.NVLink != "" && g.id.NVLink != nvlinkNone && len(board) > 1
	switch {
	case g.m.description.Virtualization == "passthrough", linked && g.model.ArchitectureType() < architectureAmpere:
		return NotSupported
	case g.otherClients():
		return InUse
	}
	return g.Reset()
}
