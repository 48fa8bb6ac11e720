// The allocator of KAI Scheduler: Kubernetes' plugin, which says whether a node has the devices
// that a pod claims, and KAI's own, which allocates them then.
package main

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	upstream "k8s.io/kubernetes/pkg/scheduler/framework/plugins/dynamicresources"

	"github.com/NVIDIA/KAI-scheduler/pkg/common/k8s_utils"
	"github.com/NVIDIA/KAI-scheduler/pkg/scheduler/api/common_info"
	"github.com/NVIDIA/KAI-scheduler/pkg/scheduler/api/node_info"
	"github.com/NVIDIA/KAI-scheduler/pkg/scheduler/api/pod_affinity"
	"github.com/NVIDIA/KAI-scheduler/pkg/scheduler/api/pod_info"
	"github.com/NVIDIA/KAI-scheduler/pkg/scheduler/api/podgroup_info"
	"github.com/NVIDIA/KAI-scheduler/pkg/scheduler/cache"
	kai "github.com/NVIDIA/KAI-scheduler/pkg/scheduler/framework"
	k8splugins "github.com/NVIDIA/KAI-scheduler/pkg/scheduler/k8s_internal/plugins"
	"github.com/NVIDIA/KAI-scheduler/pkg/scheduler/plugins/dynamicresources"

	"github.com/tessera-dra/tessera/test/allocators/others/handle"
)

func main() {
	handle.Main(func(h *handle.Handle) (func(context.Context) error, error) {
		p, err := upstream.New(context.Background(), &config.DynamicResourcesArgs{}, h, k8s_utils.GetK8sFeatures())
		if err != nil {
			return nil, err
		}
		filter := p.(*upstream.DynamicResources)
		allocator := dynamicresources.New(nil)
		return func(ctx context.Context) error {
			if err := h.Filter(ctx, framework.NewCycleState(), filter, filter); err != nil {
				return err
			}
			task := pod_info.NewTaskInfo(h.Pod)
			session := &kai.Session{
				Cache:         clusterOf{h: h},
				Nodes:         map[string]*node_info.NodeInfo{h.Node.Name: node_info.NewNodeInfo(h.Node, noAffinity{})},
				PodGroupInfos: map[common_info.PodGroupID]*podgroup_info.PodGroupInfo{task.Job: podgroup_info.NewPodGroupInfo(task.Job, task)},
			}
			allocator.OnSessionOpen(session)
			return session.Statement().Allocate(task, h.Node.Name)
		}, nil
	})
}

// clusterOf is the cluster of a handle.
type clusterOf struct {
	cache.Cache
	h *handle.Handle
}

// InternalK8sPlugins implements cache.Cache.
func (c clusterOf) InternalK8sPlugins() *k8splugins.K8sPlugins {
	return &k8splugins.K8sPlugins{FrameworkHandle: c.h}
}

// noAffinity is that of a node without pods.
type noAffinity struct {
	pod_affinity.NodePodAffinityInfo
}

// AddPod implements pod_affinity.NodePodAffinityInfo.
func (noAffinity) AddPod(*corev1.Pod) {}
