package node

import (
	"context"
	"net/http"
	"net/http/httptest"
	"sync"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/kubernetes"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/rest"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/claimstatus"
	"github.com/tessera-dra/tessera/pkg/node/events"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/report"
)

// claimReader reads claims, as the plugin does from the API server.
type claimReader func(ctx context.Context, name string) (*resourceapi.ResourceClaim, error)

// ResourceClaims implements resourceclient.ResourceClaimsGetter.
func (r claimReader) ResourceClaims(string) resourceclient.ResourceClaimInterface {
	return claimGetter{read: r}
}

// ServerVersionWithContext implements discovery.ServerVersionInterfaceWithContext: the server
// doesn't say it, so no double allocation is reported.
func (claimReader) ServerVersionWithContext(context.Context) (*version.Info, error) {
	return &version.Info{}, nil
}

type claimGetter struct {
	resourceclient.ResourceClaimInterface
	read claimReader
}

func (g claimGetter) Get(ctx context.Context, name string, _ metav1.GetOptions) (*resourceapi.ResourceClaim, error) {
	return g.read(ctx, name)
}

// deletedClaims are those of an API server where all claims have been deleted.
func deletedClaims(_ context.Context, name string) (*resourceapi.ResourceClaim, error) {
	return nil, apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), name)
}

// inUse returns the claim as it is when a pod uses it.
func inUse(c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	c = c.DeepCopy()
	c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod-" + c.Name, UID: types.UID("pod-" + c.Name)}}
	return c
}

// writers are the parts of a plugin that write to the API server, of which nothing is kept.
type writers struct {
	events   *events.Events
	statuses *claimstatus.Writer
	reporter *report.Reporter
}

func newWriters(known *facts.Facts) (*writers, error) {
	server := &rest.Config{Host: "http://server", QPS: -1, Transport: forgetful{}}
	client, err := kubernetes.NewForConfig(server)
	if err != nil {
		return nil, err
	}
	reporter, err := report.New(report.Config{NodeName: "node-0", REST: server, Facts: known})
	return &writers{events: events.New("test", "node-0"), statuses: claimstatus.New(client, gpu.DriverName, "node-0"), reporter: reporter}, err
}

// run runs until ctx ends.
func (w *writers) run(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Go(func() { _ = w.events.Run(ctx, forgetful{}) })
	wg.Go(func() { _ = w.statuses.Run(ctx) })
	wg.Wait()
}

// forgetful is an API server that has nothing, without a network.
type forgetful struct{}

// RoundTrip implements http.RoundTripper.
func (forgetful) RoundTrip(*http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	w.WriteHeader(http.StatusNotFound)
	return w.Result(), nil
}

// Create, Update and Patch implement record.EventSink.
func (forgetful) Create(e *corev1.Event) (*corev1.Event, error)          { return e, nil }
func (forgetful) Update(e *corev1.Event) (*corev1.Event, error)          { return e, nil }
func (forgetful) Patch(e *corev1.Event, _ []byte) (*corev1.Event, error) { return e, nil }
