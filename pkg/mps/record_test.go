package mps_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
)

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
