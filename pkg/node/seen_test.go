package node

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/report"
	"github.com/tessera-dra/tessera/pkg/pacetest"
)

// reporting is an API server that has a node's report; nil: none. It may be away.
type reporting struct {
	inventory *v1alpha1.GPUInventory
	away      bool
	requests  int
}

// RoundTrip implements http.RoundTripper.
func (r *reporting) RoundTrip(*http.Request) (*http.Response, error) {
	r.requests++
	status, body := http.StatusOK, any(r.inventory)
	switch {
	case r.away:
		return nil, unix.ECONNREFUSED
	case r.inventory == nil:
		status, body = http.StatusNotFound, map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": status}
	}
	data, err := json.Marshal(body)
	return &http.Response{StatusCode: status, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(bytes.NewReader(data))}, err
}

// TestRecallGPUs checks where a plugin that starts knows the node's GPUs from: the journal or,
// if that has no list of them, the report of the plugin before, as after an upgrade from a
// release whose journal had none. GPUs of a Node that was deleted don't count.
func TestRecallGPUs(t *testing.T) {
	reported := &v1alpha1.GPUInventory{}
	reported.Kind, reported.APIVersion, reported.Name, reported.Status.BootID = "GPUInventory", v1alpha1.GroupVersion.String(), "node-0", "reported"
	inventory.SetFacts(&reported.Status, gpu.Node{Name: "node-0", GPUs: []gpu.GPU{{UUID: "GPU-of-the-report", Minor: 1}}})
	for name, tc := range map[string]struct {
		journal    func(*testing.T, *journal.Journal, string) // makes it
		server     reporting
		want       string // the boot of the list; empty: none
		wantLogged string
		tookOver   bool
		wantAsked  bool
	}{
		"the journal has them":                         {journal: putSeen, server: reporting{inventory: reported}, want: "journal", wantAsked: true},
		"the journal has them, and the server is away": {journal: putSeen, server: reporting{away: true}, want: "journal", wantAsked: true},
		"the Node was deleted":                         {journal: putSeen, wantAsked: true},
		"a takeover":                                   {journal: putSeen, tookOver: true, want: "journal"},
		"an upgrade":                                   {server: reporting{inventory: reported}, want: "reported", wantAsked: true},
		"an installation":                              {wantAsked: true},
		"the server is away":                           {server: reporting{away: true}, wantLogged: "may go unnoticed", wantAsked: true},
		"the list is unreadable":                       {journal: putGarbage, server: reporting{inventory: reported}, want: "reported", wantLogged: "gpus.corrupt", wantAsked: true},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			j, err := journal.Open(dir, nil)
			if err != nil {
				t.Fatal(err)
			}
			if tc.journal != nil {
				tc.journal(t, j, dir)
			}
			j.Close()
			if j, err = journal.Open(dir, nil); err != nil {
				t.Fatal(err)
			}
			defer j.Close()
			r, err := report.New(report.Config{NodeName: "node-0", REST: &rest.Config{Host: "http://server", QPS: -1, Transport: &tc.server}})
			if err != nil {
				t.Fatal(err)
			}
			logger, lines := pacetest.Logger(t)
			(&plugin{cfg: Config{NodeName: "node-0"}, tenure: tenure{tookOver: tc.tookOver}, journal: j, reporter: r}).recallGPUs(klog.NewContext(t.Context(), logger))
			got, ok := j.Seen()
			if ok != (tc.want != "") || got.BootID != tc.want {
				t.Errorf("the list is of boot %q: %t, want %q", got.BootID, ok, tc.want)
			}
			if tc.want == "reported" {
				if diff := cmp.Diff(inventory.Node(reported).GPUs, got.GPUs); diff != "" {
					t.Errorf("GPUs (-reported +got):\n%s", diff)
				}
			}
			if asked := tc.server.requests > 0; asked != tc.wantAsked {
				t.Errorf("the server was asked: %t, want %t", asked, tc.wantAsked)
			}
			if (lines() > 0) != (tc.wantLogged != "") || !strings.Contains(logger.GetSink().(ktesting.Underlier).GetBuffer().String(), tc.wantLogged) {
				t.Errorf("logged %q, want %q in it", logger.GetSink().(ktesting.Underlier).GetBuffer().String(), tc.wantLogged)
			}
		})
	}
}

func putSeen(t *testing.T, j *journal.Journal, _ string) {
	if err := j.PutSeen(holding.Seen{BootID: "journal", GPUs: []gpu.GPU{{UUID: "GPU-of-the-journal"}}}); err != nil {
		t.Fatal(err)
	}
}

func putGarbage(t *testing.T, _ *journal.Journal, dir string) {
	if err := os.Mkdir(filepath.Join(dir, "seen"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "seen", "gpus.json"), []byte("garbage"), 0o600); err != nil {
		t.Fatal(err)
	}
}
