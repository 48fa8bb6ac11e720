package kubelet

import (
	"context"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drapbv1 "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// LookOften makes a plugin check the sockets every 10 milliseconds.
func (p *Plugin) LookOften() { p.every = 10 * time.Millisecond }

// NewHandler returns what answers a kubelet's calls, without sockets.
func NewHandler(c Config) kubeletplugin.DRAPlugin { return &handler{cfg: c, gate: &gate{}} }

// HealthKnownWithin is how old the facts may be.
const HealthKnownWithin = healthKnownWithin

// ReportConflict reports the result of a check for other drivers.
func (p *Plugin) ReportConflict(ctx context.Context, err error) { p.reportConflict(ctx, err) }

// Prepare prepares claims as in a call of the kubelet.
func Prepare(ctx context.Context, plugin kubeletplugin.DRAPlugin, claims ...*resourceapi.ResourceClaim) error {
	_, err := plugin.(*handler).gate.handle(ctx, &drapbv1.NodePrepareResourcesRequest{}, nil, func(ctx context.Context, _ any) (any, error) {
		return plugin.PrepareResourceClaims(ctx, claims)
	})
	return err
}

// JournalOf returns a journal with these records.
func JournalOf(t *testing.T, records ...holding.Record) *journal.Journal {
	t.Helper()
	j, err := journal.Open(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range records {
		if err := j.Put(r); err != nil {
			t.Fatal(err)
		}
	}
	return j
}
