package nvmlsim_test

import (
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// TestNVLinksLeadBack checks that any two GPUs have the same number of links to
// each other.
func TestNVLinksLeadBack(t *testing.T) {
	for _, machine := range []string{"2xv100-sxm2-16gb", "4xv100-sxm2-16gb", "8xv100-sxm2-32gb", "4xh100-nvl", "{gpus: [{model: rtx-2080-ti, count: 2, nvlink: pairs}]}"} {
		gpus := create(t, machine).GPUs()
		count := map[[2]string]int{}
		for _, g := range gpus {
			for link := range g.Model().NVLink.Links {
				l, err := g.NVLinkRemote(link)
				check(t, err)
				if l.Switch {
					t.Errorf("%s: link %d leads to a switch", machine, link)
				}
				count[[2]string{get(t, g.PCIInfo).BusID(), l.Remote.BusID()}]++
			}
		}
		for pair, n := range count {
			if back := count[[2]string{pair[1], pair[0]}]; back != n {
				t.Errorf("%s: %d links from %s to %s, %d back", machine, n, pair[0], pair[1], back)
			}
		}
	}
}

func TestNVLinkErrors(t *testing.T) {
	m := create(t, "gpus: [{model: a30, count: 2, nvlink: pairs}, {model: t4}, {model: h200}]")
	for name, tc := range map[string]struct {
		gpu, link   int
		state, tell error
	}{
		"a link":                    {0, 3, nil, nil},
		"a link that it hasn't":     {0, 4, nvmlsim.InvalidArgument, nvmlsim.InvalidArgument},
		"no NVLink":                 {2, 0, nvmlsim.NotSupported, nvmlsim.NotSupported},
		"a link that leads nowhere": {3, 0, nil, nvmlsim.NotSupported},
	} {
		g := m.GPUs()[tc.gpu]
		if _, err := g.NVLinkState(tc.link); err != tc.state {
			t.Errorf("%s: state: %v, want %v", name, err, tc.state)
		}
		if _, err := g.NVLinkRemote(tc.link); err != tc.tell {
			t.Errorf("%s: other end: %v, want %v", name, err, tc.tell)
		}
	}
	for text, want := range map[string]string{
		"{gpus: [{model: t4, nvlink: pairs}]}":   "t4 has no NVLink",
		"{gpus: [{model: a30, nvlink: bridge}]}": "not one of none, pairs, mesh, switch",
	} {
		if _, err := nvmlsim.ParseSpec([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

// TestBeforeVolta checks that time slices can't be set on a P100.
func TestBeforeVolta(t *testing.T) {
	m := create(t, "gpus: [{model: p100-16gb}, {model: v100-pcie-16gb}]")
	if err := m.GPUs()[0].SetTimeSlice(3); err != nvmlsim.NotSupported {
		t.Errorf("P100: %v, want Not Supported", err)
	}
	if _, err := m.GPUs()[0].TimeSlice(); err != nvmlsim.NotSupported {
		t.Errorf("P100: %v, want Not Supported", err)
	}
	check(t, m.GPUs()[1].SetTimeSlice(3))
}
