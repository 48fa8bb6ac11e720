package publish

import (
	"context"
	"errors"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"

	"github.com/tessera-dra/tessera/pkg/allocator"
)

// ErrNoResourceAPI says that the server has no resource.k8s.io version that
// this driver speaks.
var ErrNoResourceAPI = errors.New("the API server serves none of resource.k8s.io v1, v1beta2, v1beta1: " +
	"Dynamic Resource Allocation is on by default from Kubernetes 1.34; on 1.32 and 1.33 the feature gate DynamicResourceAllocation " +
	"and --runtime-config=resource.k8s.io/v1beta1=true turn it on; older versions are not supported")

// FindAPIVersion returns the newest version of resource.k8s.io that the API server
// serves: v1, v1beta2 or v1beta1. It returns ErrNoResourceAPI if the server serves none
// of them.
func FindAPIVersion(d discovery.ServerResourcesInterface) (string, error) {
	for _, version := range []string{"v1", "v1beta2", "v1beta1"} {
		list, err := d.ServerResourcesForGroupVersion(resourceapi.GroupName + "/" + version)
		switch {
		case err == nil && slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Name == "resourceslices" }):
			return version, nil
		case err != nil && !apierrors.IsNotFound(err):
			return "", fmt.Errorf("ask the API server for resource.k8s.io/%s: %w", version, err)
		}
	}
	return "", ErrNoResourceAPI
}

// Abilities are what a server stores of slices besides plain devices, and
// whether its scheduler can be trusted with it.
type Abilities struct {
	Counters Counters
	// Multiple: devices that can be given several times, and policies for how much
	// of their capacities claims may ask for.
	Multiple bool
	// Charged: the scheduler of this version charges counters for devices that are
	// given several times (pkg/allocator).
	Charged bool
	// Version of Kubernetes as the server spells it; empty where it doesn't say.
	Version string
}

// Probe finds out what the server stores, and in which form, by dry-run
// creates, which store nothing. Versions don't say that: gates can be off where
// they are on by default, and on where they are off. The version says only what
// no server can be asked: how its scheduler counts. An error means that it
// could not be found out: the server didn't answer, or it, or an admission
// webhook or policy, refuses dry runs or changes what is sent.
func (p *Publisher) Probe(ctx context.Context) (Abilities, error) {
	version, err := p.version(ctx)
	if err != nil {
		return Abilities{}, err
	}
	able, err := p.probeStorage(ctx)
	able.Version, able.Charged = version, allocator.ChargesShared(version)
	return able, err
}

// version asks for the server's version; empty where it may not be asked.
func (p *Publisher) version(ctx context.Context) (string, error) {
	info, err := p.versions.ServerVersionWithContext(ctx)
	switch {
	case apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) || apierrors.IsNotFound(err):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("ask the API server for its version: %w", err)
	}
	return info.GitVersion, nil
}

func (p *Publisher) probeStorage(ctx context.Context) (Abilities, error) {
	counters, err := p.probeCounters(ctx)
	if err != nil {
		return Abilities{}, fmt.Errorf("find out how the API server stores counters: %w", err)
	}
	one := *resource.NewQuantity(1, resource.DecimalSI)
	two := *resource.NewQuantity(2, resource.DecimalSI)
	multiple, err := p.storesAll(ctx, []resourceapi.ResourceSliceSpec{{Devices: []resourceapi.Device{{
		Name: probeName, AllowMultipleAllocations: new(true),
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
			"range": {Value: two, RequestPolicy: &resourceapi.CapacityRequestPolicy{
				Default: &one, ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: &one, Max: &two, Step: &one},
			}},
			"values": {Value: two, RequestPolicy: &resourceapi.CapacityRequestPolicy{Default: &one, ValidValues: []resource.Quantity{one}}},
		},
	}}}})
	if err != nil {
		return Abilities{}, fmt.Errorf("find out whether the API server stores consumable capacity: %w", err)
	}
	return Abilities{Counters: counters, Multiple: multiple}, nil
}

func (p *Publisher) probeCounters(ctx context.Context) (Counters, error) {
	one := map[string]resourceapi.Counter{probeName: {Value: *resource.NewQuantity(1, resource.DecimalSI)}}
	sets := []resourceapi.CounterSet{{Name: probeName, Counters: one}}
	devices := []resourceapi.Device{{Name: probeName, ConsumesCounters: []resourceapi.DeviceCounterConsumption{
		{CounterSet: probeName, Counters: one},
	}}}
	for _, form := range []struct {
		is    Counters
		specs []resourceapi.ResourceSliceSpec
	}{
		// Servers that want both in one slice refuse devices whose counters are
		// elsewhere; the others refuse both in one.
		{SplitCounters, []resourceapi.ResourceSliceSpec{{Devices: devices}, {SharedCounters: sets}}},
		{JointCounters, []resourceapi.ResourceSliceSpec{{Devices: devices, SharedCounters: sets}}},
		{NoCounters, []resourceapi.ResourceSliceSpec{{Devices: []resourceapi.Device{{Name: probeName}}}}},
	} {
		ok, err := p.storesAll(ctx, form.specs)
		if err != nil {
			return NoCounters, err
		}
		if ok {
			return form.is, nil
		}
	}
	return NoCounters, ErrProbeRefused
}

// ErrProbeRefused says that slices which must be stored on any server aren't, so
// that nothing could be found out.
var ErrProbeRefused = errors.New("it doesn't store the slice " + probeName +
	" as it is, not even without counters; look for admission webhooks and policies on resourceslices")

// probeName is the name of everything that a probe is about, the node too:
// whatever reads the server's log or an admission policy can tell it apart. Of
// the slices it is the beginning: one of that very name could exist.
const probeName = "tessera-probe"

// storesAll reports whether the server would store all of these as they are.
func (p *Publisher) storesAll(ctx context.Context, specs []resourceapi.ResourceSliceSpec) (bool, error) {
	for i := range specs {
		want := slice(metav1.OwnerReference{Name: probeName}, "", specs[i].Devices, specs[i].SharedCounters)
		want.OwnerReferences, want.Name, want.GenerateName = nil, "", probeName+"-"
		want.Spec.Pool.ResourceSliceCount, want.Spec.Pool.Generation = int64(len(specs)), 1
		stored, err := p.client.Create(ctx, &want, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		switch {
		case apierrors.IsInvalid(err):
			return false, nil
		case err != nil:
			return false, err
		case !same(stored, &want):
			return false, nil
		}
	}
	return true, nil
}

// Doubtful reports whether a failed Write may come from a server that stores
// something else, or in another form, than it was taken for: it dropped
// something, or called a slice invalid.
func Doubtful(err error) bool {
	var dropped *DroppedFieldsError
	return errors.As(err, &dropped) || apierrors.IsInvalid(err)
}
