package classes

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
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
	server   *server
	reader   client.Reader // reads from the server
	recorder events.EventRecorder
	clock    clock.PassiveClock
	writes   *undone.Writes // paces writes that somebody else undoes

	// The fields below are only used by Reconcile, which isn't called concurrently.
	lacksUntil time.Time         // until then the server is taken not to store extended resource names
	warned     map[string]string // the resource version of each foreign class that an event was written about
}

// New returns a Reconciler for these classes.
func New(wanted *Wanted, d discovery.ServerResourcesInterface, api dynamic.Interface, reader client.Reader, recorder events.EventRecorder) *Reconciler {
	s := &server{discovery: d, client: api}
	return &Reconciler{
		Informer: s.informer(), wanted: wanted, server: s, reader: reader, recorder: recorder,
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
	api, version, err := r.server.current()
	if err != nil {
		return reconcile.Result{}, err
	}
	w := writer{Reconciler: r, api: api, version: version}
	changes, err := r.wanted.changes(owner, r.cached())
	failed := []error{err}
	var wait time.Duration
	for _, c := range changes {
		left, err := undone.Wait(w.apply(ctx, c.have, c.want))
		wait = undone.Sooner(wait, left)
		failed = append(failed, err)
	}
	wait = undone.Sooner(wait, max(0, r.lacksUntil.Sub(r.clock.Now())))
	return reconcile.Result{RequeueAfter: wait}, errors.Join(failed...)
}

// owner returns a reference to the release's ClusterRole.
func (r *Reconciler) owner(ctx context.Context) (metav1.OwnerReference, error) {
	role := &metav1.PartialObjectMetadata{}
	gvk := rbacv1.SchemeGroupVersion.WithKind(clusterRole)
	role.SetGroupVersionKind(gvk)
	if err := r.reader.Get(ctx, client.ObjectKey{Name: r.wanted.Owner}, role); err != nil {
		return metav1.OwnerReference{}, err
	}
	return metav1.OwnerReference{APIVersion: gvk.GroupVersion().String(), Kind: gvk.Kind, Name: role.Name, UID: role.UID}, nil
}

func (r *Reconciler) cached() map[string]*unstructured.Unstructured {
	have := make(map[string]*unstructured.Unstructured)
	for _, o := range r.Informer.GetStore().List() {
		if u, ok := o.(*unstructured.Unstructured); ok {
			have[u.GetName()] = u
		}
	}
	return have
}

// writer writes classes in one version of the API.
type writer struct {
	*Reconciler
	api     dynamic.ResourceInterface
	version schema.GroupVersion
}

// apply creates, updates or deletes one class; want is nil if none is wanted.
func (w writer) apply(ctx context.Context, have, want *unstructured.Unstructured) error {
	decision := w.wanted.decide(have, want, w.clock.Now().Before(w.lacksUntil))
	if decision != foreign && have != nil {
		delete(w.warned, have.GetName())
	}
	switch decision {
	case create, update:
		return w.paced(ctx, want, contentOf(want), func() error { return w.write(ctx, decision, want) })
	case remove:
		return w.paced(ctx, have, "", func() error { return w.remove(ctx, have) })
	case foreign:
		w.warnForeign(ctx, have)
	case keep:
	}
	return nil
}

// paced makes a write, with growing pauses while somebody else undoes it.
func (w writer) paced(ctx context.Context, class *unstructured.Unstructured, content string, write func() error) error {
	times, err := w.writes.Do(class.GetName(), content, write)
	if times == undone.Fight {
		w.event(ctx, class, corev1.EventTypeWarning, "Overwritten", overwritten)
	}
	return err
}

func (w writer) remove(ctx context.Context, have *unstructured.Unstructured) error {
	uid := have.GetUID()
	err := w.api.Delete(ctx, have.GetName(), metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}})
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil // the informer hasn't seen yet what the server has
	} else if err != nil {
		return fmt.Errorf("delete DeviceClass %s: %w", have.GetName(), err)
	}
	klog.FromContext(ctx).Info("Deleted a DeviceClass that isn't wanted any more", "class", have.GetName())
	return nil
}

// write creates or updates a class, and checks whether the server has stored its extended
// resource name.
func (w writer) write(ctx context.Context, decision action, want *unstructured.Unstructured) (err error) {
	want.SetGroupVersionKind(w.version.WithKind(kind))
	var stored *unstructured.Unstructured
	if decision == create {
		stored, err = w.api.Create(ctx, want, metav1.CreateOptions{})
	} else {
		stored, err = w.api.Update(ctx, want, metav1.UpdateOptions{})
	}
	switch {
	case apierrors.IsAlreadyExists(err) || apierrors.IsConflict(err):
		return nil // the informer hasn't seen yet what the server has
	case err != nil:
		return fmt.Errorf("write DeviceClass %s: %w", want.GetName(), err)
	case stored.GetResourceVersion() != want.GetResourceVersion():
		klog.FromContext(ctx).Info("Wrote a DeviceClass", "class", want.GetName(), "version", w.version.String())
	}
	if lostName(stored, want) {
		if w.lacksUntil.IsZero() {
			w.event(ctx, stored, corev1.EventTypeNormal, "ExtendedResourceNotStored", extendedResourceNotStored)
		}
		w.lacksUntil = w.clock.Now().Add(askAgainAfter)
	}
	return nil
}

const extendedResourceNotStored = "the API server doesn't store spec.extendedResourceName: pods can get devices of this class by claims, " +
	"not by resources.limits. Kubernetes 1.36 and later store it; on 1.34 and 1.35 turn on the feature gate DRAExtendedResource " +
	"on kube-apiserver, kube-scheduler, kube-controller-manager and the kubelets"

const overwritten = "Somebody else changes or deletes this DeviceClass again and again. Look for programs that restore, prune or delete objects. " +
	"Until that ends, the controller writes it less and less often"

// contentOf returns the fields of a class that are written.
func contentOf(want *unstructured.Unstructured) string {
	return undone.Content([]any{want.GetLabels(), want.GetOwnerReferences(), want.Object["spec"]})
}

// warnForeign writes an event about a class of somebody else, once for each version
// of it.
func (w writer) warnForeign(ctx context.Context, have *unstructured.Unstructured) {
	if w.warned[have.GetName()] == have.GetResourceVersion() {
		return
	}
	w.warned[have.GetName()] = have.GetResourceVersion()
	w.event(ctx, have, corev1.EventTypeWarning, "NotOverwritten", w.wanted.notOverwritten(have))
}

// notOverwritten returns the message about a class that has a wanted name and isn't
// overwritten: the reason and the remedy.
func (w *Wanted) notOverwritten(have *unstructured.Unstructured) string {
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
func maker(o *unstructured.Unstructured) string {
	if release := o.GetAnnotations()["meta.helm.sh/release-name"]; release != "" {
		return fmt.Sprintf("of the Helm release %s in namespace %s", release, o.GetAnnotations()["meta.helm.sh/release-namespace"])
	}
	var managers []string
	for _, m := range o.GetManagedFields() {
		managers = append(managers, m.Manager)
	}
	if len(managers) == 0 {
		return "of somebody else"
	}
	return "written by " + strings.Join(managers, ", ")
}

func (w writer) event(ctx context.Context, about *unstructured.Unstructured, kind, reason, message string) {
	klog.FromContext(ctx).Info("A DeviceClass differs from the release's", "class", about.GetName(), "reason", reason, "message", message)
	w.recorder.Eventf(about, nil, kind, reason, "Apply", "%s", message)
}

// Request maps each event of a class to the one request for all.
func Request(any) []reconcile.Request { return []reconcile.Request{{}} }

// RequestServerChanged is the request after a change of the API server.
func RequestServerChanged() reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Name: ServerChanged}}
}
