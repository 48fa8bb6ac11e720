package journal_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// seen has each field set.
func seen() holding.Seen {
	numa, ecc := 1, true
	return holding.Seen{BootID: "51f9f1a9-3c3c-4a93-8b2c-0a42e7bb1a5e", GPUs: []gpu.GPU{
		{
			UUID: gpu0, Index: 1, Minor: 2, PCI: "0000:07:00.0", PCIeRoot: "pci0000:00", NUMANode: &numa,
			Model:       gpu.Model{ProductName: "NVIDIA H100 80GB HBM3", Brand: "Nvidia", Architecture: "Hopper", CUDAComputeCapability: "9.0"},
			MemoryBytes: 80 << 30, MemoryReservedBytes: 1 << 20, ECCEnabled: &ecc, VirtualizationMode: "none", AddressingMode: "HMM",
			Fabric: &gpu.Fabric{ClusterUUID: "9a55c8f3-5f0e-4a55-9a55-0d3f7a1b2c3d", CliqueID: 3}, NVLink: &gpu.NVLink{Links: 18, Domain: "nvswitch"},
			MIG: &gpu.MIG{Enabled: true, Pending: true, Switchable: true, Profiles: []gpu.Profile{{
				Name: "1g.10gb", ID: 19, MaxInstances: 7, MemoryBytes: 10 << 30,
				Engines:    gpu.Engines{Multiprocessors: 16, CopyEngines: 1, Decoders: 2, Encoders: 3, JPEGEngines: 4, OFAEngines: 5},
				Placements: []gpu.Placement{{Start: 6, Size: 1}},
			}}},
		},
		{UUID: gpu1, Minor: gpu.NoMinor},
	}}
}

// TestOldFormatOfSeen keeps the list of GPUs of every format readable.
func TestOldFormatOfSeen(t *testing.T) {
	golden := filepath.Join("testdata", "v1-seen")
	again := t.TempDir()
	if err := open(t, again).PutSeen(seen()); err != nil {
		t.Fatal(err)
	}
	if os.Getenv("UPDATE_GOLDEN") != "" {
		if err := os.RemoveAll(golden); err != nil {
			t.Fatal(err)
		}
		if err := os.CopyFS(golden, os.DirFS(again)); err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(golden)); err != nil {
		t.Fatal(err)
	}
	got, ok := open(t, dir).Seen()
	if diff := cmp.Diff(seen(), got); diff != "" || !ok {
		t.Errorf("read: %t (-want +got):\n%s", ok, diff)
	}
	var files [2]string
	for i, dir := range []string{golden, again} {
		data, err := os.ReadFile(filepath.Join(dir, "seen", "gpus.json"))
		if err != nil {
			t.Fatal(err)
		}
		files[i] = string(data)
	}
	if diff := cmp.Diff(files[0], files[1]); diff != "" {
		t.Errorf("what is written (-golden +now):\n%s", diff)
	}
}

// TestUnreadableSeen checks that an unreadable list counts as none, and goes with the next one.
func TestUnreadableSeen(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir)
	if err := j.PutSeen(seen()); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "seen", "gpus.json")
	for _, write := range []bool{true, false} {
		if err := os.WriteFile(path, []byte("garbage"), 0o600); err != nil {
			t.Fatal(err)
		}
		j = reopen(t, j, dir)
		if _, ok := j.Seen(); ok || j.UnreadableSeen() == nil || !strings.Contains(j.UnreadableSeen().Error(), "gpus.corrupt") {
			t.Errorf("garbage is read as a list: %t; error %v, want one that names the file", ok, j.UnreadableSeen())
		}
		next := j.DeleteSeen
		if write {
			next = func() error { return j.PutSeen(seen()) }
		}
		if err := next(); err != nil {
			t.Fatal(err)
		}
		if _, ok := j.Seen(); ok != write || j.UnreadableSeen() != nil {
			t.Errorf("afterwards: list %t, error %v", ok, j.UnreadableSeen())
		}
		if entries, err := os.ReadDir(filepath.Dir(path)); err != nil || (len(entries) == 1) != write {
			t.Errorf("left on disk: %v, error %v", entries, err)
		}
	}
}
