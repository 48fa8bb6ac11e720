package mps

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"slices"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Daemon is one MPS control daemon that is wanted.
type Daemon struct {
	// Name of the daemon and its directory, of the characters that device names and
	// UIDs have.
	Name string `json:"name"`
	// Devices that it serves: GPUs, or one MIG device. Their order is the daemon's
	// index.
	Devices []gpu.UUID `json:"devices"`
	// ThreadPercentage is the upper bound of each client, 1 to 100; 0: 100.
	ThreadPercentage int `json:"threadPercentage,omitempty"`
	// MemoryMiB is the upper bound of each client on each device, by index; 0, or
	// none at all: no bound.
	MemoryMiB []int64 `json:"memoryMiB,omitempty"`
}

var (
	namePattern = regexp.MustCompile(`^[0-9a-z][0-9a-z.-]{0,99}$`)
	uuidPattern = regexp.MustCompile(`^(GPU|MIG)-[0-9a-zA-Z/-]{1,100}$`)
)

// MaxMemoryMiB is more memory than any device has. It resets a limit that was
// set earlier; MPS has no command to unset one.
const MaxMemoryMiB = 1 << 24

// ValidateName returns an error if name can't be the name of a daemon.
func ValidateName(name string) error {
	if !namePattern.MatchString(name) {
		return fmt.Errorf("%q can't be an MPS daemon's name", name)
	}
	return nil
}

// Validate returns an error if no supervisor can run the daemon.
func (d Daemon) Validate() error {
	if err := ValidateName(d.Name); err != nil {
		return err
	}
	if len(d.Devices) == 0 {
		return errors.New("an MPS daemon needs a device")
	}
	for i, uuid := range d.Devices {
		if !uuidPattern.MatchString(string(uuid)) || slices.Contains(d.Devices[:i], uuid) {
			return fmt.Errorf("device %d of the MPS daemon: %q is no UUID of a GPU or MIG device, or is there twice", i, uuid)
		}
	}
	return d.validateLimits()
}

func (d Daemon) validateLimits() error {
	if d.ThreadPercentage < 0 || d.ThreadPercentage > 100 {
		return fmt.Errorf("thread percentage %d is not between 0 and 100", d.ThreadPercentage)
	}
	if len(d.MemoryMiB) > len(d.Devices) {
		return fmt.Errorf("%d memory limits for %d devices", len(d.MemoryMiB), len(d.Devices))
	}
	for _, limit := range d.MemoryMiB {
		if limit < 0 || limit > MaxMemoryMiB {
			return fmt.Errorf("memory limit of %d MiB is not between 0 and %d", limit, MaxMemoryMiB)
		}
	}
	return nil
}

// EqualLimits reports whether both daemons have the same limits. A supervisor that has
// lifted a limit keeps a 0 for it.
func EqualLimits(a, b Daemon) bool {
	for i := range max(len(a.MemoryMiB), len(b.MemoryMiB)) {
		if a.memoryMiB(i) != b.memoryMiB(i) {
			return false
		}
	}
	return a.Threads() == b.Threads()
}

// Threads returns the upper bound of each client, in percent.
func (d Daemon) Threads() int { return cmp.Or(d.ThreadPercentage, 100) }

// memoryMiB returns the upper bound of each client on a device; 0: no bound.
func (d Daemon) memoryMiB(device int) int64 {
	if device >= len(d.MemoryMiB) {
		return 0
	}
	return d.MemoryMiB[device]
}

// Phase of a daemon.
type Phase string

const (
	// Running: it takes clients.
	Running Phase = "Running"
	// Starting: it is being started, for the first time or again.
	Starting Phase = "Starting"
	// Failed: it ended and could not be started again yet; it is tried again and
	// again.
	Failed Phase = "Failed"
	// Ending: it is being stopped.
	Ending Phase = "Ending"
)

// Revision orders what a node's supervisor says: it grows with every change of a
// daemon, also over restarts of the supervisor, until the next boot. Zero is unknown:
// the supervisor is of a release without revisions.
type Revision uint64

// Report has all daemons that the supervisor has, ordered by name.
type Report struct {
	// Revision of the supervisor at which these were all.
	Revision Revision
	Daemons  []State
}

// State is a daemon that the supervisor has.
type State struct {
	Daemon

	// Revision of the supervisor at which the daemon was in this state.
	Revision Revision

	// PID of the control daemon, as the host counts; 0 where there is none.
	PID int
	// PipeDir is the host's path of the directory that clients must see as their
	// CUDA_MPS_PIPE_DIRECTORY; they needn't be able to write there. The socket that
	// root needs to change the daemon isn't in it.
	PipeDir string
	// ShmDir is the host's path of the directory to mount as the clients'
	// /dev/shm; empty if they need none.
	ShmDir string
	Phase  Phase
	// Message says why it failed.
	Message string
	// Restarts since it was first wanted.
	Restarts int
	// ServerPID is the daemon's MPS server, which has the GPUs, as the host counts; 0
	// until one is known to serve.
	ServerPID int
	// Trouble says why clients may not be served though the daemon is Running: it
	// doesn't answer, or its server doesn't start. Empty where all is well.
	Trouble string
}
