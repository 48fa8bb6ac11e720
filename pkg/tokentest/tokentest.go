// Package tokentest checks that programs read the token of their service account again: the
// kubelet renews it when a fifth of its life is left, at least two minutes.
package tokentest

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// bearer is an API server that records the last token.
type bearer struct{ got string }

// RoundTrip implements http.RoundTripper.
func (b *bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	b.got = r.Header.Get("Authorization")
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: io.NopCloser(strings.NewReader("{}")), Request: r}, nil
}

// Renewed checks that clients with a program's configuration, which config returns for a
// kubeconfig file, send a new token within a minute after its file has changed.
func Renewed(t *testing.T, config func(kubeconfig string) (*rest.Config, error)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		kubeconfig, token := filepath.Join(t.TempDir(), "kubeconfig"), filepath.Join(t.TempDir(), "token")
		write := func(file, text string) {
			t.Helper()
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		// The token is sent only over TLS.
		write(kubeconfig, fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
"clusters": [{"name": "c", "cluster": {"server": "https://server"}}], "users": [{"name": "u", "user": {"tokenFile": %q}}]}`, token))
		write(token, "first")
		c, err := config(kubeconfig)
		if err != nil {
			t.Fatal(err)
		}
		server := &bearer{}
		c.Transport = server
		client, err := kubernetes.NewForConfig(c)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"first", "second", "third"} {
			write(token, want)
			<-time.After(time.Minute) // the bubble's
			if _, err := client.Discovery().ServerVersion(); err != nil || server.got != "Bearer "+want {
				t.Errorf("got %q, %v, want the %s token", server.got, err, want)
			}
		}
	})
}
