package node

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
)

// reportDoubleAllocation reports a double allocation, for which the controller stops using
// the node's counters while the API server has this version.
func (p *plugin) reportDoubleAllocation(ctx context.Context, d prepare.DoubleAllocation) error {
	ctx, cancel := context.WithTimeout(ctx, serverPatience)
	defer cancel()
	info, err := discovery.ToServerVersionInterfaceWithContext(p.client.Discovery()).ServerVersionWithContext(ctx)
	if err == nil && info.GitVersion == "" {
		err = errors.New("the server doesn't say it")
	}
	if err != nil {
		return fmt.Errorf("read the API server's version: %w", err)
	}
	message := describeDoubleAllocation(d, info.GitVersion)
	if err := p.reporter.ReportDoubleAllocation(ctx, info.GitVersion, message); err != nil {
		return err
	}
	klog.FromContext(ctx).Error(nil, "The scheduler allocated the same silicon to two claims", "kubernetes", info.GitVersion,
		"refused", klog.KRef(d.Refused.Claim.Namespace, d.Refused.Claim.Name), "refusedDevice", d.Refused.Device,
		"holder", klog.KRef(d.Holder.Claim.Namespace, d.Holder.Claim.Name), "holderDevice", d.Holder.Device)
	p.warnings.OnNode(corev1.EventTypeWarning, v1alpha1.ConditionDoubleAllocation, message)
	return nil
}

// describeDoubleAllocation names both claims with their devices and pods, and the consequence.
func describeDoubleAllocation(d prepare.DoubleAllocation, kubernetes string) string {
	one := func(a prepare.AllocatedDevice) string {
		text := fmt.Sprintf("%s to claim %s/%s", a.Device, a.Claim.Namespace, a.Claim.Name)
		if len(a.Claim.Pods) > 0 {
			text += " of pod " + a.Claim.Pods[0].Name
		}
		return text
	}
	return fmt.Sprintf("A scheduler of the cluster, which seems to be older than the API server, allocated %s, and %s, which the node refuses because they overlap. "+
		"While the API server is Kubernetes %s, nothing of the node that needs shared counters (MIG partitions on demand, whole GPUs beside shares) is offered to other claims.",
		one(d.Holder), one(d.Refused), kubernetes)
}
