package mps_test

import (
	"errors"
	"path/filepath"
	"testing"

	"github.com/tessera-dra/tessera/pkg/mps"
)

func TestNoSupervisor(t *testing.T) {
	t.Parallel() // it takes as long as a supervisor is waited for
	client, err := mps.Dial(filepath.Join(t.TempDir(), "no #1?.sock"))
	if err != nil {
		t.Fatal(err)
	}
	_, ensure := client.Ensure(t.Context(), mps.Daemon{Name: "a"})
	_, list := client.List(t.Context())
	_, stop := client.Stop(t.Context(), "a")
	watch := client.Watch(t.Context(), func(mps.Report) { t.Error("told something") })
	for _, err := range []error{ensure, list, watch, stop} {
		if !errors.Is(err, mps.ErrUnavailable) {
			t.Errorf("got %v", err)
		}
	}
}
