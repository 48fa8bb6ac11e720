package claimstatus

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// data is the content of status.devices[].data for a MIG device or an MPS
// share. It is part of this driver's interface to users and exporters.
type data struct {
	// UUID is that of the MIG device, or of the one that the share belongs to.
	UUID       gpu.UUID `json:"uuid,omitempty"`
	ParentUUID gpu.UUID `json:"parentUUID"`
	*Instance
	// MPS is nil for a device without MPS.
	MPS *mps `json:"mps,omitempty"`
}

// Instance is the MIG instance of the device, or of its partition for a share;
// nil on whole GPUs.
type Instance struct {
	Profile           string    `json:"profile"`
	Placement         placement `json:"placement"`
	GPUInstanceID     int       `json:"gpuInstanceID"`
	ComputeInstanceID int       `json:"computeInstanceID"`
}

type placement struct {
	Start int `json:"start"`
	Size  int `json:"size"`
}

// mps has the limits of each process that uses the device.
type mps struct {
	// ThreadPercentage is omitted if there is no limit.
	ThreadPercentage int `json:"threadPercentage,omitempty"`
	// MemoryMiB has a limit, or 0 for none, for each device of the daemon.
	MemoryMiB []int64 `json:"memoryMiB,omitempty"`
}

// status is one element of status.devices; the same in all versions of the API
// that have it.
type status struct {
	Driver string `json:"driver"`
	Pool   string `json:"pool"`
	Device string `json:"device"`
	// ShareID is set if the device can be allocated several times, from Kubernetes
	// 1.34 on.
	ShareID string `json:"shareID,omitempty"`
	Data    data   `json:"data"`
}

// statuses returns the elements of the claim's status, ordered by name, for
// partitions and shares that it is still allocated: the server refuses others.
func (w *Writer) statuses(claim *resourceapi.ResourceClaim, realized *holding.Realized) []status {
	var all []status
	devices := realized.CDIDevices()
	for _, name := range slices.Sorted(maps.Keys(devices)) {
		g := devices[name]
		d, tells := dataFor(realized, g)
		if !tells || !allocated(claim, w.driver, w.pool, g) {
			continue
		}
		all = append(all, status{Driver: w.driver, Pool: w.pool, Device: string(g.Device), ShareID: g.ShareID, Data: d})
	}
	return all
}

// dataFor returns the facts about a device that its attributes don't have;
// false if there are none.
func dataFor(realized *holding.Realized, g holding.Holding) (_ data, tells bool) {
	d := data{ParentUUID: g.GPU}
	if p, ok := g.Base().(gpu.Partition); ok {
		i := realized.Instances[p]
		d.UUID, tells = i.UUID, true
		d.Instance = &Instance{
			Profile: p.Profile, Placement: placement(p.Placement),
			GPUInstanceID: i.GPUInstanceID, ComputeInstanceID: i.ComputeInstanceID,
		}
	}
	if realized.Daemon(g) != "" {
		d.MPS, tells = &mps{ThreadPercentage: g.MPS.ThreadPercentage, MemoryMiB: realized.MemoryLimits(g)}, true
	}
	return d, tells
}

func allocated(claim *resourceapi.ResourceClaim, driver, pool string, g holding.Holding) bool {
	if claim.Status.Allocation == nil {
		return false
	}
	return slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
		return r.Driver == driver && r.Pool == pool && r.Device == string(g.Device) && string(ptr.Deref(r.ShareID, "")) == g.ShareID
	})
}

// tells reports whether the claim's status has all wanted elements.
func tells(claim *resourceapi.ResourceClaim, want []status) bool {
	return !slices.ContainsFunc(want, func(s status) bool {
		return !slices.ContainsFunc(claim.Status.Devices, func(d resourceapi.AllocatedDeviceStatus) bool {
			return d.Driver == s.Driver && d.Pool == s.Pool && d.Device == s.Device && ptr.Deref(d.ShareID, "") == s.ShareID &&
				reflect.DeepEqual(dataOf(d.Data), s.Data)
		})
	})
}

// dataOf returns zero data for an element that this driver hasn't written.
func dataOf(raw *runtime.RawExtension) data {
	var d data
	if raw == nil || json.Unmarshal(raw.Raw, &d) != nil {
		return data{}
	}
	return d
}

// fieldManager owns what is applied.
const fieldManager = "tessera-kubelet-plugin"

// apply writes with server-side apply, so that the elements of other drivers
// are not changed.
func (w *Writer) apply(ctx context.Context, claim *holding.Realized, statuses []status) error {
	version := strings.ToLower(w.claims.CurrentAPI()) // that of the claim that was read
	body, err := json.Marshal(map[string]any{
		"apiVersion": "resource.k8s.io/" + version,
		"kind":       "ResourceClaim",
		"metadata":   map[string]any{"name": claim.Name, "namespace": claim.Namespace, "uid": claim.ClaimUID},
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
		return nil // the claim is gone, or was replaced by another one
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
