package kubelet_test

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/pkg/node/kubelet"
)

// TestSocketsOfKilledPodsAreRemoved checks that sockets of pods that were killed go, and
// those of living plugins stay.
func TestSocketsOfKilledPodsAreRemoved(t *testing.T) {
	living := runAs(t, kubeletRoot(t), "pod-a")
	living.register(t)
	registry := filepath.Join(living.root, "plugins_registry")
	other := filepath.Join(registry, "other.example.com-reg.sock")
	dead := []string{
		filepath.Join(registry, driver+"-pod-0-reg.sock"), filepath.Join(registry, driver+"-reg.sock"),
		kubelet.ServiceSocket(living.root, driver, "pod-0"),
	}
	for _, socket := range append(dead, other) {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: socket})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		l.Close()
	}
	runAs(t, living.root, "pod-b").register(t)
	for _, socket := range dead {
		if _, err := os.Stat(socket); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v, want it removed", socket, err)
		}
	}
	if _, err := os.Stat(other); err != nil {
		t.Errorf("another driver's socket: %v", err)
	}
	living.register(t)
}

func TestSocketsOfADeadPluginAreTakenOver(t *testing.T) {
	root := kubeletRoot(t)
	first := run(t, root)
	first.register(t)
	if err := first.stop(); err != nil {
		t.Fatal(err)
	}
	// kill -9 leaves files without a listener.
	if err := os.WriteFile(filepath.Join(root, "plugins_registry", driver+"-reg.sock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	run(t, root).register(t)
}

func TestSupportsPodUID(t *testing.T) {
	const uid = "4ab41cd2-6ecd-4c56-ad2b-4b27fd40fe0b"
	for name, tc := range map[string]struct {
		version, root, want string
	}{
		"1.33":            {"v1.33.0", "/var/lib/kubelet", ""},
		"vendor's":        {"v1.34.1-gke.2000", "/var/lib/kubelet", ""},
		"1.32":            {"v1.32.9", "/var/lib/kubelet", "1.33 is needed"},
		"unknown":         {"", "/var/lib/kubelet", "read the kubelet's version"},
		"a long root dir": {"v1.37.1", "/var/lib/" + strings.Repeat("x", 50), "Linux allows 107"},
	} {
		t.Run(name, func(t *testing.T) {
			err := kubelet.SupportsPodUID(tc.version, tc.root, driver, uid)
			if (err == nil) != (tc.want == "") || (err != nil && !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}
