package classes

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/pkg/control/undone"
)

const (
	// askAgainAfter is how long the controller remembers that the server dropped an
	// extended resource name.
	askAgainAfter = 10 * time.Minute
	// ownerPause is the time between two looks for the release's ClusterRole while it is
	// missing, as when the release is being removed.
	ownerPause = 30 * time.Second
)

// ServerChanged is the name of the request that makes Reconcile forget what the
// server stored.
const ServerChanged = "server"

// Reconciler keeps the DeviceClasses of one release as they are wanted.
type Reconciler struct {
	// Informer has all DeviceClasses. It must run.
	Informer cache.SharedIndexInformer

	wanted   *Wanted
	client   resourceclient.DeviceClassInterface
	reader   client.Reader // reads from the server
	recorder events.EventRecorder
	clock    clock.PassiveClock
	writes   *undone.Writes // paces writes that somebody else undoes

	// The fields below are only used by Reconcile, which isn't called concurrently.
	lacksUntil time.Time         // until then the server is taken not to store extended resource names
	warned     map[string]string // the resource version of each foreign class that an event was written about
}

// New returns a Reconciler for these classes.
func New(wanted *Wanted, client *draclient.Client, reader client.Reader, recorder events.EventRecorder) *Reconciler {
	classes := client.DeviceClasses()
	return &Reconciler{
		Informer: cache.NewSharedIndexInformer(cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
				return classes.List(ctx, o)
			},
			WatchFuncWithContext: classes.Watch,
		}, client), &resourceapi.DeviceClass{}, 0, nil),
		wanted: wanted, client: classes, reader: reader, recorder: recorder,
		clock: clock.RealClock{}, writes: undone.New(clock.RealClock{}), warned: make(map[string]string),
	}
}

// Reconcile brings all classes in line. In a steady state it writes nothing. A
// class of somebody else that has the name of a wanted one stays as it is, and an
// event says so.
func (r *Reconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	if request.Name == ServerChanged {
		r.lacksUntil = time.Time{}
	}
	owner, err := r.owner(ctx)
	if apierrors.IsNotFound(err) {
		klog.FromContext(ctx).Info("Leaving the DeviceClasses unchanged: their owner is gone, as during an uninstall", "clusterRole", r.wanted.Owner)
		return reconcile.Result{RequeueAfter: ownerPause}, nil
	} else if err != nil {
		return reconcile.Result{}, fmt.Errorf("read the owner of the DeviceClasses, ClusterRole %s: %w", r.wanted.Owner, err)
	}
	var failed []error
	var wait time.Duration
	for _, c := range r.wanted.changes(owner, r.cached()) {
		left, err := undone.Wait(r.apply(ctx, c.have, c.want))
		wait = undone.Sooner(wait, left)
		failed = append(failed, err)
	}
	wait = undone.Sooner(wait, max(0, r.lacksUntil.Sub(r.clock.Now())))
	return reconcile.Result{RequeueAfter: wait}, errors.Join(failed...)
}

// owner returns a reference to the release's ClusterRole.
func (r *Reconciler) owner(ctx context.Context) (metav1.OwnerReference, error) {
	role := &metav1.PartialObjectMetadata{}
	gvk := rbacv1.SchemeGroupVersion.WithKind("ClusterRole")
	role.SetGroupVersionKind(gvk)
	if err := r.reader.Get(ctx, client.ObjectKey{Name: r.wanted.Owner}, role); err != nil {
		return metav1.OwnerReference{}, err
	}
	return metav1.OwnerReference{APIVersion: gvk.GroupVersion().String(), Kind: gvk.Kind, Name: role.Name, UID: role.UID}, nil
}

func (r *Reconciler) cached() map[string]*resourceapi.DeviceClass {
	have := make(map[string]*resourceapi.DeviceClass)
	for _, o := range r.Informer.GetStore().List() {
		if class, ok := o.(*resourceapi.DeviceClass); ok {
			have[class.Name] = class
		}
	}
	return have
}

// apply creates, updates or deletes one class; want is nil if none is wanted.
func (r *Reconciler) apply(ctx context.Context, have, want *resourceapi.DeviceClass) error {
	decision := r.wanted.decide(have, want, r.clock.Now().Before(r.lacksUntil))
	if decision != foreign && have != nil {
		delete(r.warned, have.Name)
	}
	switch decision {
	case create, update:
		return r.paced(ctx, want, contentOf(want), func() error { return r.write(ctx, decision, want) })
	case remove:
		return r.paced(ctx, have, "", func() error { return r.remove(ctx, have) })
	case foreign:
		r.warnForeign(ctx, have)
	case keep:
	}
	return nil
}

// paced makes a write, with growing pauses while somebody else undoes it.
func (r *Reconciler) paced(ctx context.Context, class *resourceapi.DeviceClass, content string, write func() error) error {
	times, err := r.writes.Do(class.Name, content, write)
	if times == undone.Fight {
		r.event(ctx, class, corev1.EventTypeWarning, "Overwritten", overwritten)
	}
	return err
}

func (r *Reconciler) remove(ctx context.Context, have *resourceapi.DeviceClass) error {
	err := r.client.Delete(ctx, have.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(have.UID))})
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil // the informer hasn't seen yet what the server has
	} else if err != nil {
		return fmt.Errorf("delete DeviceClass %s: %w", have.Name, err)
	}
	klog.FromContext(ctx).Info("Deleted a DeviceClass that isn't wanted any more", "class", have.Name)
	return nil
}

// write creates or updates a class, and checks whether the server has stored its extended
// resource name.
func (r *Reconciler) write(ctx context.Context, decision action, want *resourceapi.DeviceClass) (err error) {
	var stored *resourceapi.DeviceClass
	if decision == create {
		stored, err = r.client.Create(ctx, want, metav1.CreateOptions{})
	} else {
		stored, err = r.client.Update(ctx, want, metav1.UpdateOptions{})
	}
	switch {
	case apierrors.IsAlreadyExists(err) || apierrors.IsConflict(err):
		return nil // the informer hasn't seen yet what the server has
	case err != nil:
		return fmt.Errorf("write DeviceClass %s: %w", want.Name, err)
	case stored.ResourceVersion != want.ResourceVersion:
		klog.FromContext(ctx).Info("Wrote a DeviceClass", "class", want.Name)
	}
	if lostName(stored, want) {
		if r.lacksUntil.IsZero() {
			r.event(ctx, stored, corev1.EventTypeNormal, "ExtendedResourceNotStored", extendedResourceNotStored)
		}
		r.lacksUntil = r.clock.Now().Add(askAgainAfter)
	}
	return nil
}

const extendedResourceNotStored = "the API server doesn't store spec.extendedResourceName: pods can get devices of this class by claims, " +
	"not by resources.limits. Kubernetes 1.36 and later store it; on 1.34 and 1.35 turn on the feature gate DRAExtendedResource " +
	"on kube-apiserver, kube-scheduler, kube-controller-manager and the kubelets"

const overwritten = "Somebody else changes or deletes this DeviceClass again and again. Look for programs that restore, prune or delete objects. " +
	"Until that ends, the controller writes it less and less often"

// contentOf returns the fields of a class that are written.
func contentOf(want *resourceapi.DeviceClass) string {
	return undone.Content([]any{want.Labels, want.OwnerReferences, want.Spec})
}

// warnForeign writes an event about a class of somebody else, once for each version
// of it.
func (r *Reconciler) warnForeign(ctx context.Context, have *resourceapi.DeviceClass) {
	if r.warned[have.Name] == have.ResourceVersion {
		return
	}
	r.warned[have.Name] = have.ResourceVersion
	r.event(ctx, have, corev1.EventTypeWarning, "NotOverwritten", r.wanted.notOverwritten(have))
}

// notOverwritten returns the message about a class that has a wanted name and isn't
// overwritten: the reason and the remedy.
func (w *Wanted) notOverwritten(have *resourceapi.DeviceClass) string {
	if role := otherRelease(have); role != "" {
		return fmt.Sprintf("this DeviceClass belongs to another release of Tessera, the one with the ClusterRole %s; "+
			"the release with the ClusterRole %s doesn't change it. Uninstall one of the two: a cluster needs only one. "+
			"The class is deleted with its release, and the other one then creates its own", role, w.Owner)
	}
	because := ""
	if isLabelled(have) {
		because = fmt.Sprintf(". It has Tessera's label, but it has no ownerReference to the ClusterRole %s, which marks this release's classes", w.Owner)
	}
	return fmt.Sprintf("Tessera doesn't replace this DeviceClass, %s, although its spec differs from the one that the release has for this name%s. "+
		"To get Tessera's class, delete this one, or uninstall the release that it belongs to. To keep this one, do nothing: "+
		"claims get what its selectors allow", maker(have), because)
}

// maker says who has made a class, as far as it can be seen.
func maker(o *resourceapi.DeviceClass) string {
	if release := o.Annotations["meta.helm.sh/release-name"]; release != "" {
		return fmt.Sprintf("of the Helm release %s in namespace %s", release, o.Annotations["meta.helm.sh/release-namespace"])
	}
	var managers []string
	for _, m := range o.ManagedFields {
		managers = append(managers, m.Manager)
	}
	if len(managers) == 0 {
		return "of somebody else"
	}
	return "written by " + strings.Join(managers, ", ")
}

func (r *Reconciler) event(ctx context.Context, about *resourceapi.DeviceClass, kind, reason, message string) {
	klog.FromContext(ctx).Info("A DeviceClass differs from the release's", "class", about.Name, "reason", reason, "message", message)
	about = about.DeepCopy()
	about.SetGroupVersionKind(resourceapi.SchemeGroupVersion.WithKind("DeviceClass")) // what is read has none
	r.recorder.Eventf(about, nil, kind, reason, "Apply", "%s", message)
}

// Request maps each event of a class to the one request for all.
func Request(any) []reconcile.Request { return []reconcile.Request{{}} }

// RequestServerChanged is the request after a change of the API server.
func RequestServerChanged() reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Name: ServerChanged}}
}
