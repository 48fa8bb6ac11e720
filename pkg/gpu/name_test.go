package gpu

import "testing"

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
			names, err := NewNames(tc.gpus)
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

func TestNewNamesRefusesWhatItCannotName(t *testing.T) {
	ok := UUID("GPU-980fb007-8a10-0135-bada-13f71feaef21")
	for name, gpus := range map[string][]UUID{
		"twice the same":  {ok, ok},
		"not a GPU":       {"MIG-980fb007-8a10-0135-bada-13f71feaef21"},
		"too short":       {"GPU-980f"},
		"not hexadecimal": {"GPU-980fb007-8a10-0135-bada-13f71feaefzz"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := NewNames(gpus); err == nil {
				t.Error("accepted")
			}
		})
	}
}

func FuzzDeviceName(f *testing.F) {
	names, err := NewNames([]UUID{"GPU-980fb007-8a10-0135-bada-13f71feaef21"})
	if err != nil {
		f.Fatal(err)
	}
	for _, s := range []string{"gpu-980fb007", "gpu-", "", "gpu-980fb007-mig-1g18gb-4"} {
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
