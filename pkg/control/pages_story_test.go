//go:build integration

package control_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// TestListsInPages: where it doesn't stream them, the controller lists the objects of
// large clusters in pages, and knows those of the last one.
func TestListsInPages(t *testing.T) {
	for _, s := range servers() {
		t.Run(s.String(), func(t *testing.T) {
			s.start(t)
			n := newMIGNode(t, 2)
			n.report(t)
			n.startPlugin(t)
			for i := range 250 {
				claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("a-%d", i)}}
				claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "any"}}}
				if _, err := claims.Create(t.Context(), claim, metav1.CreateOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			last := n.give(t, "gpu-00000001-mps4-0")
			lists := recordLists(t)
			t.Setenv("KUBE_FEATURE_WatchListClient", "false") // as if the server didn't stream
			startController(t)
			p := n.governs(t, v1alpha1.Plan{Exclusive: &v1alpha1.ExclusivePlan{}})
			applied(t, p, v1alpha1.ReasonWaiting)
			want := []v1alpha1.WaitingDevice{{Node: n.name, Device: "gpu-00000001-mps4-0", Claim: "default/" + last.Name}}
			if diff := cmp.Diff(want, p.Status.Waiting); diff != "" {
				t.Errorf("waiting (-want +got):\n%s", diff)
			}
			pages := lists.pages(t)
			for resource, atLeast := range map[string]int{"resourceslices": 1, "resourceclaims": 3, "gpuinventories": 1, "nodes": 1} {
				if pages[resource] < atLeast {
					t.Errorf("%d pages of %s were listed, want %d", pages[resource], resource, atLeast)
				}
			}
		})
	}
}

// lists are the requests for lists that passed.
type lists struct {
	to http.RoundTripper

	mu  sync.Mutex
	all []*url.URL
}

// recordLists has controllers reach the API server through a proxy that records lists.
func recordLists(t *testing.T) *lists {
	t.Helper()
	config := serverConfig(t)
	transport, err := rest.TransportFor(config)
	if err != nil {
		t.Fatal(err)
	}
	to, err := url.Parse(config.Host)
	if err != nil {
		t.Fatal(err)
	}
	l := &lists{to: transport}
	proxy := httptest.NewServer(&httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) }, Transport: l, FlushInterval: -1, // watches
	})
	t.Cleanup(proxy.CloseClientConnections)
	kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	file := "{apiVersion: v1, kind: Config, current-context: p, contexts: [{name: p, context: {cluster: p}}], clusters: [{name: p, cluster: {server: '" + proxy.URL + "'}}]}"
	if err := os.WriteFile(kubeconfig, []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	return l
}

// RoundTrip implements http.RoundTripper.
func (l *lists) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodGet && !r.URL.Query().Has("watch") {
		l.mu.Lock()
		l.all = append(l.all, r.URL)
		l.mu.Unlock()
	}
	return l.to.RoundTrip(r)
}

// pages counts the pages of each resource. A list for a cache that isn't in pages, or of
// older objects, is an error.
func (l *lists) pages(t *testing.T) map[string]int {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make(map[string]int)
	for _, u := range l.all {
		query := u.Query()
		resource := path.Base(u.Path)
		switch resource {
		case "resourceslices", "resourceclaims", "gpuinventories", "nodes":
		default:
			continue
		}
		if strings.Contains(query.Get("fieldSelector"), "spec.nodeName=") {
			continue // the slices of one node
		}
		if query.Get("limit") != "100" || query.Get("resourceVersion") != "" {
			t.Errorf("%s was listed with %q", resource, u.RawQuery)
		}
		out[resource]++
	}
	return out
}
