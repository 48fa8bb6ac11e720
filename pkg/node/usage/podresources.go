package usage

import (
	"context"
	"fmt"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/mem"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// Container uses a claim. Name is empty where only the pod is known.
type Container struct{ Pod, Name string }

// Claim is a ResourceClaim.
type Claim struct{ Namespace, Name string }

// Containers has the containers that use each claim. The kubelet doesn't say which of a
// claim's requests a container uses.
type Containers map[Claim][]Container

// PodResources asks the kubelet which containers use claims, by its PodResources API.
// Kubelets tell it with the feature gate KubeletPodResourcesDynamicResources, which
// is on from Kubernetes 1.34.
type PodResources struct {
	client podresources.PodResourcesListerClient
	driver string
}

// DialPodResources returns a client of the kubelet that listens on the socket. It
// connects with the first call, and again when the kubelet has restarted.
func DialPodResources(socket, driver string) (*PodResources, error) {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		// The default pool rounds an answer about a few hundred pods up to a buffer of 1 MiB.
		experimental.WithBufferPool(mem.NopBufferPool{}))
	if err != nil {
		return nil, fmt.Errorf("use the kubelet's PodResources API at %s: %w", socket, err)
	}
	return NewPodResources(podresources.NewPodResourcesListerClient(conn), driver), nil
}

// NewPodResources returns PodResources that ask the client.
func NewPodResources(client podresources.PodResourcesListerClient, driver string) *PodResources {
	return &PodResources{client: client, driver: driver}
}

// Containers returns the containers that use claims with devices of the driver.
func (p *PodResources) Containers(ctx context.Context) (Containers, error) {
	answer, err := p.client.List(ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		return nil, fmt.Errorf("list the pods' resources at the kubelet: %w", err)
	}
	containers := Containers{}
	for _, pod := range answer.GetPodResources() {
		for _, c := range pod.GetContainers() {
			container := Container{Pod: pod.GetName(), Name: c.GetName()}
			for _, r := range c.GetDynamicResources() {
				claim := Claim{Namespace: r.GetClaimNamespace(), Name: r.GetClaimName()}
				// A container that names two requests of a claim has the claim twice.
				if p.hasDevices(r) && !slices.Contains(containers[claim], container) {
					containers[claim] = append(containers[claim], container)
				}
			}
		}
	}
	return containers, nil
}

// hasDevices reports whether the driver prepared devices of the claim.
func (p *PodResources) hasDevices(claim *podresources.DynamicResource) bool {
	return slices.ContainsFunc(claim.GetClaimResources(), func(r *podresources.ClaimResource) bool { return r.GetDriverName() == p.driver })
}
