package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/handover"
	"github.com/tessera-dra/tessera/pkg/node/kubelet"
)

const (
	// refuseFirst is how long a plugin is refused that took over and ended before this one
	// did. It doubles with each failure, up to refuseLongest, and is refuseFirst again after
	// twice refuseLongest without one.
	refuseFirst   = 30 * time.Second
	refuseLongest = 5 * time.Minute
)

func newFailures() *flowcontrol.Backoff { return flowcontrol.NewBackOff(refuseFirst, refuseLongest) }

// refuses returns why the plugin that acts doesn't hand the node over on a request, nil if it
// does: it couldn't be reached then, it is resetting a GPU, or the other plugin couldn't
// register, has failed, or is the one that handed over to this one.
func (p *program) refuses(plugin *plugin, r handover.Request) error {
	t, id := plugin.tenure, string(r.PodUID)
	known, _ := plugin.facts.State()
	own := kubelet.ServiceSocket(p.cfg.KubeletRoot, gpu.DriverName, r.PodUID)
	switch {
	case t.inGrace() && known.Registered.IsZero():
		return errors.New("this plugin has just taken the node back from another that ended, and the kubelet hasn't registered it yet")
	case plugin.driver.IsResetting():
		return errors.New("this plugin is resetting a GPU")
	case known.DRADriver != "":
		return fmt.Errorf("a plugin that takes over couldn't register with the kubelet: %s", known.DRADriver)
	case known.DevicePlugin != "" && !r.BesideDevicePlugin:
		return fmt.Errorf("that plugin is of a release that doesn't register with the kubelet beside a device plugin, so nobody would unprepare claims: %s", known.DevicePlugin)
	case t.tookOver && r.PodUID == t.predecessor:
		return errors.New("that plugin has handed over to this one")
	case p.failed.IsInBackOffSinceUpdate(id, time.Now()):
		return fmt.Errorf("that plugin took over and ended; it may try again %s after that", p.failed.Get(id))
	case r.Service != own:
		return fmt.Errorf("that plugin would serve the kubelet at %s, and this one expects %s: they have different --kubelet-root", r.Service, own)
	}
	return nil
}

// usablePodUID returns the pod's UID, or "" if plugins can't hand over to each other on
// this node: the pod's UID or the kubelet's support is missing. It returns an error if the
// kubelet's version can't be read; the next call tries again.
func (p *program) usablePodUID(ctx context.Context) (types.UID, error) {
	if p.podUID != nil {
		return *p.podUID, nil
	}
	podUID := types.UID(p.cfg.PodUID)
	if podUID != "" {
		ctx, cancel := context.WithTimeout(ctx, serverPatience)
		defer cancel()
		version, err := p.kubeletVersion(ctx)
		if err != nil {
			return "", err
		}
		if err := kubelet.SupportsPodUID(version, p.cfg.KubeletRoot, gpu.DriverName, podUID); err != nil {
			klog.FromContext(ctx).Info("This plugin doesn't take over from a running one, but waits for its end", "node", p.cfg.NodeName, "reason", err.Error())
			podUID = ""
		}
	}
	p.podUID = &podUID
	return podUID, nil
}

func (p *program) kubeletVersion(ctx context.Context) (string, error) {
	nodes, err := p.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, p.cfg.NodeName).String(),
	})
	if err != nil {
		return "", fmt.Errorf("read the Node: %w", err)
	}
	if len(nodes.Items) != 1 {
		return "", fmt.Errorf("the cluster has no Node %s", p.cfg.NodeName)
	}
	return nodes.Items[0].Status.NodeInfo.KubeletVersion, nil
}
