package control

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"k8s.io/client-go/kubernetes"
)

// TestRenewedToken: a token that was replaced in its file, and that the server refuses now,
// costs one request.
func TestRenewedToken(t *testing.T) {
	var valid atomic.Value
	valid.Store("first")
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+valid.Load().(string) {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		fmt.Fprint(w, `{"gitVersion": "v1.37.0"}`)
	}))
	t.Cleanup(server.Close)
	kubeconfig, token := filepath.Join(t.TempDir(), "kubeconfig"), filepath.Join(t.TempDir(), "token")
	write := func(file, text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(kubeconfig, fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
"clusters": [{"name": "c", "cluster": {"server": %q}}], "users": [{"name": "u", "user": {"tokenFile": %q}}]}`, server.URL, token))
	write(token, "first")
	config, err := RESTConfig(kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(clientConfig(config))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"first", "second"} {
		write(token, want)
		valid.Store(want)
		_, err := client.Discovery().ServerVersion()
		if want == "second" && err == nil {
			t.Error("the old token is accepted")
		} else if want == "second" {
			_, err = client.Discovery().ServerVersion()
		}
		if err != nil {
			t.Errorf("with the %s token: %v", want, err)
		}
	}
}
