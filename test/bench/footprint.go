package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/tessera-dra/tessera/test/stack"
)

// memory reads how much of each part is resident, on the node where it is more.
func (b *bench) memory(context.Context) error {
	for name, program := range map[string]string{"plugin_rss_mib": "kubelet-plugin", "controller_rss_mib": "controller", "supervisor_rss_mib": "mps-supervisor"} {
		mib, err := rss(program)
		if err != nil {
			return err
		}
		b.figure(name, mib)
	}
	return nil
}

func rss(program string) (float64, error) {
	processes, err := findCommands(func(args []string) bool { return args[0] == "/usr/bin/"+program })
	if err != nil {
		return 0, fmt.Errorf("read memory of %s: %w", program, err)
	}
	most := 0.0
	for _, process := range processes {
		mib, err := resident(process)
		if err != nil {
			return 0, fmt.Errorf("read memory of %s: %w", program, err)
		}
		most = max(most, mib)
	}
	return most, nil
}

// resident returns the MiB that a process, a directory of /proc, has in memory.
func resident(process string) (float64, error) { return statusMiB(process, "VmRSS") }

// statusMiB returns a size from a process's status, in MiB.
func statusMiB(process, field string) (float64, error) {
	status, err := os.ReadFile(filepath.Join(process, "status"))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(status)) {
		if kib, ok := strings.CutPrefix(line, field+":"); ok {
			n, err := strconv.ParseFloat(strings.Fields(kib)[0], 64)
			return n / 1024, err
		}
	}
	return 0, fmt.Errorf("no %s in %s/status", field, process)
}

// writesPerClaim counts the driver's API writes over the lives of pods with
// one claim each.
func (b *bench) writesPerClaim(ctx context.Context) error {
	const n = 10
	before, err := writes(b.stack.Cluster.AuditLog())
	if err != nil {
		return err
	}
	for i := range n {
		name := fmt.Sprintf("writes-%d", i)
		if _, err := startPod(ctx, b.stack.Kube(), newPod(name, stack.TestImage, b.node, fromTemplate())); err != nil {
			return err
		}
		if err := deletePod(ctx, b.stack.Kube(), name); err != nil {
			return err
		}
	}
	after, err := writes(b.stack.Cluster.AuditLog())
	if err != nil {
		return err
	}
	b.figure("api_writes_per_claim", float64(after-before)/n)
	return nil
}

// writesIdle counts the driver's API writes while nothing happens on the
// cluster. Measurements of another cluster run at the same time.
func (b *bench) writesIdle(ctx context.Context) error {
	if b.idle == 0 {
		return nil
	}
	b.progress("watching the idle cluster for %v", b.idle)
	before, err := writes(b.stack.Cluster.AuditLog())
	if err != nil {
		return err
	}
	over := time.After(b.idle)
	if b.only == "" {
		if err := b.schedule(ctx); err != nil {
			return err
		}
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-over:
	}
	after, err := writes(b.stack.Cluster.AuditLog())
	if err != nil {
		return err
	}
	b.figure(fmt.Sprintf("api_writes_idle_%.0fmin", b.idle.Minutes()), float64(after-before))
	return nil
}
