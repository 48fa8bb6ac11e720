package usage

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// kubelet answers as the kubelets of all supported versions do: a ClaimResource for
// each device of a claim, with the name of its driver; and the claim once for each of its
// requests that the container names, or for each name that the pod has for it.
type kubelet struct {
	podresources.UnimplementedPodResourcesListerServer
}

func (kubelet) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	claim := func(name string, drivers ...string) *podresources.DynamicResource {
		r := &podresources.DynamicResource{ClaimNamespace: "team", ClaimName: name}
		for _, driver := range drivers {
			r.ClaimResources = append(r.ClaimResources, &podresources.ClaimResource{DriverName: driver, PoolName: "node-0", DeviceName: "device"})
		}
		return r
	}
	return &podresources.ListPodResourcesResponse{PodResources: []*podresources.PodResources{
		{Name: "trainer", Namespace: "team", Containers: []*podresources.ContainerResources{
			{Name: "main", DynamicResources: []*podresources.DynamicResource{
				claim("gpus", "gpu.nvidia.com", "gpu.nvidia.com"), claim("gpus", "gpu.nvidia.com", "gpu.nvidia.com"), claim("network", "nic.example.com"),
			}},
			{Name: "sidecar"},
		}},
		{Name: "second", Namespace: "team", Containers: []*podresources.ContainerResources{
			{Name: "main", DynamicResources: []*podresources.DynamicResource{claim("gpus", "gpu.nvidia.com", "gpu.nvidia.com")}},
		}},
	}}, nil
}

func TestContainersOfClaims(t *testing.T) {
	dir, err := os.MkdirTemp("", "kubelet") //nolint:usetesting // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "kubelet.sock")
	client, err := DialPodResources(socket, "gpu.nvidia.com")
	if err != nil {
		t.Fatal(err)
	}
	if containers, err := client.Containers(t.Context()); err == nil {
		t.Errorf("without a kubelet: %v, want an error", containers)
	}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	podresources.RegisterPodResourcesListerServer(server, kubelet{})
	go server.Serve(listener)
	defer server.Stop()
	containers, err := client.Containers(t.Context())
	for err != nil && t.Context().Err() == nil { // gRPC waits a second before it connects again
		containers, err = client.Containers(t.Context())
	}
	want := Containers{{Namespace: "team", Name: "gpus"}: {{Pod: "trainer", Name: "main"}, {Pod: "second", Name: "main"}}}
	if diff := cmp.Diff(want, containers); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}
