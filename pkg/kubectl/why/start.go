package why

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
)

// start is what is known of the start, or the end, of a pod on the node that it is bound to.
type start struct {
	pod *corev1.Pod
	now time.Time
	// node is nil where it can't be read.
	node *corev1.Node
	// claims are the pod's that exist.
	claims []resourceapi.ResourceClaim
	// inventory is the node's; nil where there is none, or where it can't be read.
	inventory       *v1alpha1.GPUInventory
	inventoryUnread bool
	// eventsUnread: the user may not list events of the pod.
	eventsUnread bool
	// events are about the pod and its claims, and left about claims of ended pods, whose
	// devices are still in use; each the newest first.
	events, left []corev1.Event
}

// readStart reads what is known of a pod that is bound to a node.
func readStart(ctx context.Context, r *cluster.Reader, pod *corev1.Pod) (*start, error) {
	s := &start{pod: pod, now: time.Now()}
	if err := s.readClaims(ctx, r); err != nil {
		return nil, err
	}
	node, err := r.Kube.CoreV1().Nodes().Get(ctx, pod.Spec.NodeName, metav1.GetOptions{})
	read, err := tolerate(r, err, cluster.NodesName, "whether the pod's node works isn't known")
	if err != nil {
		return nil, err
	}
	if read {
		s.node = node
	}
	if err := s.readInventory(ctx, r, pod.Spec.NodeName); err != nil {
		return nil, err
	}
	return s, s.readEvents(ctx, r)
}

// tolerate notes that the user may not get objects of a resource. It reports whether err is
// nil, and returns an error unless the reason is the user's rights, or that the object doesn't
// exist.
func tolerate(r *cluster.Reader, err error, resource, missing string) (read bool, _ error) {
	switch {
	case err == nil:
		return true, nil
	case apierrors.IsForbidden(err):
		r.Note("You may not get %s: %s. Ask for the verb get on them.", resource, missing)
	case !apierrors.IsNotFound(err):
		return false, fmt.Errorf("get %s: %w", resource, err)
	}
	return false, nil
}

func (s *start) readClaims(ctx context.Context, r *cluster.Reader) error {
	for _, name := range claimNames(s.pod) {
		c, err := r.DRA.ResourceClaims(s.pod.Namespace).Get(ctx, name, metav1.GetOptions{})
		read, err := tolerate(r, err, cluster.ClaimsName, "which devices the pod has isn't known")
		if err != nil {
			return err
		}
		if read {
			s.claims = append(s.claims, *c)
		}
	}
	return nil
}

// claimNames returns the names of the pod's claims, as far as they are created.
func claimNames(pod *corev1.Pod) []string {
	var names []string
	for i := range pod.Spec.ResourceClaims {
		if name, _, err := resourceclaim.Name(pod, &pod.Spec.ResourceClaims[i]); err == nil && name != nil {
			names = append(names, *name)
		}
	}
	if c := pod.Status.ExtendedResourceClaimStatus; c != nil {
		names = append(names, c.ResourceClaimName)
	}
	return names
}

// readInventory reads the node's GPUInventory if the pod has devices of Tessera's there.
func (s *start) readInventory(ctx context.Context, r *cluster.Reader, node string) error {
	if len(s.devices(node)) == 0 {
		return nil
	}
	inv, err := r.Inventory(ctx, node)
	s.inventoryUnread = apierrors.IsForbidden(err)
	read, err := tolerate(r, err, cluster.InventoriesName, cluster.NoConditions)
	if read {
		s.inventory = inv
	}
	return err
}

// device is one that a claim of the pod has.
type device struct {
	claim string
	name  gpu.DeviceName
}

// devices returns Tessera's devices of a node that the pod's claims have.
func (s *start) devices(node string) []device {
	var out []device
	for i := range s.claims {
		c := &s.claims[i]
		if c.Status.Allocation == nil {
			continue
		}
		for _, d := range c.Status.Allocation.Devices.Results {
			if d.Driver == gpu.DriverName && d.Pool == node {
				out = append(out, device{c.Name, gpu.DeviceName(d.Device)})
			}
		}
	}
	return out
}

// inUse is the reason of events about claims whose devices processes of ended pods have.
const inUse = "DevicesStillInUse"

func (s *start) readEvents(ctx context.Context, r *cluster.Reader) error {
	about := []types.UID{s.pod.UID}
	for i := range s.claims {
		about = append(about, s.claims[i].UID)
	}
	for _, uid := range about {
		of := func(e corev1.Event) bool { return e.InvolvedObject.UID == uid }
		events, err := listEvents(ctx, r, s.pod.Namespace, "involvedObject.uid="+string(uid), of)
		if apierrors.IsForbidden(err) {
			r.Note("You may not list events in namespace %s: what the kubelet and the node's plugin say of the pod isn't known. %s", s.pod.Namespace, cluster.AskForList)
			s.eventsUnread = true
			return nil
		}
		if err != nil {
			return err
		}
		s.events = append(s.events, events...)
	}
	newestFirst(s.events)
	return s.readLeft(ctx, r)
}

// readLeft reads which claims of ended pods still have devices of the pod's GPUs.
func (s *start) readLeft(ctx context.Context, r *cluster.Reader) error {
	if len(s.devices(s.pod.Spec.NodeName)) == 0 {
		return nil
	}
	all, err := listEvents(ctx, r, "", "reason="+inUse, s.isOfAnEndedPod)
	if apierrors.IsForbidden(err) {
		r.Note("You may not list events in all namespaces: whether claims of other namespaces still have the GPU isn't known. %s", cluster.AskForList)
		all, err = listEvents(ctx, r, s.pod.Namespace, "reason="+inUse, s.isOfAnEndedPod)
	}
	s.left = all
	newestFirst(s.left)
	return err
}

// isOfAnEndedPod reports whether an event is about another claim that still has a GPU of the
// pod's claims.
func (s *start) isOfAnEndedPod(e corev1.Event) bool {
	ours := func(d device) bool { return strings.Contains(e.Message, string(d.name.Whole())) }
	own := func(c resourceapi.ResourceClaim) bool { return c.UID == e.InvolvedObject.UID }
	return e.Reason == inUse && s.now.Sub(when(&e)) < stale && !slices.ContainsFunc(s.claims, own) && slices.ContainsFunc(s.devices(s.pod.Spec.NodeName), ours)
}

// stale is the age of an event of the reason inUse that isn't true any more: the kubelet tries
// again about once a minute, and the event is written again.
const stale = 10 * time.Minute

// listEvents lists events in a namespace, or in all, of which is is true.
func listEvents(ctx context.Context, r *cluster.Reader, namespace, selector string, is func(corev1.Event) bool) ([]corev1.Event, error) {
	list, err := r.Kube.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{FieldSelector: selector})
	if err != nil {
		if apierrors.IsForbidden(err) {
			return nil, err
		}
		return nil, fmt.Errorf("list events: %w", err)
	}
	return slices.DeleteFunc(list.Items, func(e corev1.Event) bool { return !is(e) }), nil
}

func newestFirst(events []corev1.Event) {
	slices.SortStableFunc(events, func(a, b corev1.Event) int { return when(&b).Compare(when(&a)) })
}

// when is the time of an event, the last where it came several times.
func when(e *corev1.Event) time.Time {
	at := e.LastTimestamp.Time
	if e.EventTime.After(at) {
		at = e.EventTime.Time
	}
	if e.Series != nil && e.Series.LastObservedTime.After(at) {
		at = e.Series.LastObservedTime.Time
	}
	if at.IsZero() {
		return e.CreationTimestamp.Time
	}
	return at
}

// conditionsOf returns the conditions of GPUs that claims of a pod without a node have.
func conditionsOf(ctx context.Context, r *cluster.Reader, pod *corev1.Pod, allocated []*resourceapi.ResourceClaim) ([]string, error) {
	s := &start{pod: pod}
	node := ""
	for _, c := range allocated {
		s.claims = append(s.claims, *c)
		for _, d := range c.Status.Allocation.Devices.Results {
			if d.Driver == gpu.DriverName {
				node = d.Pool
			}
		}
	}
	err := s.readInventory(ctx, r, node)
	return texts(s.conditions()), err
}
