//go:build prometheus

package monitoring

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/tessera-dra/tessera/sim/cluster"
)

// prometheus is a running Prometheus.
type prometheus struct{ url string }

// startPrometheus starts the program with a configuration, and ends it with the test.
func startPrometheus(t *testing.T, config string) *prometheus {
	t.Helper()
	dir, address := t.TempDir(), freeAddress(t)
	file := filepath.Join(dir, "prometheus.yaml")
	write(t, file, config)
	start(t, "prometheus", "--config.file="+file, "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+address)
	p := &prometheus{url: "http://" + address}
	await(t, "Prometheus", func(ctx context.Context) error { return p.get(ctx, "/-/ready", nil) })
	return p
}

// start builds a program if need be and starts it. It ends with the test, which shows
// its log if it fails.
func start(t *testing.T, name string, args ...string) {
	t.Helper()
	program, err := cluster.Tool(t.Context(), name, os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = log, log
	// If this program is killed, so is the other: the signal comes when the thread ends.
	runtime.LockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("log of %s:\n%s", name, text)
		}
	})
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// freeAddress is one that nothing listens on.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// get reads an answer of Prometheus' HTTP API into result, if that isn't nil.
func (p *prometheus) get(ctx context.Context, path string, result any) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, p.url+path, http.NoBody)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if result == nil && response.StatusCode == http.StatusOK {
		return nil
	}
	var answer struct {
		Data  json.RawMessage
		Error string
	}
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		return fmt.Errorf("%s: %w", response.Status, err)
	}
	if answer.Error != "" {
		return errors.New(answer.Error)
	}
	return json.Unmarshal(answer.Data, result)
}

// sample is one series of a query's result.
type sample struct {
	Metric map[string]string
	Value  [2]any // time and value
}

// query returns the samples of an instant query that have a number.
func (p *prometheus) query(ctx context.Context, expr string) ([]sample, error) {
	var data struct {
		ResultType string
		Result     []sample
	}
	if err := p.get(ctx, "/api/v1/query?query="+url.QueryEscape(expr), &data); err != nil {
		return nil, err
	}
	var found []sample
	for _, s := range data.Result {
		if s.Value[1] != "NaN" {
			found = append(found, s)
		}
	}
	return found, nil
}

// has waits until a query has data, and returns them.
func (p *prometheus) has(t *testing.T, name, expr string) []sample {
	t.Helper()
	var found []sample
	await(t, name+": "+expr, func(ctx context.Context) (err error) {
		if found, err = p.query(ctx, expr); err == nil && len(found) == 0 {
			err = errors.New("no data")
		}
		return err
	})
	return found
}

// await repeats a call until it succeeds.
func await(t *testing.T, name string, call func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		err := call(ctx)
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("%s: after %s: %v", name, patience, err)
		case <-time.After(500 * time.Millisecond):
		}
	}
}
