package journal

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/node/holding"
)

func FuzzDecode(f *testing.F) {
	whole, err := encode(holding.Record{ClaimUID: "a", Namespace: "n", Name: "c", BootID: "b", Holdings: []holding.Holding{{Device: "gpu-980fb007", GPU: "GPU-980fb007-8a10-0135-bada-13f71feaef21", Request: "r"}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole)
	f.Add(whole[:len(whole)/2])
	shares, err := encode(holding.Record{ClaimUID: "a", Holdings: []holding.Holding{
		{Device: "gpu-980fb007-mps4-2", GPU: "GPU-980fb007-8a10-0135-bada-13f71feaef21", Share: &holding.Part{Count: 4, Number: 2}, MPS: &holding.MPS{ThreadPercentage: 25, MemoryMiB: 1}},
		{Device: "gpu-980fb007-ts4-2", Replica: &holding.Part{Count: 4}, TimeSlice: "Long", ShareID: "s"},
	}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(shares)
	f.Add([]byte(`{"version":2,"crc32":0,"body":null}`))
	f.Add([]byte(`{"version":1,"crc32":0}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if r := salvage("a", data); r.ClaimUID != "a" {
			t.Errorf("salvaged %v", r)
		}
		r, err := decode[holding.Record]("a", data)
		if err != nil {
			if diff := cmp.Diff(holding.Record{}, r); diff != "" {
				t.Errorf("a record in spite of %v:\n%s", err, diff)
			}
			return
		}
		again, err := encode(r)
		if err != nil {
			t.Fatal(err)
		}
		if back, err := decode[holding.Record]("a", again); err != nil || !cmp.Equal(r, back) {
			t.Errorf("%v is written and read as %v, %v", r, back, err)
		}
	})
}

func FuzzDecodeGPU(f *testing.F) {
	const uuid = "GPU-980fb007-8a10-0135-bada-13f71feaef21"
	whole, err := encode(holding.GPURecord{GPU: uuid, BootID: "b", ModeSwitched: true, Partitions: []holding.MadePartition{
		{Partition: holding.Partition{Profile: "1g.18gb", Start: 4, Size: 1}, Made: &holding.MadeInstance{GPUInstanceID: 11, UUID: "MIG-1"}},
		{Partition: holding.Partition{Profile: "3g.71gb", Size: 4}},
	}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole)
	f.Add(whole[:len(whole)/2])
	f.Add([]byte(`{"version":1,"crc32":0,"body":null}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := decode[holding.GPURecord](uuid, data)
		if err != nil {
			if diff := cmp.Diff(holding.GPURecord{}, r); diff != "" {
				t.Errorf("a record in spite of %v:\n%s", err, diff)
			}
			return
		}
		again, err := encode(r)
		if err != nil {
			t.Fatal(err)
		}
		if back, err := decode[holding.GPURecord](uuid, again); err != nil || !cmp.Equal(r, back) {
			t.Errorf("%v is written and read as %v, %v", r, back, err)
		}
	})
}

func FuzzDecodeSettings(f *testing.F) {
	const uuid = "GPU-980fb007-8a10-0135-bada-13f71feaef21"
	whole, err := encode(holding.Settings{GPU: uuid, BootID: "b", ComputeModeBefore: "Default", TimeSliceBefore: "Default"})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole)
	f.Add(whole[:len(whole)/2])
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := decode[holding.Settings](uuid, data)
		if err != nil {
			if s != (holding.Settings{}) {
				t.Errorf("settings in spite of %v: %v", err, s)
			}
			return
		}
		again, err := encode(s)
		if err != nil {
			t.Fatal(err)
		}
		if back, err := decode[holding.Settings](uuid, again); err != nil || s != back {
			t.Errorf("%v is written and read as %v, %v", s, back, err)
		}
	})
}
