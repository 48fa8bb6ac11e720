//go:build e2e

package e2e

import (
	"context"
	"errors"
	"path/filepath"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
	"github.com/tessera-dra/tessera/test/stack"
)

// component stops or starts a program of Kubernetes. One that waits for its clients when it
// is stopped, as the API server does, is killed.
func component(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	if neg || len(args) != 3 {
		ts.Fatalf("usage: component stop|start|restart MACHINE COMPONENT")
	}
	ctx, machine, name := context.Background(), args[1], args[2]
	if args[0] != "start" {
		kill := time.AfterFunc(2*time.Second, func() { _ = s.Cluster.Kill(machine, name) })
		ts.Check(s.Cluster.Stop(ctx, machine, name))
		kill.Stop()
	}
	if args[0] != "stop" {
		ts.Check(s.Cluster.Start(ctx, machine, name))
	}
}

// power switches a machine off, or on again. Its simulated GPUs lose what they lose at a reboot.
// The boot ID stays that of the host.
func power(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	switch {
	case neg || len(args) != 2:
		ts.Fatalf("usage: power off|on MACHINE")
	case args[0] == "off":
		ts.Check(s.Cluster.PowerOff(context.Background(), args[1]))
		ts.Check(rebootGPUs(s, args[1]))
	default:
		ts.Check(s.Cluster.PowerOn(context.Background()))
	}
}

// rebootGPUs reboots the simulated GPUs of a machine that is off, if it has any.
func rebootGPUs(s *stack.Stack, machine string) error {
	m, err := nvmlsim.Open(filepath.Join(s.Cluster.NodeDir(machine), s.DriverRoot, nvmlsim.StateFile))
	if errors.Is(err, nvmlsim.ErrNoState) {
		return nil
	}
	if err != nil {
		return err
	}
	return errors.Join(m.Reboot(), m.Close())
}

// userspace ends all processes and mounts of a node under the same boot, or starts them again
// with an empty /run and /tmp. Talos restarts pods, kubelet and runtime in this way. The state of
// the simulated GPUs, which is on a disk, is the same afterwards.
func userspace(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	switch {
	case neg || len(args) != 2 || args[0] != "stop" && args[0] != "start":
		ts.Fatalf("usage: userspace stop|start NODE")
	case args[0] == "stop":
		ts.Check(s.Cluster.PowerOff(context.Background(), args[1]))
	default:
		ts.Check(s.Cluster.PowerOn(context.Background()))
	}
}

// etcd makes etcd's disk slow, until the end of the story.
func etcd(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: etcd DURATION")
	}
	delay, err := time.ParseDuration(args[0])
	ts.Check(err)
	ts.Check(s.Cluster.SlowEtcd(context.Background(), delay))
	ts.Defer(func() { ts.Check(s.Cluster.SlowEtcd(context.Background(), 0)) })
}

// certificates renews the API server's certificate, announces another authority, or replaces
// the certificate by one of that authority.
func certificates(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	do := map[string]func(context.Context) error{
		"renew": s.Cluster.RenewCertificate, "announce": s.Cluster.AnnounceAuthority, "replace": s.Cluster.UseAuthority,
	}
	if neg || len(args) != 1 || do[args[0]] == nil {
		ts.Fatalf("usage: certificates renew|announce|replace")
	}
	ts.Check(do[args[0]](context.Background()))
	ts.Check(s.Reconnect())
}
