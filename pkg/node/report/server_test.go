package report_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// server is an API server with one Node and one GPUInventory at most, both of
// the name "node-0". It keeps to the API's rules on resource versions.
type server struct {
	*httptest.Server

	mu        sync.Mutex
	version   int
	node      *corev1.Node
	inventory *v1alpha1.GPUInventory
	watches   map[chan metav1.WatchEvent]string // by resource
	told      []told
	writes    int
	away      bool
	drop      func(*v1alpha1.GPUInventoryStatus) // removes the fields that the server doesn't store; nil: it stores all
}

// told is a past event. A watch that starts later from an earlier version must
// still receive it.
type told struct {
	resource string
	version  int
	event    metav1.WatchEvent
}

func newServer(t *testing.T) *server {
	t.Helper()
	s := &server{version: 1, watches: make(map[chan metav1.WatchEvent]string)}
	s.node = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-0", UID: "node-uid", ResourceVersion: "1"}}
	s.Server = httptest.NewServer(http.HandlerFunc(s.serve))
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s
}

func (s *server) config() *rest.Config { return &rest.Config{Host: s.URL, QPS: -1} }

// change applies f and sends the event to the watchers.
func (s *server) change(resource string, f func() (event string, object any)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	event, object := f()
	s.tell(resource, event, object)
}

func (s *server) tell(resource, event string, object any) {
	raw, err := json.Marshal(object)
	if err != nil {
		panic(err)
	}
	e := metav1.WatchEvent{Type: event}
	e.Object.Raw = raw
	s.told = append(s.told, told{resource, s.version, e})
	for w, of := range s.watches {
		if of == resource {
			w <- e
		}
	}
}

// request raises spec.publishRequest, as the controller does.
func (s *server) request(n int64) {
	s.change("gpuinventories", func() (string, any) {
		inv := s.inventory.DeepCopy()
		inv.Spec.PublishRequest = n
		s.store(inv)
		return "MODIFIED", inv
	})
}

// allocatable says how many devices of a resource a device plugin offers.
func (s *server) allocatable(resource corev1.ResourceName, count string) {
	s.change("nodes", func() (string, any) {
		s.node = s.node.DeepCopy()
		s.node.ResourceVersion = strconv.Itoa(s.version)
		s.node.Status.Allocatable = corev1.ResourceList{resource: quantity(count)}
		return "MODIFIED", s.withKind(s.node)
	})
}

func (s *server) remove() {
	s.change("gpuinventories", func() (string, any) {
		inv := s.inventory
		s.inventory = nil
		return "DELETED", inv
	})
}

func (s *server) withKind(n *corev1.Node) *corev1.Node {
	n.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}
	return n
}

func (s *server) store(inv *v1alpha1.GPUInventory) {
	inv.TypeMeta = metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "GPUInventory"}
	inv.ResourceVersion = strconv.Itoa(s.version)
	s.inventory = inv
}

func (s *server) setAway(away bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.away = away
}

// get returns the inventory and how many writes there were in all.
func (s *server) get() (*v1alpha1.GPUInventory, int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.inventory, s.writes
}

func (s *server) serve(w http.ResponseWriter, r *http.Request) {
	resource := "nodes"
	if strings.Contains(r.URL.Path, "gpuinventories") {
		resource = "gpuinventories"
	}
	switch q := r.URL.Query(); {
	case q.Get("watch") != "" && q.Get("sendInitialEvents") != "":
		answer(w, apierrors.NewInvalid(schema.GroupKind{Kind: "ListOptions"}, "", nil).Status(), 422)
	case q.Get("watch") != "":
		s.watch(w, r, resource)
	default:
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.away {
			answer(w, apierrors.NewServiceUnavailable("away").Status(), 503)
			return
		}
		s.answer(w, r, resource)
	}
}

func (s *server) watch(w http.ResponseWriter, r *http.Request, resource string) {
	events := make(chan metav1.WatchEvent, 100)
	since, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	s.mu.Lock()
	for _, t := range s.told {
		if t.resource == resource && t.version > since {
			events <- t.event
		}
	}
	s.watches[events] = resource
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.watches, events)
		s.mu.Unlock()
	}()
	w.Header().Set("Content-Type", "application/json")
	w.(http.Flusher).Flush()
	for {
		select {
		case e := <-events:
			json.NewEncoder(w).Encode(e)
			w.(http.Flusher).Flush()
		case <-r.Context().Done():
			return
		}
	}
}

func (s *server) answer(w http.ResponseWriter, r *http.Request, resource string) {
	group := schema.GroupResource{Group: v1alpha1.GroupVersion.Group, Resource: "gpuinventories"}
	list := metav1.ListMeta{ResourceVersion: strconv.Itoa(s.version)}
	switch {
	case resource == "nodes":
		l := corev1.NodeList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NodeList"}, ListMeta: list}
		if s.node != nil {
			l.Items = append(l.Items, *s.node)
		}
		answer(w, l, 200)
	case r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/gpuinventories"):
		l := v1alpha1.GPUInventoryList{TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "GPUInventoryList"}, ListMeta: list}
		if s.inventory != nil {
			l.Items = append(l.Items, *s.inventory)
		}
		answer(w, l, 200)
	case r.Method == http.MethodPost:
		if s.inventory != nil {
			answer(w, apierrors.NewAlreadyExists(group, "node-0").Status(), 409)
			return
		}
		inv := decode(r)
		inv.UID, inv.Status = types.UID("uid-"+strconv.Itoa(s.version)), v1alpha1.GPUInventoryStatus{}
		s.write(w, "ADDED", inv)
	case s.inventory == nil:
		answer(w, apierrors.NewNotFound(group, "node-0").Status(), 404)
	case r.Method == http.MethodGet:
		answer(w, s.inventory, 200)
	default:
		inv := decode(r)
		if inv.ResourceVersion != s.inventory.ResourceVersion {
			answer(w, apierrors.NewConflict(group, "node-0", nil).Status(), 409)
			return
		}
		inv.Spec = s.inventory.Spec
		if s.drop != nil {
			s.drop(&inv.Status)
		}
		s.write(w, "MODIFIED", inv)
	}
}

func (s *server) write(w http.ResponseWriter, event string, inv *v1alpha1.GPUInventory) {
	s.version++
	s.writes++
	s.store(inv)
	s.tell("gpuinventories", event, inv)
	answer(w, inv, 200)
}

func decode(r *http.Request) *v1alpha1.GPUInventory {
	inv := &v1alpha1.GPUInventory{}
	if err := json.NewDecoder(r.Body).Decode(inv); err != nil {
		panic(err)
	}
	return inv
}

func answer(w http.ResponseWriter, object any, code int) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(object)
}
