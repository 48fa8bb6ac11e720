package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
)

const (
	driver    = "gpu.nvidia.com"
	namespace = "bench"
)

// plugin speaks to the kubelet plugin as the kubelet does: over its socket.
type plugin struct {
	client dra.DRAPluginClient
	close  func()
}

// dialPlugin goes through a link in a temporary directory, because a socket's
// path may have at most 107 characters.
func dialPlugin(socket string) (*plugin, error) {
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		return nil, fmt.Errorf("dial plugin: %w", err)
	}
	link := filepath.Join(dir, "s")
	if err := os.Symlink(socket, link); err != nil {
		return nil, fmt.Errorf("dial plugin: %w", err)
	}
	conn, err := grpc.NewClient("unix://"+link, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("dial plugin at %s: %w", socket, err)
	}
	return &plugin{
		client: dra.NewDRAPluginClient(conn),
		close:  func() { conn.Close(); os.RemoveAll(dir) },
	}, nil
}

func (p *plugin) prepare(ctx context.Context, c *resourcev1.ResourceClaim) error {
	resp, err := p.client.NodePrepareResources(ctx, &dra.NodePrepareResourcesRequest{Claims: refs(c)})
	if err != nil {
		return fmt.Errorf("prepare claim %s: %w", c.Name, err)
	}
	r := resp.Claims[string(c.UID)]
	switch {
	case r == nil:
		return fmt.Errorf("prepare claim %s: not in the answer", c.Name)
	case r.Error != "":
		return fmt.Errorf("prepare claim %s: %w", c.Name, errors.New(r.Error))
	case len(r.Devices) == 0 || len(r.Devices[0].CdiDeviceIds) == 0:
		return fmt.Errorf("prepare claim %s: no CDI device in the answer", c.Name)
	}
	return nil
}

func (p *plugin) unprepare(ctx context.Context, c *resourcev1.ResourceClaim) error {
	resp, err := p.client.NodeUnprepareResources(ctx, &dra.NodeUnprepareResourcesRequest{Claims: refs(c)})
	if err != nil {
		return fmt.Errorf("unprepare claim %s: %w", c.Name, err)
	}
	if r := resp.Claims[string(c.UID)]; r == nil || r.Error != "" {
		return fmt.Errorf("unprepare claim %s: %v", c.Name, r)
	}
	return nil
}

func refs(c *resourcev1.ResourceClaim) []*dra.Claim {
	return []*dra.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}}
}

// allocatedClaims makes one claim for each device and allocates it by hand, so
// that no scheduler or pod is in what is measured.
func allocatedClaims(ctx context.Context, kube kubernetes.Interface, node string, devices []string) ([]*resourcev1.ResourceClaim, error) {
	claims := kube.ResourceV1().ResourceClaims(namespace)
	var made []*resourcev1.ResourceClaim
	for _, device := range devices {
		c := &resourcev1.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "bench-"},
			Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{{
				Name:    "gpu",
				Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: driver, AllocationMode: resourcev1.DeviceAllocationModeExactCount, Count: 1},
			}}}},
		}
		c, err := claims.Create(ctx, c, metav1.CreateOptions{})
		if err != nil {
			return nil, fmt.Errorf("create claim for %s: %w", device, err)
		}
		c.Status.Allocation = &resourcev1.AllocationResult{Devices: resourcev1.DeviceAllocationResult{
			Results: []resourcev1.DeviceRequestAllocationResult{{Request: "gpu", Driver: driver, Pool: node, Device: device}},
		}}
		c, err = claims.UpdateStatus(ctx, c, metav1.UpdateOptions{})
		if err != nil {
			return nil, fmt.Errorf("allocate claim for %s: %w", device, err)
		}
		made = append(made, c)
	}
	return made, nil
}
