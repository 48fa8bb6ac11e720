package supervisor

import (
	"context"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"

	"github.com/tessera-dra/tessera/pkg/mps"
)

// limits sets what holds for servers that start from now on, and has one start
// unless one is there.
func (d *driver) limits(ctx context.Context, want mps.Daemon, at place) error {
	out, err := d.command(ctx, at, append(defaults(want), "start_server -uid 0")...)
	if err != nil {
		return err
	}
	return checkLimits(want, out)
}

// change sets the limits of a daemon whose server may run already.
func (d *driver) change(ctx context.Context, want mps.Daemon, at place) error {
	out, err := d.command(ctx, at, append(defaults(want), "get_server_list")...)
	if err != nil {
		return err
	}
	if err := checkLimits(want, out); err != nil {
		return err
	}
	for _, pid := range parseServers(out) {
		out, err := d.command(ctx, at, ofServer(want, pid)...)
		if err != nil {
			return err
		}
		if err := checkLimits(want, out); err != nil {
			return fmt.Errorf("server %d: %w", pid, err)
		}
	}
	return nil
}

// defaults are the commands that set the limits and ask for them again.
func defaults(want mps.Daemon) []string {
	commands := []string{fmt.Sprintf("set_default_active_thread_percentage %d", want.Threads())}
	for i, limit := range memory(want) {
		commands = append(commands, fmt.Sprintf("set_default_device_pinned_mem_limit %d %dM", i, limit),
			fmt.Sprintf("get_default_device_pinned_mem_limit %d", i))
	}
	return commands
}

// memory returns a limit for each device that has one or had one.
func memory(want mps.Daemon) []int64 {
	limits := make([]int64, len(want.MemoryMiB))
	for i, limit := range want.MemoryMiB {
		if limits[i] = limit; limit == 0 {
			limits[i] = mps.MaxMemoryMiB
		}
	}
	return limits
}

var (
	percentagePattern = regexp.MustCompile(`^\d+\.\d+$`)
	memoryPattern     = regexp.MustCompile(`^(\d+)([KMGT])B?$`)
	serverPattern     = regexp.MustCompile(`^\d+$`)
)

// checkLimits compares the daemon's reported limits with the wanted ones,
// because it ignores some invalid values silently. It reports a memory limit in
// the largest unit that gives at least 1, rounded down: 71513M is "69G".
func checkLimits(want mps.Daemon, out string) error {
	threads := -1.0
	var limits []memoryLimit
	for line := range strings.Lines(out) {
		line = strings.TrimSpace(line)
		if percentagePattern.MatchString(line) {
			threads, _ = strconv.ParseFloat(line, 64)
		}
		if m := memoryPattern.FindStringSubmatch(line); m != nil {
			n, _ := strconv.ParseInt(m[1], 10, 64)
			limits = append(limits, memoryLimit{n, m[2]})
		}
	}
	asked := memory(want)
	ok := math.Abs(threads-float64(want.Threads())) < 0.5 && len(limits) == len(asked)
	for i := 0; ok && i < len(asked); i++ {
		ok = limits[i].says(asked[i])
	}
	if !ok {
		return fmt.Errorf("the MPS control daemon didn't take the limits (%d %% of the threads, %v MiB); it answered %q", want.Threads(), asked, out)
	}
	return nil
}

// memoryLimit is how the daemon says one.
type memoryLimit struct {
	n    int64
	unit string
}

// says whether this may be how the daemon says so many MiB.
func (l memoryLimit) says(mib int64) bool {
	switch l.unit {
	case "K":
		return l.n == mib*1024
	case "G":
		return l.n == mib>>10
	case "T":
		return l.n == mib>>20
	default:
		return l.n == mib
	}
}
