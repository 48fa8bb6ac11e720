package stack

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/sim/cluster"
	"github.com/tessera-dra/tessera/sim/manifest"
)

// Has reports whether a feature gate of Dynamic Resource Allocation is on in the
// cluster.
func (s *Stack) Has(gate string) bool { return s.Cluster.Has(gate) }

// Convert rewrites manifests of resource.k8s.io/v1 for the version that the
// cluster serves.
func (s *Stack) Convert(manifests []byte) ([]byte, error) {
	return manifest.Convert(manifests, manifest.Version(s.Cluster.Kubernetes()))
}

// Path rewrites a JSON path or a template for the devices of ResourceSlices: up to
// v1beta1 their fields are in "basic".
func (s *Stack) Path(text string) string {
	if v := manifest.Version(s.Cluster.Kubernetes()); v == "v1beta1" || v == "v1alpha3" {
		return strings.NewReplacer(".attributes.", ".basic.attributes.", ".capacity.", ".basic.capacity.").Replace(text)
	}
	return text
}

// Apply applies manifests of resource.k8s.io/v1 and others in a namespace.
func (s *Stack) Apply(ctx context.Context, namespace string, manifests []byte) error {
	converted, err := s.Convert(manifests)
	if err != nil {
		return err
	}
	cmd := s.Command(ctx, "kubectl", "-n", namespace, "apply", "-f", "-")
	cmd.Stdin = bytes.NewReader(converted)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("kubectl apply: %w: %s", err, out)
	}
	return nil
}

// Claim reads a claim, whose requests are left out on Kubernetes 1.31 and 1.32.
func (s *Stack) Claim(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error) {
	claim := &resourceapi.ResourceClaim{}
	return claim, s.get(ctx, claim, "namespaces", namespace, "resourceclaims", name)
}

// Slices reads all ResourceSlices.
func (s *Stack) Slices(ctx context.Context) ([]resourceapi.ResourceSlice, error) {
	list := &resourceapi.ResourceSliceList{}
	err := s.get(ctx, list, "resourceslices")
	return list.Items, err
}

// Minors reads the minor numbers of all GPUs, by UUID, as the nodes report them.
func (s *Stack) Minors(ctx context.Context) (map[string]int, error) {
	data, err := s.kube.Discovery().RESTClient().Get().AbsPath("/apis", v1alpha1.GroupVersion.String(), "gpuinventories").DoRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("list GPUInventories: %w", err)
	}
	var list v1alpha1.GPUInventoryList
	if err := json.Unmarshal(data, &list); err != nil {
		return nil, fmt.Errorf("read the list of GPUInventories: %w", err)
	}
	out := make(map[string]int)
	for _, inv := range list.Items {
		for _, g := range inv.Status.GPUs {
			out[g.UUID] = int(g.Minor)
		}
	}
	return out, nil
}

func (s *Stack) get(ctx context.Context, into any, path ...string) error {
	path = append([]string{"/apis", resourceapi.GroupName, manifest.Version(s.Cluster.Kubernetes())}, path...)
	data, err := s.kube.Discovery().RESTClient().Get().AbsPath(path...).DoRaw(ctx)
	if err == nil {
		err = manifest.Read(data, into)
	}
	if err != nil {
		return fmt.Errorf("get %v: %w", path, err)
	}
	return nil
}

// ErrNoInstance says that the simulated machine has no such GPU instance.
var ErrNoInstance = errors.New("no such GPU instance")

// MIGInstance is a GPU instance of a simulated machine, and its compute instance.
type MIGInstance struct {
	ID      uint32 `json:"id"`
	Start   int    `json:"start"`
	Compute []struct {
		ID uint32 `json:"id"`
	} `json:"compute"`
}

// Instance asks the simulator of a node for the GPU instance whose placement on
// the GPU of that minor number begins there.
func (s *Stack) Instance(ctx context.Context, node string, minor, start int) (*MIGInstance, error) {
	var out bytes.Buffer
	if err := s.Simulator(ctx, node, cluster.Stdio{Out: &out}, "state"); err != nil {
		return nil, err
	}
	var state struct {
		GPUs []struct {
			Minor     int           `json:"minor"`
			Instances []MIGInstance `json:"instances"`
		} `json:"gpus"`
	}
	if err := json.Unmarshal(out.Bytes(), &state); err != nil {
		return nil, err
	}
	for _, g := range state.GPUs {
		for _, instance := range g.Instances {
			if g.Minor == minor && instance.Start == start && len(instance.Compute) > 0 {
				return &instance, nil
			}
		}
	}
	return nil, fmt.Errorf("%w on GPU %d of %s at %d", ErrNoInstance, minor, node, start)
}
