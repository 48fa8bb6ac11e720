package mps

import (
	"math"
	"testing"
)

// Measured on an H200 with 132 multiprocessors.
func TestPortion(t *testing.T) {
	for _, c := range []struct {
		of         uint32
		percentage float64
		want       uint32
	}{
		{132, 100, 132},
		{132, 90, 118},
		{132, 50, 66},
		{132, 25, 32},
		{132, 10, 12},
		{132, 0.1, 2},
		{60, 50, 30},
		{1, 50, 1},
	} {
		if got := portion(c.of, c.percentage); got != c.want {
			t.Errorf("%v %% of %d: %d, want %d", c.percentage, c.of, got, c.want)
		}
	}
}

func TestContextMemory(t *testing.T) {
	for sms, want := range map[uint32]uint64{12: 72, 32: 145, 66: 271, 132: 514} {
		if got := contextMemory(sms) / mib; got != want {
			t.Errorf("%d multiprocessors: %d MiB, want %d", sms, got, want)
		}
	}
}

func TestClientLimit(t *testing.T) {
	const none, gib = math.MaxUint64, 1 << 30
	for name, c := range map[string]struct {
		server limits
		own    string
		index  int
		want   uint64
	}{
		"none":                     {nil, "", 0, none},
		"server's":                 {limits{"0": "3G"}, "", 0, 3 * gib},
		"server's of another":      {limits{"1": "3G"}, "", 0, none},
		"own":                      {nil, "0=1G", 0, gib},
		"lower":                    {limits{"0": "3G"}, "0=1024M", 0, gib},
		"higher":                   {limits{"0": "3G"}, "0=9G", 0, 3 * gib},
		"own of another":           {limits{"0": "3G"}, "1=1G", 0, none},
		"own by UUID":              {limits{"0": "3G"}, "GPU-1=1G", 0, none},
		"own that is no amount":    {limits{"0": "3G"}, "0=much", 0, none},
		"second of two":            {limits{"0": "3G", "1": "2G"}, "0=1G, 1=1048576K", 1, gib},
		"more than there can be":   {limits{"0": "99999999999G"}, "", 0, none},
		"bytes":                    {limits{"0": "4096"}, "", 0, 4096},
		"as Kubernetes spells GiB": {limits{"0": "2Gi"}, "", 0, 2 * gib},
	} {
		if got := clientLimit(c.server, c.own, c.index); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}

func TestClientPercentage(t *testing.T) {
	for own, want := range map[string]float64{"": 25, "10": 10, "90": 25, "0": 25, "-3": 25, "x": 25, "12.5": 12.5} {
		if got := clientPercentage(25, own); got != want {
			t.Errorf("own %q: %v, want %v", own, got, want)
		}
	}
}

func TestParseAlloc(t *testing.T) {
	for s, want := range map[string]uint64{"2048": 2 << 30, "200M": 200 << 20, "2G": 2 << 30, "1Gi": 1 << 30, "0": 0} {
		if got, err := ParseAlloc(s); err != nil || got != want {
			t.Errorf("%q: %d, %v, want %d", s, got, err, want)
		}
	}
	for _, s := range []string{"", "-1", "G", "1T", "1.5G", "99999999999999G"} {
		if got, err := ParseAlloc(s); err == nil {
			t.Errorf("%q: %d", s, got)
		}
	}
}
