package usage

import (
	"context"
	"fmt"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// User is a container that uses a claim. Container is empty where only the pod is
// known.
type User struct{ Pod, Container string }

// Claim is a ResourceClaim.
type Claim struct{ Namespace, Name string }

// Users has the containers that use claims. The kubelet doesn't say which of a claim's
// requests a container uses.
type Users map[Claim][]User

// PodResources asks the kubelet which containers use claims, by its PodResources API.
// Kubelets tell it with the feature gate KubeletPodResourcesDynamicResources, which
// is on from Kubernetes 1.34.
type PodResources struct {
	conn   *grpc.ClientConn
	client podresources.PodResourcesListerClient
	driver string
}

// DialPodResources returns a client of the kubelet that listens on the socket. It
// connects with the first call, and again when the kubelet has restarted.
func DialPodResources(socket, driver string) (*PodResources, error) {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("use the kubelet's PodResources API at %s: %w", socket, err)
	}
	return &PodResources{conn: conn, client: podresources.NewPodResourcesListerClient(conn), driver: driver}, nil
}

// Close ends the connection.
func (p *PodResources) Close() error { return p.conn.Close() }

// Users returns the containers that use claims with devices of the driver.
func (p *PodResources) Users(ctx context.Context) (Users, error) {
	answer, err := p.client.List(ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		return nil, fmt.Errorf("list the pods' resources at the kubelet: %w", err)
	}
	users := Users{}
	for _, pod := range answer.GetPodResources() {
		for _, c := range pod.GetContainers() {
			user := User{Pod: pod.GetName(), Container: c.GetName()}
			for _, r := range c.GetDynamicResources() {
				if slices.ContainsFunc(r.GetClaimResources(), func(r *podresources.ClaimResource) bool { return r.GetDriverName() == p.driver }) {
					claim := Claim{Namespace: r.GetClaimNamespace(), Name: r.GetClaimName()}
					users[claim] = append(users[claim], user)
				}
			}
		}
	}
	return users, nil
}
