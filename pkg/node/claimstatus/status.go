package claimstatus

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// data is what status.devices[].data holds for a MIG device: part of this
// driver's interface to users and exporters.
type data struct {
	UUID              gpu.UUID  `json:"uuid"`
	ParentUUID        gpu.UUID  `json:"parentUUID"`
	Profile           string    `json:"profile"`
	Placement         placement `json:"placement"`
	GPUInstanceID     int       `json:"gpuInstanceID"`
	ComputeInstanceID int       `json:"computeInstanceID"`
}

type placement struct {
	Start int `json:"start"`
	Size  int `json:"size"`
}

// status is one element of status.devices; the same in all versions of the API
// that have it.
type status struct {
	Driver string `json:"driver"`
	Pool   string `json:"pool"`
	Device string `json:"device"`
	Data   data   `json:"data"`
}

// statuses are what the claim's status is to say, of those partitions that it is
// still allocated, ordered by name: the server takes no others.
func (w *Writer) statuses(claim *resourceapi.ResourceClaim, devices map[gpu.DeviceName]gpu.Given) []status {
	var all []status
	for _, name := range slices.Sorted(maps.Keys(devices)) {
		p, ok := devices[name].Device.(gpu.Partition)
		if !ok || !allocated(claim, w.driver, w.pool, name) {
			continue
		}
		i := devices[name].Instance
		all = append(all, status{Driver: w.driver, Pool: w.pool, Device: string(name), Data: data{
			UUID: i.UUID, ParentUUID: p.GPU, Profile: p.Profile, Placement: placement(p.Placement),
			GPUInstanceID: i.GPUInstanceID, ComputeInstanceID: i.ComputeInstanceID,
		}})
	}
	return all
}

func allocated(claim *resourceapi.ResourceClaim, driver, pool string, name gpu.DeviceName) bool {
	if claim.Status.Allocation == nil {
		return false
	}
	return slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
		return r.Driver == driver && r.Pool == pool && r.Device == string(name)
	})
}

// tells says whether the claim's status has all of it.
func tells(claim *resourceapi.ResourceClaim, want []status) bool {
	return !slices.ContainsFunc(want, func(s status) bool {
		return !slices.ContainsFunc(claim.Status.Devices, func(d resourceapi.AllocatedDeviceStatus) bool {
			return d.Driver == s.Driver && d.Pool == s.Pool && d.Device == s.Device && dataOf(d.Data) == s.Data
		})
	})
}

// dataOf is zero for what this driver hasn't written.
func dataOf(raw *runtime.RawExtension) data {
	var d data
	if raw == nil || json.Unmarshal(raw.Raw, &d) != nil {
		return data{}
	}
	return d
}

// fieldManager owns what is applied.
const fieldManager = "tessera-kubelet-plugin"

// apply writes with server-side apply, so that what other drivers tell of the
// claim's other devices stays theirs.
func (w *Writer) apply(ctx context.Context, uid types.UID, claim types.NamespacedName, statuses []status) error {
	version := strings.ToLower(w.claims.CurrentAPI()) // that of the claim that was read
	body, err := json.Marshal(map[string]any{
		"apiVersion": "resource.k8s.io/" + version,
		"kind":       "ResourceClaim",
		"metadata":   map[string]any{"name": claim.Name, "namespace": claim.Namespace, "uid": uid},
		"status":     map[string]any{"devices": statuses},
	})
	if err != nil {
		return fmt.Errorf("encode the claim's status: %w", err)
	}
	stored, err := w.client.ResourceV1().RESTClient().Patch(types.ApplyPatchType).
		AbsPath("/apis/resource.k8s.io", version, "namespaces", claim.Namespace, "resourceclaims", claim.Name, "status").
		Param("fieldManager", fieldManager).Param("force", "true").
		SetHeader("Accept", runtime.ContentTypeJSON).
		Body(body).DoRaw(ctx)
	switch {
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return nil // the claim is gone, or another one by now
	case err != nil:
		return fmt.Errorf("write the claim's status: %w", err)
	}
	return checkStored(stored)
}

// checkStored fails with errNotStored if the server has dropped the devices.
func checkStored(claim []byte) error {
	var c struct {
		Status struct {
			Allocation json.RawMessage   `json:"allocation"`
			Devices    []json.RawMessage `json:"devices"`
		} `json:"status"`
	}
	if err := json.Unmarshal(claim, &c); err != nil {
		return fmt.Errorf("read the server's answer to a written status: %w", err)
	}
	if len(c.Status.Devices) == 0 && len(c.Status.Allocation) > 0 {
		return errNotStored
	}
	return nil
}
