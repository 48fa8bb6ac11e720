package machine

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestHostMounts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "mountinfo")
	text := "22 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n" +
		"30 22 0:5 / /mnt/with\\040space rw - tmpfs tmpfs rw\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := hostMounts(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"/", "/mnt/with space"}, got); diff != "" {
		t.Error(diff)
	}
}

func TestBelow(t *testing.T) {
	for path, want := range map[string]bool{"/run": true, "/run/x": true, "/runner": false, "/": false, "/var/run": false} {
		if got := below(path, []string{"/run"}); got != want {
			t.Errorf("%s: got %t, want %t", path, got, want)
		}
	}
}

func TestSignalToUnknownComponent(t *testing.T) {
	s := newSupervisor(&Spec{Components: []Component{{Name: "a"}}})
	for name, request := range map[string]Request{
		"unknown component": {Op: OpSignal, Component: "b"},
		"not running":       {Op: OpSignal, Component: "a"},
		"unknown operation": {Op: "dance", Component: "a"},
	} {
		if err := s.do(request); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
