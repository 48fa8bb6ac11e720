package mps_test

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
)

// TestRecordFormat: a supervisor adopts daemons of earlier releases, and those of a later
// one after a rollback. The file is as commit 61c5dfd wrote it.
func TestRecordFormat(t *testing.T) {
	golden, err := os.ReadFile("testdata/daemon-v1.json")
	if err != nil {
		t.Fatal(err)
	}
	want := mps.Record{
		Daemon: mps.Daemon{
			Name: "gpu-980fb007", Devices: []gpu.UUID{"GPU-980fb007-8a10-0135-bada-13f71feaef21"}, ThreadPercentage: 25, MemoryMiB: []int64{20389},
		},
		PID: 4711, Start: 123456, BootID: "51f9f1a9-3c3c-4a93-8b2c-0a42e7bb1a5e", Restarts: 2, Stopping: true,
	}
	got, err := mps.DecodeRecord(want.Daemon.Name, golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("record (-want +got):\n%s", diff)
	}
	written, err := want.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(golden), string(written)); diff != "" {
		t.Errorf("file (-want +got):\n%s", diff)
	}
}

func FuzzDecodeRecord(f *testing.F) {
	data, err := mps.Record{Daemon: mps.Daemon{Name: "a", Devices: []gpu.UUID{"GPU-1"}}, PID: 1, Start: 2, BootID: "b"}.Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Add(data[:20])
	f.Add([]byte(`{"version":1,"crc32":2745614147,"body":{}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := mps.DecodeRecord("a", data)
		if err != nil {
			return
		}
		if err := r.Daemon.Validate(); err != nil {
			t.Errorf("a record that no supervisor writes is taken: %v", err)
		}
		again, err := r.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if back, err := mps.DecodeRecord("a", again); err != nil || !cmp.Equal(back, r) {
			t.Errorf("%+v, then %+v, %v", r, back, err)
		}
	})
}
