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
)

// Server is what was found out about the API server, once, at start.
type Server struct {
	// Version of resource.k8s.io that is spoken with it.
	Version string
}

// ErrNoResourceAPI says that the server has no resource.k8s.io version that
// this driver speaks.
var ErrNoResourceAPI = errors.New("the API server serves none of resource.k8s.io v1, v1beta2, v1beta1: " +
	"Dynamic Resource Allocation is on by default from Kubernetes 1.34; on 1.32 and 1.33 the feature gate DynamicResourceAllocation " +
	"and --runtime-config=resource.k8s.io/v1beta1=true turn it on; older ones don't do")

// FindServer asks the API server which version of resource.k8s.io it serves,
// newest first: v1, v1beta2, v1beta1. It returns ErrNoResourceAPI where there
// is none of them.
func FindServer(d discovery.ServerResourcesInterface) (Server, error) {
	for _, version := range []string{"v1", "v1beta2", "v1beta1"} {
		list, err := d.ServerResourcesForGroupVersion(resourceapi.GroupName + "/" + version)
		switch {
		case err == nil && slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Name == "resourceslices" }):
			return Server{Version: version}, nil
		case err != nil && !apierrors.IsNotFound(err):
			return Server{}, fmt.Errorf("ask the API server for resource.k8s.io/%s: %w", version, err)
		}
	}
	return Server{}, ErrNoResourceAPI
}

// Probe finds out in which form the server stores counters, by dry-run
// creates, which store nothing. Versions don't tell: gates can be off where
// they are on by default, and on where they are off. An error means that it
// could not be found out: the server didn't answer, or it, or an admission
// webhook or policy, refuses dry runs or changes what is sent.
func (p *Publisher) Probe(ctx context.Context) (Counters, error) {
	sets := []resourceapi.CounterSet{{Name: probeName, Counters: probeCounters()}}
	devices := []resourceapi.Device{{Name: probeName, ConsumesCounters: []resourceapi.DeviceCounterConsumption{
		{CounterSet: probeName, Counters: probeCounters()},
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
			return NoCounters, fmt.Errorf("find out how the API server stores counters: %w", err)
		}
		if ok {
			return form.is, nil
		}
	}
	return NoCounters, ErrProbeRefused
}

// ErrProbeRefused says that slices which must be stored on any server aren't, so
// that nothing could be found out about counters.
var ErrProbeRefused = errors.New("find out how the API server stores counters: it doesn't store the slice " + probeName +
	" as it is, not even without counters; look for admission webhooks and policies on resourceslices")

// probeName is the name of everything that a probe is about, the node too:
// whatever reads the server's log or an admission policy can tell it apart.
const probeName = "tessera-probe"

func probeCounters() map[string]resourceapi.Counter {
	return map[string]resourceapi.Counter{probeName: {Value: *resource.NewQuantity(1, resource.DecimalSI)}}
}

// storesAll says whether the server would store all of these as they are.
func (p *Publisher) storesAll(ctx context.Context, specs []resourceapi.ResourceSliceSpec) (bool, error) {
	for i := range specs {
		want := slice(metav1.OwnerReference{Name: probeName}, "", specs[i].Devices, specs[i].SharedCounters)
		want.OwnerReferences = nil
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

// Doubtful says whether a failed Write may come from a server that stores
// counters in another form than it was taken for: it dropped something, or
// called a slice invalid.
func Doubtful(err error) bool {
	var dropped *DroppedFieldsError
	return errors.As(err, &dropped) || apierrors.IsInvalid(err)
}
