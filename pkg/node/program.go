package node

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/node/report"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
)

// programs runs programs of the driver. One that hangs in the driver can't be
// killed: run stops waiting for it, and doesn't start it again while it exists.
type programs struct {
	host driverroot.Host
	root driverroot.Root

	mu      sync.Mutex
	running map[string]bool // programs whose caller has stopped waiting, by command line
}

func newPrograms(host driverroot.Host, root driverroot.Root) *programs {
	return &programs{host: host, root: root, running: map[string]bool{}}
}

// killWithin is how long a program may take to die.
const killWithin = time.Second

// errStillRuns says that a program hangs in the driver.
var errStillRuns = errors.New("it was started before, hangs in the driver and can't be killed")

// run runs the program and returns its output.
func (p *programs) run(ctx context.Context, name string, args ...string) (string, error) {
	line := strings.Join(append([]string{name}, args...), " ")
	p.mu.Lock()
	hangs := p.running[line]
	p.mu.Unlock()
	if hangs {
		return "", fmt.Errorf("run %s: %w", line, errStillRuns)
	}
	cmd, err := p.root.Command(ctx, p.host, name, args...)
	if err != nil {
		return "", err
	}
	cmd.WaitDelay = killWithin
	type result struct {
		out []byte
		err error
	}
	ended := make(chan result, 1)
	go func() {
		out, err := cmd.CombinedOutput()
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.running, line)
		ended <- result{out, err}
	}()
	select {
	case r := <-ended:
		return string(r.out), r.err
	case <-ctx.Done():
	}
	select {
	case r := <-ended:
		return string(r.out), r.err
	case <-time.After(2 * killWithin):
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case r := <-ended: // just now
		return string(r.out), r.err
	default:
		p.running[line] = true
		return "", fmt.Errorf("run %s: %w", line, errors.Join(context.Cause(ctx), errStillRuns))
	}
}

// nvidiaSMI runs the driver's nvidia-smi as the host would.
func nvidiaSMI(host driverroot.Host, root driverroot.Root) sharing.SMI {
	p := newPrograms(host, root)
	return func(ctx context.Context, args ...string) (string, error) { return p.run(ctx, "nvidia-smi", args...) }
}

// modules loads the driver's kernel modules that nothing loads at boot on some
// hosts: nvidia-uvm, without which no CUDA program runs.
type modules struct {
	// missing: a device node that all containers need isn't there.
	missing bool
	// tried is when nvidia-modprobe was started last.
	tried    time.Time
	programs *programs
	said     string // the last failure that was logged
}

const (
	// modprobeWithin bounds the loading of a module.
	modprobeWithin = 10 * time.Second
	// modprobeEvery is how often it is tried.
	modprobeEvery = 30 * time.Second
)

// load runs nvidia-modprobe if a device node that all containers need isn't
// there.
func (m *modules) load(ctx context.Context, host driverroot.Host, root driverroot.Root, dev string) {
	if m.missing = report.MissingControlNode(dev) != ""; !m.missing || time.Since(m.tried) < modprobeEvery {
		return
	}
	m.tried = time.Now()
	if m.programs == nil || m.programs.root.Path != root.Path || m.programs.root.Library != root.Library {
		m.programs = newPrograms(host, root)
	}
	ctx, cancel := context.WithTimeout(ctx, modprobeWithin)
	defer cancel()
	out, err := m.programs.run(ctx, "nvidia-modprobe", "-u", "-c0")
	still := report.MissingControlNode(dev)
	m.missing = still != ""
	logger := klog.FromContext(ctx)
	switch {
	case err == nil && !m.missing:
		m.said = ""
		logger.Info("Loaded the driver's kernel modules with nvidia-modprobe")
	case m.said != fmt.Sprint(still, err):
		m.said = fmt.Sprint(still, err)
		logger.Info("A device node is missing and nvidia-modprobe doesn't make it; it is tried again", "node", "/dev/"+still, "output", strings.TrimSpace(out), "err", err)
	}
}
