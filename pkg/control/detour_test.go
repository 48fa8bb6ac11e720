//go:build integration && faults

package control_test

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"k8s.io/client-go/rest"
)

// detour is a proxy for the API server that one controller uses. It records that
// controller's successful writes, and can be cut like a network: nothing arrives, no
// connection ends, and all that was sent arrives when it is mended.
type detour struct {
	kubeconfig string

	mu     sync.Mutex
	mended *sync.Cond
	cut    bool
	writes []string
}

func newDetour(t *testing.T) *detour {
	t.Helper()
	d := &detour{kubeconfig: filepath.Join(t.TempDir(), "kubeconfig")}
	d.mended = sync.NewCond(&d.mu)
	config := serverConfig(t)
	server, err := url.Parse(config.Host)
	if err != nil {
		t.Fatal(err)
	}
	transport, err := rest.TransportFor(config)
	if err != nil {
		t.Fatal(err)
	}
	proxy := httptest.NewServer(&httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(server) },
		Transport:     transport,
		FlushInterval: -1,
		ModifyResponse: func(r *http.Response) error {
			d.record(r)
			return nil
		},
	})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		d.mend()
		_ = listener.Close()
		proxy.CloseClientConnections()
		proxy.Close()
	})
	go d.accept(listener, proxy.Listener.Addr().String())
	const file = `{"apiVersion": "v1", "kind": "Config", "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
"clusters": [{"name": "c", "cluster": {"server": "http://%s"}}], "users": [{"name": "u", "user": {}}]}`
	if err := os.WriteFile(d.kubeconfig, fmt.Appendf(nil, file, listener.Addr()), 0o600); err != nil {
		t.Fatal(err)
	}
	return d
}

// record records a write of an object other than the Lease, which says who may write.
func (d *detour) record(r *http.Response) {
	path := r.Request.URL.Path
	if r.Request.Method == http.MethodGet || r.StatusCode >= http.StatusMultipleChoices ||
		r.Request.URL.Query().Has("dryRun") || strings.Contains(path, "/leases") {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.writes = append(d.writes, r.Request.Method+" "+path)
}

// written returns what was written since it was called last.
func (d *detour) written() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	writes := d.writes
	d.writes = nil
	return writes
}

func (d *detour) accept(listener net.Listener, to string) {
	for {
		client, err := listener.Accept()
		if err != nil {
			return // closed
		}
		server, err := net.Dial("tcp", to)
		if err != nil {
			_ = client.Close()
			continue
		}
		go d.pass(client, server)
		go d.pass(server, client)
	}
}

// pass passes on what one side sends, and that it has closed the connection.
func (d *detour) pass(from, to net.Conn) {
	defer from.Close()
	defer to.Close()
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		d.await()
		if _, failed := to.Write(buffer[:n]); err != nil || failed != nil {
			return
		}
	}
}

// await returns when the way isn't cut.
func (d *detour) await() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for d.cut {
		d.mended.Wait()
	}
}

func (d *detour) sever() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.cut = true
}

func (d *detour) mend() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.cut = false
	d.mended.Broadcast()
}
