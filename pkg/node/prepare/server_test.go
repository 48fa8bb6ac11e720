package prepare_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"path"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/version"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/rest"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// server is the API server: it has claims, by name, and doesn't answer as to those of which
// nothing was set.
type server struct {
	mu     sync.Mutex
	claims map[string]*resourceapi.ResourceClaim
	state  map[string]state
	asked  chan types.UID // one for each question, as far as there is room
	// version is what the server says of itself; empty: nothing.
	version string
	// statuses are those of claims that were written.
	statuses  chan string
	inventory *v1alpha1.GPUInventory
}

// state is what the API server says of a claim.
type state int

const (
	unknown state = iota
	deleted
	deallocated
	inUse // by a pod of its name
)

func newServer() *server {
	return &server{
		claims: map[string]*resourceapi.ResourceClaim{}, state: map[string]state{}, asked: make(chan types.UID, 100),
		version: "v1.36.3", statuses: make(chan string, 100),
		inventory: &v1alpha1.GPUInventory{
			TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "GPUInventory"},
			ObjectMeta: metav1.ObjectMeta{Name: pool, UID: "inventory", ResourceVersion: "1"},
		},
	}
}

// allocated stores a claim as it is allocated.
func (s *server) allocated(c *resourceapi.ResourceClaim) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.claims[c.Name] = c
}

func (s *server) set(name string, to state) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state[name] = to
}

// ResourceClaims implements resourceclient.ResourceClaimsGetter.
func (s *server) ResourceClaims(string) resourceclient.ResourceClaimInterface { return reader{s: s} }

// reader reads claims; the plugin does nothing else with them.
type reader struct {
	resourceclient.ResourceClaimInterface
	s *server
}

var errAway = errors.New("connection refused")

func (r reader) Get(_ context.Context, name string, _ metav1.GetOptions) (*resourceapi.ResourceClaim, error) {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	select {
	case r.s.asked <- types.UID(name):
	default:
	}
	switch r.s.state[name] {
	case deleted:
		return nil, apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), name)
	case deallocated:
		return newClaimWithoutAllocation(name), nil
	case inUse:
		c := newClaimWithoutAllocation(name)
		if known := r.s.claims[name]; known != nil {
			c = known.DeepCopy()
		}
		c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: name, UID: "pod"}}
		return c, nil
	case unknown:
	}
	return nil, errAway
}

func newClaimWithoutAllocation(name string) *resourceapi.ResourceClaim {
	c := newClaim(name)
	c.Status.Allocation = nil
	return c
}

func (s *server) setVersion(version string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version = version
}

// ServerVersionWithContext implements discovery.ServerVersionInterfaceWithContext.
func (s *server) ServerVersionWithContext(context.Context) (*version.Info, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &version.Info{GitVersion: s.version}, nil
}

// condition is the double allocation in the GPUInventory; nil: there is none.
func (s *server) condition() *metav1.Condition {
	s.mu.Lock()
	defer s.mu.Unlock()
	return meta.FindStatusCondition(s.inventory.Status.Conditions, v1alpha1.ConditionDoubleAllocation)
}

// config reaches the server without a network.
func (s *server) config() *rest.Config {
	return &rest.Config{Host: "http://server", QPS: -1, Transport: s}
}

// RoundTrip implements http.RoundTripper for the objects that the plugin writes: statuses of
// claims, and the GPUInventory.
func (s *server) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Query().Get("watch") != "" {
		return s.watch(r), nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	list := metav1.ListMeta{ResourceVersion: "1"}
	switch _, resource, _ := strings.Cut(r.URL.Path, "/namespaces/default/"); {
	case resource == "" && strings.HasSuffix(r.URL.Path, "/nodes"):
		return respond(r, corev1.NodeList{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NodeList"}, ListMeta: list,
			Items: []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: pool, UID: "node"}}},
		})
	case strings.HasSuffix(r.URL.Path, "/gpuinventories"):
		return respond(r, v1alpha1.GPUInventoryList{
			TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "GPUInventoryList"}, ListMeta: list,
			Items: []v1alpha1.GPUInventory{*s.inventory},
		})
	case resource == "": // the inventory's status
		inv := &v1alpha1.GPUInventory{}
		if err := json.NewDecoder(r.Body).Decode(inv); err != nil {
			return nil, err
		}
		inv.ResourceVersion += "1"
		s.inventory = inv
		return respond(r, inv)
	case r.Method == http.MethodPatch:
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return nil, err
		}
		s.statuses <- string(body)
		return respond(r, json.RawMessage(body))
	default:
		c := s.claims[path.Base(resource)].DeepCopy()
		c.TypeMeta = metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaim"}
		return respond(r, c)
	}
}

// watch has no events: the server's objects are changed by the plugin alone.
func (s *server) watch(r *http.Request) *http.Response {
	if r.URL.Query().Get("sendInitialEvents") != "" {
		refused, _ := respond(r, apierrors.NewInvalid(schema.GroupKind{Kind: "ListOptions"}, "", nil).Status())
		refused.StatusCode = http.StatusUnprocessableEntity
		return refused
	}
	body, end := io.Pipe()
	context.AfterFunc(r.Context(), func() { end.Close() })
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Body: body, Request: r}
}

func respond(r *http.Request, object any) (*http.Response, error) {
	data, err := json.Marshal(object)
	return &http.Response{
		StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(bytes.NewReader(data)), Request: r,
	}, err
}
