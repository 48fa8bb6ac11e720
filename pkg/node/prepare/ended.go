package prepare

import (
	"context"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// reasonInUse is the reason of the warning that a claim can't be unprepared yet.
const reasonInUse = "DevicesStillInUse"

// awaitContainers waits until no process is left of any pod that used the claim. No lock but
// the claim's is held meanwhile.
func (p *Preparer) awaitContainers(ctx context.Context, c kubeletplugin.NamespacedObject, r holding.Record) error {
	_, recorded := p.cfg.Journal.Get(r.ClaimUID)
	switch {
	case !recorded && !p.cfg.Journal.IsUnreadable(r.ClaimUID):
		return nil
	case recorded && (len(held(r)) == 0 || r.BootID != p.cfg.BootID): // admin access holds nothing, and no container survives a boot
		return nil
	case p.allLost(r):
		klog.FromContext(ctx).Info("Not waiting for the end of the claim's containers: its GPUs are lost", "gpus", r.GPUs())
		return nil
	}
	waiting, cancel := withMargin(ctx)
	defer cancel()
	err := p.cfg.Containers.AwaitEnd(waiting, r.ClaimUID, podsOf(r))
	if err == nil {
		return nil
	}
	err = fmt.Errorf("containers that have the claim's devices (%s) still run on this node, so no other claim gets these yet; this is tried again: %w", describeHoldings(r.Holdings), err)
	p.cfg.Warn(c, reasonInUse, err.Error())
	return err
}

// allLost reports whether all GPUs are lost that the record holds something of.
func (p *Preparer) allLost(r holding.Record) bool {
	return len(held(r)) > 0 && !slices.ContainsFunc(r.Holdings, func(g holding.Holding) bool { return !g.Admin && !p.isLost(g.Device) })
}

func (p *Preparer) isLost(name gpu.DeviceName) bool {
	_, facts, _ := p.cfg.Inventory.Device(name) // the error explains the problem
	return slices.ContainsFunc(facts.Conditions, func(c gpu.Condition) bool { return c.Type == gpu.Lost })
}

// podsOf are the pods that the record names.
func podsOf(r holding.Record) []kubeletplugin.NamespacedObject {
	pods := make([]kubeletplugin.NamespacedObject, 0, len(r.Pods))
	for _, pod := range r.Pods {
		pods = append(pods, kubeletplugin.NamespacedObject{
			NamespacedName: types.NamespacedName{Namespace: r.Namespace, Name: pod.Name}, UID: types.UID(pod.UID),
		})
	}
	return pods
}
