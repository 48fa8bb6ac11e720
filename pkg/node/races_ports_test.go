package node

import (
	"cmp"
	"context"
	"path/filepath"
	"runtime"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// live returns if the process is alive; otherwise the goroutine stops here.
func (p *process) live() {
	if p.isDead() {
		<-p.w.over
		runtime.Goexit()
	}
}

// pause takes a time that follows from the history, during which the process may be killed.
func (p *process) pause(key string, most time.Duration) {
	p.live()
	time.Sleep(p.w.pace(key, most))
	p.live()
}

const (
	stepMost = 50 * time.Millisecond
	callMost = 100 * time.Millisecond
)

func (p *process) step(name string) { p.pause("step "+name, stepMost) }

// call is a call of something outside of the process.
func call[T any](p *process, name string, do func() (T, error)) (T, error) {
	p.pause("before "+name, callMost)
	value, err := do()
	p.pause("after "+name, stepMost)
	return value, err
}

func call0(p *process, name string, do func() error) error {
	_, err := call(p, name, func() (struct{}, error) { return struct{}{}, do() })
	return err
}

// hardware is a session of a process.
type hardware struct {
	*nvml.Session
	p *process
}

func (h hardware) MIG(uuid gpu.UUID) (gpu.MIG, error) {
	return call(h.p, "MIG "+string(uuid), func() (gpu.MIG, error) { return h.Session.MIG(uuid) })
}

func (h hardware) CreateInstance(d gpu.Partition) (gpu.Instance, error) {
	return call(h.p, "CreateInstance "+string(d.GPU), func() (gpu.Instance, error) { return h.Session.CreateInstance(d) })
}

func (h hardware) DestroyInstance(uuid gpu.UUID, want gpu.Instance) error {
	return call0(h.p, "DestroyInstance "+string(uuid), func() error { return h.Session.DestroyInstance(uuid, want) })
}

func (h hardware) SetMIGMode(uuid gpu.UUID, on bool) error {
	return call0(h.p, "SetMIGMode "+string(uuid), func() error { return h.Session.SetMIGMode(uuid, on) })
}

func (h hardware) ComputeMode(uuid gpu.UUID) (nvml.ComputeMode, error) {
	return call(h.p, "ComputeMode "+string(uuid), func() (nvml.ComputeMode, error) { return h.Session.ComputeMode(uuid) })
}

func (h hardware) SetComputeMode(uuid gpu.UUID, mode nvml.ComputeMode) error {
	return call0(h.p, "SetComputeMode "+string(uuid), func() error { return h.Session.SetComputeMode(uuid, mode) })
}

func (p *process) smi(ctx context.Context, args ...string) (string, error) {
	return call(p, "nvidia-smi "+args[2], func() (string, error) { return p.w.c.smi(ctx, args...) })
}

// daemons is a process's client of the supervisor.
type daemons struct{ p *process }

func (d daemons) Ensure(ctx context.Context, want mps.Daemon) (mps.State, error) {
	return call(d.p, "ensure "+want.Name, func() (mps.State, error) { return d.p.w.sup.Ensure(ctx, want) })
}

func (d daemons) Stop(ctx context.Context, name string) (mps.Revision, error) {
	return call(d.p, "stop "+name, func() (mps.Revision, error) { return d.p.w.sup.Stop(ctx, name) })
}

func (d daemons) BeginStop(ctx context.Context, name string) (ended bool, revision mps.Revision, err error) {
	err = call0(d.p, "begin to stop "+name, func() (err error) {
		ended, revision, err = d.p.w.sup.BeginStop(ctx, name)
		return err
	})
	return ended, revision, err
}

func (d daemons) Left() ([]string, error) {
	return mps.RunDir(filepath.Dir(d.p.w.c.host.Path(d.p.w.sup.dir))).Names()
}

func (d daemons) Watch(ctx context.Context, f func(mps.Report)) error {
	return call0(d.p, "watch", func() error {
		return d.p.w.sup.Watch(ctx, func(r mps.Report) {
			d.p.pause("report", callMost)
			f(r)
		})
	})
}

// readClaim reads a claim from the API server.
func (p *process) readClaim(ctx context.Context, name string) (*resourceapi.ResourceClaim, error) {
	return call(p, "look "+name, func() (*resourceapi.ResourceClaim, error) {
		if p.w.isServerAway() {
			return nil, errServerAway
		}
		c, err := p.w.read(ctx, name)
		return c, cmp.Or(err, ctx.Err())
	})
}
