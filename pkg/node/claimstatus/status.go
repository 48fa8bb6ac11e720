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
)

// data is what status.devices[].data holds for a MIG device or an MPS share: part
// of this driver's interface to users and exporters.
type data struct {
	// UUID of the MIG device that the device is, or is a share of.
	UUID       gpu.UUID `json:"uuid,omitempty"`
	ParentUUID gpu.UUID `json:"parentUUID"`
	*Instance
	// MPS is nil for what is no client of an MPS daemon.
	MPS *mps `json:"mps,omitempty"`
}

// Instance is the MIG instance that the device is, or is a share of; nil on whole
// GPUs.
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

// mps are the limits of each process that uses the device.
type mps struct {
	// ThreadPercentage is left out where there is no limit.
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
	// ShareID is there where the device can be given several times, from Kubernetes
	// 1.34 on.
	ShareID string `json:"shareID,omitempty"`
	Data    data   `json:"data"`
}

// statuses are what the claim's status is to say, of those partitions and shares
// that it is still allocated, ordered by name: the server takes no others.
func (w *Writer) statuses(claim *resourceapi.ResourceClaim, devices map[gpu.DeviceName]gpu.Given) []status {
	var all []status
	for _, key := range slices.Sorted(maps.Keys(devices)) {
		given := devices[key]
		d, tells := dataFor(given)
		if !tells || !allocated(claim, w.driver, w.pool, given) {
			continue
		}
		all = append(all, status{Driver: w.driver, Pool: w.pool, Device: string(given.Name), ShareID: given.ShareID, Data: d})
	}
	return all
}

// dataFor is what there is to tell of a device that its attributes don't; false
// for nothing.
func dataFor(given gpu.Given) (_ data, tells bool) {
	d := data{ParentUUID: given.Device.Parent()}
	if p, ok := gpu.Base(given.Device).(gpu.Partition); ok {
		i := given.Instance
		d.UUID, tells = i.UUID, true
		d.Instance = &Instance{
			Profile: p.Profile, Placement: placement(p.Placement),
			GPUInstanceID: i.GPUInstanceID, ComputeInstanceID: i.ComputeInstanceID,
		}
	}
	if c := given.MPS; c != nil {
		d.MPS, tells = &mps{ThreadPercentage: c.ThreadPercentage, MemoryMiB: c.MemoryMiB}, true
	}
	return d, tells
}

func allocated(claim *resourceapi.ResourceClaim, driver, pool string, given gpu.Given) bool {
	if claim.Status.Allocation == nil {
		return false
	}
	return slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
		return r.Driver == driver && r.Pool == pool && r.Device == string(given.Name) && string(ptr.Deref(r.ShareID, "")) == given.ShareID
	})
}

// tells says whether the claim's status has all of it.
func tells(claim *resourceapi.ResourceClaim, want []status) bool {
	return !slices.ContainsFunc(want, func(s status) bool {
		return !slices.ContainsFunc(claim.Status.Devices, func(d resourceapi.AllocatedDeviceStatus) bool {
			return d.Driver == s.Driver && d.Pool == s.Pool && d.Device == s.Device && ptr.Deref(d.ShareID, "") == s.ShareID &&
				reflect.DeepEqual(dataOf(d.Data), s.Data)
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
