package cdi_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	oci "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// TestMarkIsMounted checks that a container gets the claim's mark once, with
// any or all of the claim's devices.
func TestMarkIsMounted(t *testing.T) {
	_, d, dir := setUp(t)
	specs := cdi.New(cdi.Config{Dir: dir, HookPath: hook, Host: driverroot.NewHost(installed.Host), Mark: func(claimUID string) (string, string, error) {
		return "/run/marks/" + claimUID, "/dev/tessera/" + claimUID, nil
	}})
	if err := specs.SetDriver(d); err != nil {
		t.Fatal(err)
	}
	ids, err := specs.Write(devices(t, d, "a", 0, 1))
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, of := range ids {
		all = append(all, of...)
		checkMark(t, inject(t, dir, of))
	}
	checkMark(t, inject(t, dir, all))
}

func checkMark(t *testing.T, spec *oci.Spec) {
	t.Helper()
	var got []oci.Mount
	for _, m := range spec.Mounts {
		if strings.HasPrefix(m.Destination, "/dev/tessera") {
			got = append(got, m)
		}
	}
	want := []oci.Mount{{Source: "/run/marks/a", Destination: "/dev/tessera/a", Options: []string{"ro", "bind", "nosuid", "nodev", "noexec"}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("mounts of marks (-want +got):\n%s", diff)
	}
}

func TestNoSpecWithoutMark(t *testing.T) {
	_, d, dir := setUp(t)
	full := errors.New("no space left on device")
	specs := cdi.New(cdi.Config{Dir: dir, HookPath: hook, Host: driverroot.NewHost(installed.Host), Mark: func(string) (string, string, error) {
		return "", "", full
	}})
	if err := specs.SetDriver(d); err != nil {
		t.Fatal(err)
	}
	if _, err := specs.Write(holding.Realized{Record: holding.Record{ClaimUID: "a"}}); !errors.Is(err, full) {
		t.Errorf("got %v, want %v", err, full)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*claim*")); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
	if _, err := os.Stat(dir); err != nil {
		t.Error(err)
	}
}
