package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/node/datadir"
	"github.com/tessera-dra/tessera/pkg/node/handover"
)

// registerWithin is how long a plugin that has taken over may take until the kubelet has
// registered it. Then it ends, and the plugin before takes the node back.
const registerWithin = 90 * time.Second

const (
	// stopListeningWithin is more than a wait for events takes.
	stopListeningWithin = 2 * time.Second
	// releaseWithin is how long a plugin that hands over may take to end its work. It is more
	// than a change of the hardware takes, and less than the successor waits.
	releaseWithin = 45 * time.Second
)

// takenBackError ends the parts of a plugin that has the data directory back.
type takenBackError struct {
	dir  *datadir.Dir
	from types.UID
}

func (t *takenBackError) Error() string { return "the plugin that took over has ended" }

// handOver hands the node over to the first plugin that asks for it and isn't refused;
// stop ends the parts that use the journal and the hardware. It returns nil when ctx ends,
// takenBackError when the successor has ended, and an error if the parts don't end: then only
// the end of the process releases the node.
func (p *plugin) handOver(ctx context.Context, stop func(context.Context) error) error {
	logger := klog.FromContext(ctx)
	accepted, err := handover.Await(ctx, p.dir.HandoverSocket(), p.refuses)
	if ctx.Err() != nil {
		return nil //nolint:nilerr // the context's end is how it is told to stop
	}
	if err != nil {
		logger.Error(err, "This plugin can't hand over to another, which has to wait for its end", "node", p.cfg.NodeName)
		return nil
	}
	logger.Info("Handing over to another plugin", "node", p.cfg.NodeName, "podUID", accepted.PodUID)
	p.stopListening(ctx)
	began := time.Now()
	if err := p.release(ctx, accepted.Service, stop); err != nil {
		return errors.Join(fmt.Errorf("hand over to another plugin: %w", err), accepted.Close())
	}
	p.onHandedOver()
	give := func(lock *os.File) error { return accepted.Give(p.tenure.podUID, lock) }
	if err := p.dir.HandOver(give); err != nil {
		logger.Error(err, "The other plugin hasn't taken over", "podUID", accepted.PodUID)
	} else {
		logger.Info("Handed over to another plugin, passing the kubelet's calls on to it", "node", p.cfg.NodeName, "podUID", accepted.PodUID, "duration", time.Since(began))
	}
	p.tenure.step("handover.given")
	back, err := datadir.Lock(ctx, p.cfg.DataDir)
	if ctx.Err() != nil {
		if back != nil {
			return back.Close()
		}
		return nil
	}
	if err != nil {
		return err
	}
	p.kubelet.EndForwarding()
	return &takenBackError{dir: back, from: accepted.PodUID}
}

// refuses returns why the plugin doesn't hand over now: the kubelet hasn't registered it
// since it took the node back, it is resetting a GPU, the other plugin couldn't register, or
// the program refuses the request (tenure.refuses).
func (p *plugin) refuses(r handover.Request) error {
	if p.inGrace() && !p.registered.Load() {
		return errors.New("this plugin has just taken the node back from another that ended, and the kubelet hasn't registered it yet")
	}
	if p.driver.IsResetting() {
		return errors.New("this plugin is resetting a GPU")
	}
	switch known, _ := p.facts.State(); {
	case known.DRADriver != "":
		return fmt.Errorf("a plugin that takes over couldn't register with the kubelet: %s", known.DRADriver)
	case known.DevicePlugin != "" && !r.BesideDevicePlugin:
		return fmt.Errorf("that plugin is of a release that doesn't register with the kubelet beside a device plugin, so nobody would unprepare claims: %s", known.DevicePlugin)
	}
	return p.tenure.refuses(r)
}

// inGrace reports whether the plugin took the node back less than registerWithin ago.
func (p *plugin) inGrace() bool { return time.Now().Before(p.tenure.graceUntil) }

// stopListening ends the wait for the driver's events while this plugin still handles the
// kubelet's calls. A successor that has opened the driver ahead sees all later events.
func (p *plugin) stopListening(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, stopListeningWithin)
	defer cancel()
	p.driver.StopListening(ctx)
}

// release ends the work of this plugin in the data directory. The kubelet's calls are passed
// to the service from then on.
func (p *plugin) release(ctx context.Context, service string, stop func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, releaseWithin)
	defer cancel()
	p.driver.HandOver()
	if err := p.kubelet.HandOver(ctx, service); err != nil {
		return err
	}
	p.tenure.step("handover.drained")
	if err := stop(ctx); err != nil {
		return err
	}
	if p.driver.StaysOpen() {
		return errors.New("NVML isn't shut down: a call into the driver doesn't return, and could change the hardware later")
	}
	p.tenure.step("handover.stopped")
	return p.journal.Close()
}

// isRegisteredInTime returns an error if the plugin has taken over and the kubelet
// doesn't register it.
func (p *plugin) isRegisteredInTime(ctx context.Context) error {
	if !p.tenure.tookOver {
		return nil
	}
	select {
	case <-ctx.Done():
		return nil
	case <-time.After(registerWithin):
	}
	if p.registered.Load() {
		return nil
	}
	return fmt.Errorf("the kubelet hasn't registered this plugin within %s: the plugin before takes over again", registerWithin)
}
