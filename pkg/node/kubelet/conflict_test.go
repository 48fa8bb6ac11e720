package kubelet_test

import (
	"errors"
	"slices"
	"testing"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/kubelet"
)

// TestConflictIsLoggedOnce: a conflict that lasts is reported at each check, and logged when
// it begins and when its reason changes.
func TestConflictIsLoggedOnce(t *testing.T) {
	known := facts.New("node-a")
	p := kubelet.New(kubelet.Config{Facts: known})
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	ctx := klog.NewContext(t.Context(), logger)
	one, another := errors.New("a driver answers there"), errors.New("another driver answers there")
	for _, err := range []error{one, one, one, another, another, nil, nil, one} {
		p.ReportConflict(ctx, err)
		if state, _ := known.State(); err != nil && state.DRADriver != err.Error() || err == nil && state.DRADriver != "" {
			t.Errorf("%v is reported as %q", err, state.DRADriver)
		}
	}
	var logged []string
	for _, entry := range logger.GetSink().(ktesting.Underlier).GetBuffer().Data() {
		logged = append(logged, entry.Err.Error())
	}
	if want := []string{one.Error(), another.Error(), one.Error()}; !slices.Equal(logged, want) {
		t.Errorf("logged: %q, want %q", logged, want)
	}
}
