package sharing

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// errNoTimeSlices says that this GPU, or its driver, has no intervals to set.
var errNoTimeSlices = errors.New("the length of a time slice can't be set on this GPU with this driver: ask for interval Default, or for none")

// IsUnsupported reports whether an error of Join says that the claim asks for a setting that the
// GPU, or its driver, doesn't have.
func IsUnsupported(err error) bool { return errors.Is(err, errNoTimeSlices) }

// intervalNumber returns nvidia-smi's number of an interval.
func intervalNumber(interval string) (int, bool) {
	switch interval {
	case gpu.DefaultTimeSlice:
		return 0, true
	case "Short":
		return 1, true
	case "Medium":
		return 2, true
	case "Long":
		return 3, true
	default:
		return 0, false
	}
}

// setUnsupported records whether the GPU's interval can be set, by the result of
// setting it. Other errors change nothing.
func (m *Manager) setUnsupported(uuid gpu.UUID, err error) {
	if err != nil && !errors.Is(err, errNoTimeSlices) {
		return
	}
	why := ""
	if err != nil {
		why = err.Error()
	}
	m.mu.Lock()
	seen := m.seen(uuid)
	same := seen.unsupported == why
	seen.unsupported = why
	m.mu.Unlock()
	if !same {
		m.cfg.ConditionsChanged()
	}
}

func (v *visit) setSlice(ctx context.Context, uuid gpu.UUID, want string) error {
	v.m.mu.Lock()
	same, again := v.m.seen(uuid).interval == want, v.m.seen(uuid).recheck
	v.m.mu.Unlock()
	if same && !again {
		return nil
	}
	found, err := v.slice(ctx, uuid)
	if err != nil {
		return err
	}
	v.m.mu.Lock()
	v.m.seen(uuid).recheck = false
	v.m.mu.Unlock()
	if same && found != want && found != gpu.DefaultTimeSlice { // a reset of the GPU leaves the default
		klog.FromContext(ctx).Info("Another program has changed the time slice that claims need; not changing it back", "gpu", uuid, "interval", found, "needed", want)
		return nil
	}
	if found != want {
		s := v.settings(uuid)
		if s.TimeSliceBefore == "" {
			s.TimeSliceBefore = found
			if err := v.save(s); err != nil {
				return err
			}
		}
		v.m.cfg.Steps.Reached("sharing.sliceIntended")
		if err := v.runSetSlice(ctx, uuid, want); err != nil {
			return err
		}
		v.m.cfg.Steps.Reached("sharing.sliceSet")
	}
	v.m.mu.Lock()
	defer v.m.mu.Unlock()
	v.m.seen(uuid).interval = want
	return nil
}

// restoreTimeSlice puts the interval back.
func (v *visit) restoreTimeSlice(ctx context.Context, uuid gpu.UUID) error {
	v.m.mu.Lock()
	v.m.seen(uuid).interval = ""
	v.m.mu.Unlock()
	s := v.settings(uuid)
	found, err := v.slice(ctx, uuid)
	if err != nil && !errors.Is(err, errNoTimeSlices) {
		return err
	}
	if err == nil && found != s.TimeSliceBefore {
		if err := v.runSetSlice(ctx, uuid, s.TimeSliceBefore); err != nil {
			return err
		}
		v.m.cfg.Steps.Reached("sharing.sliceBack")
	}
	s.TimeSliceBefore = ""
	if err := v.save(s); err != nil {
		return err
	}
	v.m.cfg.Steps.Reached("sharing.sliceForgotten")
	return nil
}

// slice reads the GPU's interval.
func (v *visit) slice(ctx context.Context, uuid gpu.UUID) (string, error) {
	if v.m.smi == nil {
		return "", gpu.ErrNoDriver
	}
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	began := time.Now()
	found, err := ReadTimeSlice(ctx, v.m.smi, uuid)
	v.m.observe("timeslice", began, err)
	return found, err
}

func (v *visit) runSetSlice(ctx context.Context, uuid gpu.UUID, interval string) error {
	n, ok := intervalNumber(interval)
	if !ok {
		return fmt.Errorf("there is no time slice %q", interval)
	}
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	began := time.Now()
	out, err := v.m.smi(ctx, "compute-policy", "-i", string(uuid), "--set-timeslice", strconv.Itoa(n))
	err = explainSMI(uuid, out, err)
	v.m.observe("timeslice", began, err)
	if err == nil {
		klog.FromContext(ctx).V(2).Info("Time slice set", "gpu", uuid, "interval", interval)
	}
	return err
}

// ReadTimeSlice asks nvidia-smi for the interval of a GPU's turns: "Default",
// "Short", "Medium" or "Long". The error says so where the GPU has none.
func ReadTimeSlice(ctx context.Context, smi SMI, uuid gpu.UUID) (string, error) {
	out, err := smi(ctx, "compute-policy", "-i", string(uuid), "--list")
	if err != nil {
		return "", explainSMI(uuid, out, err)
	}
	return parseTimeSlice(out)
}

// policyLine is a line of the list of one GPU's compute policies:
// "|   0   Timeslice       Default       |".
var policyLine = regexp.MustCompile(`(?m)^\|\s+\d+\s+Timeslice\s+(\S[^|\n]*?)\s*\|\s*$`)

// parseTimeSlice reads the list of compute policies of one GPU.
func parseTimeSlice(out string) (string, error) {
	lines := policyLine.FindAllStringSubmatch(out, -1)
	if len(lines) != 1 {
		return "", fmt.Errorf("nvidia-smi compute-policy --list has %d time slices, want one: %s", len(lines), driverroot.OneLine(out))
	}
	interval := lines[0][1]
	if _, ok := intervalNumber(interval); !ok {
		return "", fmt.Errorf("%w (nvidia-smi says that it is %q)", errNoTimeSlices, interval)
	}
	return interval, nil
}

// explainSMI returns errNoTimeSlices for a GPU without intervals, and the error and
// output of nvidia-smi for other failures.
func explainSMI(uuid gpu.UUID, out string, err error) error {
	if err == nil {
		return nil
	}
	for _, cannot := range []string{"not supported", "not recognized", "unrecognized", "invalid combination"} {
		if strings.Contains(strings.ToLower(out), cannot) {
			return fmt.Errorf("%w (nvidia-smi compute-policy says: %s)", errNoTimeSlices, driverroot.OneLine(out))
		}
	}
	return fmt.Errorf("nvidia-smi compute-policy -i %s: %w: %s", uuid, err, driverroot.OneLine(out))
}
