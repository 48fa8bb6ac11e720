package driver

import (
	"context"
	"fmt"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/driverroot"
)

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
	if m.missing = missingControlNode(dev) != ""; !m.missing || time.Since(m.tried) < modprobeEvery {
		return
	}
	m.tried = time.Now()
	if m.programs == nil || m.programs.root.Path != root.Path || m.programs.root.Library != root.Library {
		m.programs = newPrograms(host, root)
	}
	ctx, cancel := context.WithTimeout(ctx, modprobeWithin)
	defer cancel()
	out, err := m.programs.run(ctx, "nvidia-modprobe", "-u", "-c0")
	still := missingControlNode(dev)
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
