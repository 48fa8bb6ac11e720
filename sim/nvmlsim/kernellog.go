package nvmlsim

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// KernelLogFile is the path of the kernel log under the KernelDir of a driver root: a
// regular file with records in the format of /dev/kmsg. Unlike the device, reading it
// doesn't wait at the end, and nothing is ever removed from it.
const KernelLogFile = "dev/kmsg"

// KernelLog returns the path of the machine's kernel log: KernelLogFile of the
// driver root's KernelDir, and beside a state file elsewhere. It is empty in containers,
// which can't write the log.
func (m *Machine) KernelLog() string {
	if m.store == nil || m.container != "" {
		return ""
	}
	if dir := m.kernelDir(); dir != "" {
		return filepath.Join(dir, KernelLogFile)
	}
	return m.store.Path() + ".kmsg"
}

// kernelDir returns the KernelDir of the machine's driver root, "" if its state
// file is elsewhere.
func (m *Machine) kernelDir() string {
	if m.store == nil || m.container != "" {
		return ""
	}
	root, ok := strings.CutSuffix(m.store.Path(), "/"+StateFile)
	if !ok {
		return ""
	}
	return KernelDir(root + "/")
}

// logXID writes the driver's messages for an XID to the kernel log, as the open
// kernel module formats them (kernel_rc.c).
func (m *Machine) logXID(s *State, gpu int, x XID, texts []string) error {
	where := "PCI:" + strings.TrimSuffix(s.Description.GPUs[gpu].BusID, ".0")
	if x.GPUInstance != nil {
		where += fmt.Sprintf(" GPU-I:%02d", *x.GPUInstance)
	}
	if x.ComputeInstance != nil {
		where += fmt.Sprintf(" GPU-CI:%02d", *x.ComputeInstance)
	}
	for _, text := range texts {
		if err := m.log(s, fmt.Sprintf("NVRM: Xid (%s): %d, %s", where, x.Code, text)); err != nil {
			return err
		}
	}
	return nil
}

// log appends a record to the kernel log. The caller holds the lock of the
// state.
func (m *Machine) log(s *State, text string) error {
	path := m.KernelLog()
	if path == "" {
		return nil
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("write the kernel log: %w", err)
	}
	defer f.Close()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return fmt.Errorf("write the kernel log: read the clock: %w", err)
	}
	const info = 6
	record := fmt.Sprintf("%d,%d,%d,-;%s\n", info, s.KernelLogSeq, now.Nano()/1000, escape(text))
	s.KernelLogSeq++
	if _, err := f.WriteString(record); err != nil {
		return fmt.Errorf("write the kernel log: %w", err)
	}
	return nil
}

// escape writes bytes that aren't printable ASCII as \xNN, as /dev/kmsg does.
func escape(text string) string {
	var b strings.Builder
	for _, c := range []byte(text) {
		if c < ' ' || c >= 127 || c == '\\' {
			fmt.Fprintf(&b, `\x%02x`, c)
			continue
		}
		b.WriteByte(c)
	}
	return b.String()
}

// xidText returns the messages for an XID, without the numbers in front: of 13,
// 31, 43 and 79 as hardware writes them, of others only the process.
func xidText(x XID) []string {
	process := ""
	if x.PID != 0 {
		process = fmt.Sprintf("pid=%d, name=%s, ", x.PID, x.Name)
	}
	switch x.Code {
	case 13:
		return []string{
			"Graphics SM Warp Exception on (GPC 0, TPC 0, SM 0): Misaligned Address",
			process + "Graphics Exception: channel 0x00000003, Class 0000cbc0, Offset 00000000, Data 00000000",
		}
	case 31:
		return []string{process + "channel 0x00000003, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC0 GPCCLIENT_T1_0 faulted @ 0x7f00_00000000. " +
			"Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE"}
	case 79:
		return []string{"GPU has fallen off the bus."}
	}
	return []string{process + "channel 0x00000003"}
}
