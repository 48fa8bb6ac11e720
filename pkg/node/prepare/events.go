package prepare

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/tessera-dra/tessera/pkg/claim"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

const (
	// reasonInUse is the reason of the warning that containers still have a claim's devices.
	reasonInUse = "DevicesStillInUse"
	// reasonOneDaemon is the reason of the note that no container can use all devices of a pod.
	reasonOneDaemon = "OneMPSDaemonPerContainer"
	// reasonIneffective is the reason of the note that a part of a claim's configuration has no
	// effect.
	reasonIneffective = "TimeSlicingHasNoEffect"
)

// noteIneffective writes an event about each pod of a claim whose configuration asks for
// time slices on a MIG device.
func (p *Preparer) noteIneffective(r holding.Record, grants []claim.Grant) {
	for _, g := range grants {
		if !g.Ineffective {
			continue
		}
		for _, pod := range r.Pods {
			p.cfg.Events.NotePod(r.Namespace, pod, reasonIneffective, fmt.Sprintf("Request %q of claim %s was given %s: sharing.strategy TimeSlicing in its MigDeviceConfig has no effect, because the length of time slices can't be set on MIG devices; "+
				"leave sharing out, or have the claim's processes run side by side with strategy MPS", g.Request, r.Name, g.Device))
		}
	}
}

// noteDaemons writes an event about each pod of the claim that has devices of several MPS
// daemons or requests, or of one and devices without MPS. A container that names several
// gets the directory and the limits of the last, without an error. It is no warning,
// because the kubelet doesn't say which container names what.
func (p *Preparer) noteDaemons(r holding.Record) {
	for _, pod := range r.Pods {
		together := p.usableTogether(pod)
		if len(together) < 2 {
			continue
		}
		p.cfg.Events.NotePod(r.Namespace, pod, reasonOneDaemon, fmt.Sprintf("A container can use only one of these: %s. It reaches one MPS daemon, with the limits of one request, and through it only the daemon's devices; "+
			"of several that one container names, the last applies. Name one of them in a container's resources.claims", strings.Join(together, "; ")))
	}
}

// usableTogether returns descriptions of the sets of the pod's devices of which one container
// can use all.
func (p *Preparer) usableTogether(pod holding.Pod) []string {
	sets := map[string][]string{}
	for _, r := range p.cfg.Journal.ClaimsOf(pod) {
		if !r.IsOf(p.cfg.BootID) {
			continue
		}
		for _, g := range r.Holdings {
			if g.Admin {
				continue
			}
			set := r.Daemon(g)
			if g.Share != nil { // the limits are those of the request
				set += " " + r.ClaimUID + " " + resourceclaim.BaseRequestRef(g.Request)
			}
			sets[set] = append(sets[set], fmt.Sprintf("%s of claim %s", g.Device, r.Name))
		}
	}
	var described []string
	for _, set := range slices.Sorted(maps.Keys(sets)) {
		described = append(described, strings.Join(sets[set], ", "))
	}
	return described
}
