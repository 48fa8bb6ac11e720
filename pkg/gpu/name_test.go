package gpu

import (
	"testing"
	"time"
)

func gpusOf(uuids ...UUID) []GPU {
	var gpus []GPU
	for _, u := range uuids {
		gpus = append(gpus, GPU{UUID: u})
	}
	return gpus
}

func TestPartitionNames(t *testing.T) {
	const uuid = UUID("GPU-980fb007-8a10-0135-bada-13f71feaef21")
	profiles := []Profile{
		{Name: "1g.24gb", Placements: []Placement{{0, 3}, {9, 3}}}, {Name: "1g.24gb+me", Placements: []Placement{{0, 3}}},
		{Name: "1g.24gb-me", Placements: []Placement{{0, 3}}}, {Name: "1g.24gb+me.all", Placements: []Placement{{0, 3}}},
	}
	names, err := NewNames([]GPU{{UUID: uuid, MIG: &MIG{Profiles: profiles}}, {UUID: "GPU-11111111-8a10-0135-bada-13f71feaef21"}})
	if err != nil {
		t.Fatal(err)
	}
	for want, p := range map[DeviceName]Partition{
		"gpu-980fb007-mig-1g24gb-9":      {uuid, "1g.24gb", Placement{9, 3}},
		"gpu-980fb007-mig-1g24gbme-0":    {uuid, "1g.24gb+me", Placement{0, 3}},
		"gpu-980fb007-mig-1g24gb-me-0":   {uuid, "1g.24gb-me", Placement{0, 3}},
		"gpu-980fb007-mig-1g24gbmeall-0": {uuid, "1g.24gb+me.all", Placement{0, 3}},
	} {
		if got, ok := names.Name(p); got != want || !ok {
			t.Errorf("name of %v: got %q, %v, want %q", p, got, ok, want)
		}
		if got, err := names.Device(want); err != nil || got != p {
			t.Errorf("device %q: got %v, %v, want %v", want, got, err, p)
		}
		if !want.IsPartition() {
			t.Errorf("%q doesn't count as a partition", want)
		}
	}
	if DeviceName("gpu-980fb007").IsPartition() {
		t.Error("a whole GPU counts as a partition")
	}
	for _, bad := range []DeviceName{"gpu-980fb007-mig-1g24gb-1", "gpu-980fb007-mig-", "gpu-980fb007-mig-9g9gb-0", "gpu-11111111-mig-1g24gb-0", "gpu-22222222-mig-1g24gb-0"} {
		if got, err := names.Device(bad); err == nil {
			t.Errorf("device %q: got %v", bad, got)
		}
	}
	for name, want := range map[DeviceName]UUID{"gpu-980fb007": uuid, "gpu-980fb007-mig-9g9gb-0": uuid, "gpu-22222222-mig-1g24gb-0": "", "x": ""} {
		if got, ok := names.Parent(name); got != want || ok != (want != "") {
			t.Errorf("parent of %q: got %q, %v, want %q", name, got, ok, want)
		}
	}
}

func TestConflict(t *testing.T) {
	part := func(g UUID, start, size int) Device {
		return Partition{GPU: g, Profile: "p", Placement: Placement{start, size}}
	}
	for name, tc := range map[string]struct {
		a, b Device
		want bool
	}{
		"same whole":           {Whole{"a"}, Whole{"a"}, true},
		"other whole":          {Whole{"a"}, Whole{"b"}, false},
		"whole and part":       {Whole{"a"}, part("a", 0, 1), true},
		"whole and other part": {Whole{"a"}, part("b", 0, 1), false},
		"side by side":         {part("a", 0, 4), part("a", 4, 4), false},
		"overlap":              {part("a", 0, 4), part("a", 3, 1), true},
	} {
		if Conflict(tc.a, tc.b) != tc.want || Conflict(tc.b, tc.a) != tc.want {
			t.Errorf("%s: want %v", name, tc.want)
		}
	}
}

func TestNeedsSilicon(t *testing.T) {
	half := Partition{GPU: "a", Profile: "h", Placement: Placement{0, 4}}
	other := Partition{GPU: "a", Profile: "h", Placement: Placement{4, 4}}
	for name, tc := range map[string]struct {
		d, of Device
		want  bool
	}{
		"a device needs its own":              {half, half, true},
		"another GPU":                         {Whole{"b"}, Whole{"a"}, false},
		"a part needs the whole":              {half, Whole{"a"}, true},
		"the whole needs a part":              {Whole{"a"}, half, true},
		"parts side by side":                  {other, half, false},
		"a share needs the whole":             {Share{Of: Whole{"a"}, Count: 2}, Whole{"a"}, true},
		"a share needs its partition":         {Share{Of: half}, half, true},
		"a share doesn't need another's part": {Share{Of: other}, half, false},
		"the whole doesn't need a share":      {Whole{"a"}, Share{Of: Whole{"a"}, Count: 2}, false},
		"a partition doesn't need its share":  {half, Share{Of: half}, false},
		"a share needs its own":               {Share{Of: half}, Share{Of: half}, true},
		"a share needs another's daemon":      {Share{Of: Whole{"a"}, Count: 2}, Share{Of: Whole{"a"}, Count: 4, Number: 3}, true},
		"shares of two partitions":            {Share{Of: other}, Share{Of: half}, false},
		"shares of two GPUs":                  {Share{Of: Whole{"b"}}, Share{Of: Whole{"a"}}, false},
		"a replica needs another's GPU":       {Replica{GPU: "a", Count: 2}, Replica{GPU: "a", Count: 2, Number: 1}, true},
		"the whole needs a replica's GPU":     {Whole{"a"}, Replica{GPU: "a", Count: 2}, true},
		"a share needs a replica's GPU":       {Share{Of: half}, Replica{GPU: "a", Count: 2}, true},
	} {
		if got := NeedsSilicon(tc.d, tc.of); got != tc.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestTurnAt(t *testing.T) {
	retry := time.Date(2026, 11, 28, 9, 0, 0, 0, time.UTC)
	for after, want := range map[time.Duration]struct {
		turn int
		left time.Duration
	}{
		-time.Hour:        {0, time.Hour},
		-1:                {0, 1},
		0:                 {1, 30 * time.Minute},
		29 * time.Minute:  {1, time.Minute},
		30 * time.Minute:  {2, 30 * time.Minute},
		100 * time.Minute: {4, 20 * time.Minute},
	} {
		if turn, left := TurnAt(retry, retry.Add(after)); turn != want.turn || left != want.left {
			t.Errorf("after %v: turn %d for %v, want %d for %v", after, turn, left, want.turn, want.left)
		}
	}
	for _, far := range []time.Time{{}, time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)} {
		if turn, left := TurnAt(far, retry); turn < 0 || left <= 0 {
			t.Errorf("%v: turn %d for %v", far, turn, left)
		}
	}
}

func TestNames(t *testing.T) {
	a := UUID("GPU-980fb007-8a10-0135-bada-13f71feaef21")
	b := UUID("GPU-11111111-8a10-0135-bada-13f71feaef21")
	collides := UUID("GPU-980FB007-0000-0000-0000-000000000000")
	for name, tc := range map[string]struct {
		gpus []UUID
		want map[UUID]DeviceName
	}{
		"short where unique": {
			gpus: []UUID{a, b},
			want: map[UUID]DeviceName{a: "gpu-980fb007", b: "gpu-11111111"},
		},
		"both of a colliding pair are long": {
			gpus: []UUID{collides, a, b},
			want: map[UUID]DeviceName{
				a:        "gpu-980fb0078a100135bada13f71feaef21",
				collides: "gpu-980fb007000000000000000000000000",
				b:        "gpu-11111111",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			names, err := NewNames(gpusOf(tc.gpus...))
			if err != nil {
				t.Fatal(err)
			}
			for u, want := range tc.want {
				got, ok := names.Name(Whole{GPU: u})
				if !ok || got != want {
					t.Errorf("name of %s: got %q, %v, want %q", u, got, ok, want)
				}
				if d, err := names.Device(want); err != nil || d != (Whole{GPU: u}) {
					t.Errorf("device %q: got %v, %v, want %s", want, d, err, u)
				}
			}
		})
	}
}

func TestMayBeOf(t *testing.T) {
	const uuid = UUID("GPU-980FB007-8a10-0135-bada-13f71feaef21")
	for name, want := range map[DeviceName]bool{
		"gpu-980fb007": true, "gpu-980fb0078a100135bada13f71feaef21-mps": true, "gpu-980fb007-mig-1g18gb-4": true,
		"gpu-11111111": false, "claim-980fb007": false, "": false,
	} {
		if got := name.MayBeOf(uuid); got != want {
			t.Errorf("%q: %v, want %v", name, got, want)
		}
	}
	if DeviceName("gpu-").MayBeOf("MIG-1") {
		t.Error("a name may be of something that isn't a GPU")
	}
}

func TestNewNamesRefusesWhatItCannotName(t *testing.T) {
	ok := UUID("GPU-980fb007-8a10-0135-bada-13f71feaef21")
	for name, gpus := range map[string][]UUID{
		"twice the same":  {ok, ok},
		"not a GPU":       {"MIG-980fb007-8a10-0135-bada-13f71feaef21"},
		"too short":       {"GPU-980f"},
		"not hexadecimal": {"GPU-980fb007-8a10-0135-bada-13f71feaefzz"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := NewNames(gpusOf(gpus...)); err == nil {
				t.Error("accepted")
			}
		})
	}
}

func FuzzDeviceName(f *testing.F) {
	names, err := NewNames([]GPU{{UUID: "GPU-980fb007-8a10-0135-bada-13f71feaef21", MIG: &MIG{Profiles: []Profile{
		{Name: "1g.18gb", Placements: []Placement{{0, 1}, {4, 1}}}, {Name: "1g.18gb+me", Placements: []Placement{{0, 1}}},
	}}}})
	if err != nil {
		f.Fatal(err)
	}
	for _, s := range []string{"gpu-980fb007", "gpu-", "", "gpu-980fb007-mig-1g18gb-4", "gpu-980fb007-mig-1g18gbme-0", "gpu-980fb007-mig-1g18gb-04"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		d, err := names.Device(DeviceName(s))
		if err != nil {
			return
		}
		if back, ok := names.Name(d); !ok || back != DeviceName(s) {
			t.Errorf("%q reads as %v, which is written %q", s, d, back)
		}
	})
}

func TestNewPCIAddress(t *testing.T) {
	for in, want := range map[string]PCIAddress{
		"00000000:07:00.0": "0000:07:00.0",
		"00000000:AB:00.0": "0000:ab:00.0",
		"00010000:07:00.0": "10000:07:00.0",
		"0000:07:00.0":     "0000:07:00.0",
	} {
		if got := NewPCIAddress(in); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}
