package node

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/tessera-dra/tessera/pkg/node/facts"
)

// valid is a configuration without mistakes.
func valid(t *testing.T) Config {
	t.Helper()
	t.Setenv("NODE_NAME", "node-0")
	var c Config
	c.AddFlags(pflag.NewFlagSet("", pflag.ContinueOnError))
	dir := t.TempDir()
	c.KubeletRoot, c.DataDir, c.CDIDir = dir, filepath.Join(dir, "data"), filepath.Join(dir, "cdi")
	c.CDIHook = filepath.Join(dir, "hook")
	if err := os.WriteFile(c.CDIHook, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestValidate(t *testing.T) {
	ok := valid(t)
	if err := ok.Validate(); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"no node":            {func(c *Config) { c.NodeName = "" }, "--node-name: is required"},
		"no name of a node":  {func(c *Config) { c.NodeName = "Node 0" }, `--node-name: "Node 0"`},
		"relative data dir":  {func(c *Config) { c.DataDir = "data" }, `--data-dir: "data"`},
		"no kubelet there":   {func(c *Config) { c.KubeletRoot = "/nothing/there" }, "--kubelet-root: "},
		"no host there":      {func(c *Config) { c.HostRoot = "/nothing/there" }, "--host-root: "},
		"hook is a text":     {func(c *Config) { c.CDIHook = "/proc/version" }, "--cdi-hook: /proc/version is not executable"},
		"no hook":            {func(c *Config) { c.CDIHook = "/nothing/there" }, "--cdi-hook: "},
		"relative root":      {func(c *Config) { c.DriverRoot = "driver" }, `--driver-root: "driver"`},
		"relative cdi dir":   {func(c *Config) { c.CDIDir = "" }, "--cdi-dir: "},
		"all mistakes named": {func(c *Config) { c.NodeName, c.CDIDir = "", "" }, "--node-name"},
	} {
		t.Run(name, func(t *testing.T) {
			c := ok
			tc.change(&c)
			if err := c.Validate(); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

func TestWrongKubeconfig(t *testing.T) {
	garbage := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(garbage, []byte("garbage"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, path := range map[string]string{"none": "/nothing/there", "garbage": garbage, "outside of a pod": ""} {
		t.Run(name, func(t *testing.T) {
			c := valid(t)
			c.Kubeconfig = path
			err := Run(t.Context(), c)
			if err == nil || !strings.Contains(err.Error(), "--kubeconfig: ") {
				t.Errorf("got %v, want an error that names --kubeconfig", err)
			}
			if _, err := os.Stat(c.DataDir); err == nil {
				t.Error("a plugin that can't run has left something behind")
			}
		})
	}
}

func TestInstallHook(t *testing.T) {
	c := valid(t)
	path, err := installHook(c.CDIHook, c.DataDir)
	if err != nil {
		t.Fatal(err)
	}
	first, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if first.Mode() != 0o755 {
		t.Errorf("mode %v", first.Mode())
	}
	if _, err := installHook(c.CDIHook, c.DataDir); err != nil {
		t.Fatal(err)
	}
	if again, err := os.Stat(path); err != nil || !os.SameFile(first, again) {
		t.Errorf("the same program was installed again (%v)", err)
	}
	if err := os.WriteFile(c.CDIHook, []byte("#!/bin/sh\n# newer\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := installHook(c.CDIHook, c.DataDir); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff("#!/bin/sh\n# newer\n", string(got)); diff != "" {
		t.Errorf("the newer program (-want +got):\n%s", diff)
	}
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

func TestOnePluginAtATime(t *testing.T) {
	c := valid(t)
	first, err := lockDataDir(t.Context(), c.DataDir)
	if err != nil {
		t.Fatal(err)
	}
	waiting, cancel := context.WithCancel(t.Context())
	second := make(chan error)
	go func() {
		f, err := lockDataDir(waiting, c.DataDir)
		if err == nil {
			f.Close()
		}
		second <- err
	}()
	cancel()
	if err := <-second; err == nil {
		t.Error("two plugins use one directory")
	}
	go func() {
		f, err := lockDataDir(t.Context(), c.DataDir)
		if err == nil {
			f.Close()
		}
		second <- err
	}()
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-second; err != nil {
		t.Errorf("the next plugin: %v", err)
	}
}

// The file that a waiting plugin has open may be gone when it gets its turn.
func TestOnePluginAtATimeAfterALeave(t *testing.T) {
	c := valid(t)
	first, err := lockDataDir(t.Context(), c.DataDir)
	if err != nil {
		t.Fatal(err)
	}
	locked := make(chan *os.File)
	go func() {
		f, err := lockDataDir(t.Context(), c.DataDir)
		if err != nil {
			t.Error(err)
		}
		locked <- f
	}()
	waitOpen(t, filepath.Join(c.DataDir, lockFile), 2)
	if err := errors.Join(cleanDataDir(c.DataDir), first.Close()); err != nil {
		t.Fatal(err)
	}
	second := <-locked
	defer second.Close()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if third, err := lockDataDir(ended, c.DataDir); err == nil {
		third.Close()
		t.Error("two plugins use one directory")
	}
}

// waitOpen waits until this process has the file open so many times.
func waitOpen(t *testing.T, path string, times int) {
	t.Helper()
	for range 60_000 {
		n := 0
		fds, err := filepath.Glob("/proc/self/fd/*")
		if err != nil {
			t.Fatal(err)
		}
		for _, fd := range fds {
			if target, err := os.Readlink(fd); err == nil && target == path {
				n++
			}
		}
		if n >= times {
			return
		}
		<-time.After(time.Millisecond)
	}
	t.Fatalf("%s is not open %d times", path, times)
}

func TestLeave(t *testing.T) {
	c := valid(t)
	if _, err := installHook(c.CDIHook, c.DataDir); err != nil {
		t.Fatal(err)
	}
	lock, err := lockDataDir(t.Context(), c.DataDir)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := os.Mkdir(filepath.Join(c.DataDir, journalDir), 0o700); err != nil {
		t.Fatal(err)
	}
	foreign := filepath.Join(c.DataDir, journalDir, "notes.txt")
	for _, path := range []string{foreign, filepath.Join(c.DataDir, hookTemp)} {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := cleanDataDir(c.DataDir); err != nil {
		t.Errorf("with a file of somebody else: %v", err)
	}
	if err := os.Remove(foreign); err != nil {
		t.Fatal(err)
	}
	if err := cleanDataDir(c.DataDir); err != nil {
		t.Fatal(err)
	}
	if left, err := fs.Glob(os.DirFS(c.DataDir), "*"); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestMetricsAddressInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	err = serve(t.Context(), "--metrics-address", l.Addr().String(), metricsHandler(newRegistry()))
	if err == nil || !strings.Contains(err.Error(), "--metrics-address: ") {
		t.Errorf("got %v, want an error that names --metrics-address", err)
	}
}

// Metrics and probes have addresses of their own, so that metrics can be turned
// off, or kept to the pod, while the kubelet still probes.
func TestMetricsAndProbesAreServedApart(t *testing.T) {
	notReady := func() error { return os.ErrDeadlineExceeded }
	for name, c := range map[string]struct {
		handler http.Handler
		want    map[string]int
	}{
		"metrics": {metricsHandler(newRegistry()), map[string]int{"/healthz": 404, "/readyz": 404, "/metrics": 200}},
		"health":  {healthHandler(checks{healthy: func() error { return nil }, ready: notReady}), map[string]int{"/healthz": 200, "/readyz": 503, "/metrics": 404}},
	} {
		t.Run(name, func(t *testing.T) {
			got := map[string]int{}
			for path := range c.want {
				answer := httptest.NewRecorder()
				c.handler.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, path, nil))
				got[path] = answer.Code
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("status codes (-want +got):\n%s", diff)
			}
		})
	}
}

// A plugin that the kubelet doesn't register stops a rollout; a node without a
// driver doesn't.
func TestReadyOnceRegistered(t *testing.T) {
	p := &plugin{facts: facts.New("node-a")}
	if p.facts.Trouble() == nil {
		t.Fatal("there is no trouble without a driver")
	}
	if err := p.ready(); err == nil {
		t.Error("ready before the kubelet has registered it")
	}
	p.registered.Store(true)
	if err := p.ready(); err != nil {
		t.Errorf("registered, without a driver: %v, want ready", err)
	}
}

func TestServe(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error)
	ok := func() error { return nil }
	go func() {
		served <- serve(ctx, "--health-address", address, healthHandler(checks{healthy: ok, ready: ok}))
	}()
	var resp *http.Response
	for range 6000 { // until it listens
		if resp, err = http.Get("http://" + address + "/readyz"); err == nil {
			break
		}
		<-time.After(10 * time.Millisecond)
	}
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("/readyz: %d, want 200", resp.StatusCode)
	}
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
}

// TestEndIsNotWaitedForLong: a part that hangs doesn't keep the plugin from
// ending, so that the next one gets the lock.
func TestEndIsNotWaitedForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hangs := make(chan error)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := endWithin(ctx, stopWithin, func() error { return <-hangs }); err == nil || !strings.Contains(err.Error(), "did not stop") {
			t.Errorf("got %v, want an error that says that the plugin did not stop", err)
		}
		hangs <- nil
		if err := endWithin(ctx, stopWithin, func() error { return os.ErrClosed }); !errors.Is(err, os.ErrClosed) {
			t.Errorf("got %v, want what the parts returned", err)
		}
	})
}
