package publish

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"time"

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
	"Dynamic Resource Allocation is on by default from Kubernetes 1.34; on 1.31 to 1.33 the feature gate DynamicResourceAllocation " +
	"and --runtime-config=resource.k8s.io/v1beta1=true (on 1.31: v1alpha3) turn it on; older versions are not supported")

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

// Probe finds out which fields the server stores, and in which form, by dry-run
// creates. The version isn't enough for that, because feature gates can differ from
// their defaults. The version is used only for the one ability that the server can't be
// asked about: how its scheduler counts.
//
// If the server refuses to answer, an ability is unknown, and Doubt says why. An error
// means that the server didn't answer.
func (p *Publisher) Probe(ctx context.Context) (Abilities, error) {
	version, err := p.version(ctx)
	if err != nil {
		return Abilities{}, err
	}
	able := Abilities{Version: version, Charged: allocator.ChargesShared(version)}
	plain, err := p.stores(ctx, plainSlice())
	switch {
	case err == nil && plain == No:
		err = errPlainRefused // by a webhook or policy, which says nothing about the server
	case err == nil:
		err = p.probeFields(ctx, &able)
	}
	if refused(err) {
		able.Doubt = doubt(err)
	} else if err != nil {
		return Abilities{}, fmt.Errorf("find out what the API server stores: %w", err)
	}
	able.API = p.api.CurrentAPI()
	return able, nil
}

// probeFields asks for one ability after the other, until one is refused.
func (p *Publisher) probeFields(ctx context.Context, able *Abilities) (err error) {
	if able.Counters, err = p.probeCounters(ctx); err != nil {
		return err
	}
	if able.Multiple, err = p.stores(ctx, sliceForSeveral()); err != nil {
		return err
	}
	if able.InformationalTaints, err = p.stores(ctx, taintedSlice(resourceapi.DeviceTaintEffectNone)); err != nil {
		return err
	}
	able.Taints = Yes
	if able.InformationalTaints == No {
		able.Taints, err = p.stores(ctx, taintedSlice(resourceapi.DeviceTaintEffectNoSchedule))
	}
	return err
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

// probeCounters finds out the form in which counters are stored.
func (p *Publisher) probeCounters(ctx context.Context) (Counters, error) {
	one := map[string]resourceapi.Counter{probeName: {Value: *resource.NewQuantity(1, resource.DecimalSI)}}
	sets := []resourceapi.CounterSet{{Name: probeName, Counters: one}}
	devices := []resourceapi.Device{{Name: probeName, ConsumesCounters: []resourceapi.DeviceCounterConsumption{
		{CounterSet: probeName, Counters: one},
	}}}
	// Servers that want both in one slice refuse devices whose counters are
	// elsewhere; the others refuse both in one.
	split, err := p.stores(ctx, resourceapi.ResourceSliceSpec{Devices: devices}, resourceapi.ResourceSliceSpec{SharedCounters: sets})
	switch {
	case err != nil:
		return UnknownCounters, err
	case split == Yes:
		return SplitCounters, nil
	}
	joint, err := p.stores(ctx, resourceapi.ResourceSliceSpec{Devices: devices, SharedCounters: sets})
	switch {
	case err != nil:
		return UnknownCounters, err
	case joint == Yes:
		return JointCounters, nil
	}
	return NoCounters, nil
}

// plainSlice is one that every server stores.
func plainSlice() resourceapi.ResourceSliceSpec {
	return resourceapi.ResourceSliceSpec{Devices: []resourceapi.Device{{Name: probeName}}}
}

// sliceForSeveral has a device that can be allocated several times, with both kinds
// of request policies.
func sliceForSeveral() resourceapi.ResourceSliceSpec {
	one := *resource.NewQuantity(1, resource.DecimalSI)
	two := *resource.NewQuantity(2, resource.DecimalSI)
	return resourceapi.ResourceSliceSpec{Devices: []resourceapi.Device{{
		Name: probeName, AllowMultipleAllocations: new(true),
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
			"range": {Value: two, RequestPolicy: &resourceapi.CapacityRequestPolicy{
				Default: &one, ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: &one, Max: &two, Step: &one},
			}},
			"values": {Value: two, RequestPolicy: &resourceapi.CapacityRequestPolicy{Default: &one, ValidValues: []resource.Quantity{one}}},
		},
	}}}
}

// taintedSlice has a device with a taint. Its time is set, because servers set it
// where it is missing.
func taintedSlice(effect resourceapi.DeviceTaintEffect) resourceapi.ResourceSliceSpec {
	return resourceapi.ResourceSliceSpec{Devices: []resourceapi.Device{{Name: probeName, Taints: []resourceapi.DeviceTaint{
		{Key: probeName, Effect: effect, TimeAdded: &metav1.Time{Time: time.Unix(0, 0)}},
	}}}}
}

// errPlainRefused: the server didn't store a plain slice unchanged, so its other
// answers mean nothing.
var errPlainRefused = errors.New("a slice with one plain device isn't stored as it is")

// probeName is the name of everything that a probe is about, the node too:
// whatever reads the server's log or an admission policy can tell it apart. Of
// the slices it is the beginning: one of that very name could exist.
const probeName = "tessera-probe"

// stores reports whether the server would store all of these as they are.
func (p *Publisher) stores(ctx context.Context, specs ...resourceapi.ResourceSliceSpec) (Answer, error) {
	for i := range specs {
		want := slice(metav1.OwnerReference{Name: probeName}, "", specs[i].Devices, specs[i].SharedCounters)
		want.OwnerReferences, want.Name, want.GenerateName = nil, "", probeName+"-"
		want.Spec.Pool.ResourceSliceCount, want.Spec.Pool.Generation = int64(len(specs)), 1
		stored, err := p.client.Create(ctx, &want, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		switch {
		case apierrors.IsInvalid(err):
			return No, nil
		case err != nil:
			return Unknown, err
		case !same(stored, &want):
			return No, nil
		}
	}
	return Yes, nil
}

// refused reports whether the server has answered, and the answer isn't that it
// is busy: trying again at once doesn't help.
func refused(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return errors.Is(err, errPlainRefused)
	}
	switch code := int(status.Status().Code); code {
	case http.StatusUnauthorized, http.StatusNotFound, http.StatusRequestTimeout, http.StatusConflict, http.StatusTooManyRequests:
		return false
	default:
		return code >= http.StatusBadRequest && code < http.StatusInternalServerError
	}
}

// doubt explains a refusal in sentences that are the same for each probe.
func doubt(err error) string {
	return fmt.Sprintf("The API server refuses the question (%s). Look for admission webhooks and policies on resourceslices, "+
		"and let the controller's dry runs pass: they create ResourceSlices whose names begin with %s-.",
		probeSlices.ReplaceAllString(err.Error(), probeName), probeName)
}

// probeSlices matches the names that a server generates for probes.
var probeSlices = regexp.MustCompile(probeName + `-[a-z0-9]+`)

// Doubtful reports whether a failed Write may come from a server that stores
// something else, or in another form, than it was taken for: it dropped
// something, or called a slice invalid.
func Doubtful(err error) bool {
	var dropped *DroppedFieldsError
	return errors.As(err, &dropped) || apierrors.IsInvalid(err)
}
