package health_test

import (
	"bufio"
	"cmp"
	"encoding/csv"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
)

// meaning is the expectation of an XID: the group of testdata/meaning.txt.
type meaning string

const (
	restartProgram meaning = "restart"
	toldOnly       meaning = "told"
	ignored        meaning = "ignore"
	resetGPU       meaning = "reset"
	rebootNode     meaning = "reboot"
	inspect        meaning = "inspect"
	triggerOnly    meaning = "trigger"
)

// tellsProgram reports whether the pod that was hit gets an event.
func (m meaning) tellsProgram() bool { return m != ignored && m != triggerOnly }

// expected is the state of a GPU after an XID: its condition, and whether new claims
// still get its devices.
type expected struct {
	condition gpu.ConditionType
	usable    bool
}

// withoutAction is the expectation on a driver without recovery actions.
var withoutAction = map[meaning]expected{
	restartProgram: {"", true},
	toldOnly:       {"", true},
	ignored:        {"", true},
	triggerOnly:    {"", true},
	inspect:        {gpu.NeedsInspection, true},
	resetGPU:       {gpu.ResetRequired, false},
	rebootNode:     {gpu.RebootRequired, false},
}

// withAction is the expectation where the driver has them, whatever the XID.
var withAction = map[gpu.RecoveryAction]expected{
	gpu.RecoveryNone:          {"", true},
	gpu.RecoveryReset:         {gpu.ResetRequired, false},
	gpu.RecoveryReboot:        {gpu.RebootRequired, false},
	gpu.RecoveryDrainP2P:      {gpu.PeersMustDrain, false},
	gpu.RecoveryDrainAndReset: {gpu.ResetRequired, false},
	gpu.RecoveryIMEX:          {gpu.IMEXRecoveryRequired, true},
	gpu.RecoveryBusReset:      {gpu.BusResetRequired, false},
	gpu.RecoverySystemReboot:  {gpu.RebootRequired, false},
}

// kinds are the ways to offer GPUs, each with a device that an XID can hit.
var kinds = map[string]v1alpha1.Plan{
	"whole":     {},
	"partition": {Partitioned: &v1alpha1.PartitionedPlan{}},
	"share":     {MPS: &v1alpha1.MPSPlan{Shares: new(int32(4))}},
	"replica":   {TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 4}},
}

// sick is the position of the GPU with the XID among eight.
const sick = 3

// TestTruthTable: every XID of the catalog, on a whole GPU, a partition, a share and a
// replica, with each recovery action and none to read, with restarts of the plugin and
// without.
func TestTruthTable(t *testing.T) {
	meanings, shop, count := readMeanings(t), newShop(t), map[string]int{}
	for _, code := range catalogued(t) {
		m, ok := meanings[code]
		if !ok {
			t.Errorf("XID %d: testdata/meaning.txt doesn't have it", code)
			continue
		}
		delete(meanings, code)
		actions := map[gpu.RecoveryAction]expected{gpu.RecoveryUnsupported: withoutAction[m]}
		maps.Copy(actions, withAction)
		for a, want := range actions {
			for kind := range kinds {
				for _, restarts := range []bool{false, true} {
					c := truthCase{shop, code, m, a, kind, restarts, want}
					if problem := c.play(t); problem != "" {
						t.Errorf("XID %d, recovery action %q, %s, restarts %v: %s", code, a, kind, restarts, problem)
					}
					count["cases"]++
					if !want.usable {
						count["blocked"]++
					}
				}
			}
		}
	}
	for code := range meanings {
		t.Errorf("testdata/meaning.txt has XID %d, which isn't in the catalog", code)
	}
	t.Logf("%d cases, in %d of them the GPU gets no new claims", count["cases"], count["blocked"])
}

// whileUnread is the expectation while the driver has not said whether it has a recovery
// action: nothing for which a policy may end pods.
var whileUnread = map[meaning]expected{
	restartProgram: {"", true},
	toldOnly:       {"", true},
	ignored:        {"", true},
	triggerOnly:    {"", true},
	inspect:        {gpu.NeedsInspection, true},
	resetGPU:       {gpu.ResetRequired, false},
	rebootNode:     {gpu.ResetRequired, false},
}

// TestTruthTableOfSlowDrivers: every XID, decided on before the driver has answered. Then
// it turns out that the driver has no recovery actions, or needs none; or it goes on
// saying nothing.
func TestTruthTableOfSlowDrivers(t *testing.T) {
	shop, count := newShop(t), 0
	for code, m := range readMeanings(t) {
		for kind := range kinds {
			for _, restarts := range []bool{false, true} {
				c := truthCase{shop, code, m, gpu.RecoveryNotRead, kind, restarts, whileUnread[m]}
				s, notice := health.State{}.ObserveXID(gpu.XID{Code: code, At: start}, gpu.RecoveryNotRead, load)
				if restarts {
					s = restart(t, s, start)
				}
				old := gpu.Vitals{Recovery: gpu.RecoveryUnsupported}
				none := gpu.Vitals{Recovery: gpu.RecoveryNone}
				for name, tc := range map[string]struct {
					steps []step
					want  expected
				}{
					"unread":         {[]step{silent(), silent()}, whileUnread[m]},
					"no actions":     {[]step{silent(), reads(old)}, withoutAction[m]},
					"and stays so":   {[]step{reads(old), reads(old), reads(old)}, withoutAction[m]},
					"until a reload": {[]step{reads(old), readsUnder(reload, old), readsUnder(reload, old)}, expected{"", true}},
					"needs none":     {[]step{silent(), reads(none)}, expected{"", true}},
				} {
					if diff := c.differs(after(t, slices.Insert(tc.steps, 0, is(s))...), tc.want); diff != "" {
						t.Errorf("XID %d, %s, restarts %v, %s: %s", code, kind, restarts, name, diff)
					}
					count++
				}
				if (notice != nil) != m.tellsProgram() {
					t.Errorf("XID %d: the notice is %v", code, notice)
				}
			}
		}
	}
	t.Logf("%d cases", count)
}

type truthCase struct {
	shop     *shop
	code     uint64
	meaning  meaning
	action   gpu.RecoveryAction
	kind     string
	restarts bool
	want     expected
}

// play returns the first difference, "" if there is none.
func (c truthCase) play(t *testing.T) string {
	hit := gpu.XID{Code: c.code}
	if c.kind == "partition" {
		hit.GPUInstance, hit.ComputeInstance = new(2), new(0)
	}
	healthy, asked := gpu.Vitals{Recovery: gpu.RecoveryNone}, gpu.Vitals{Recovery: c.action}
	if c.action == gpu.RecoveryUnsupported {
		healthy = asked
	}
	s := after(t, reads(healthy), reads(healthy))
	hit.At = start
	s, notice := s.ObserveXID(hit, c.action, load)
	if (notice != nil) != c.meaning.tellsProgram() {
		return fmt.Sprintf("the notice is %v", notice)
	}
	s = c.follow(t, s, reads(asked), reads(asked))
	if diff := c.differs(s, c.want); diff != "" {
		return "after the XID: " + diff
	}
	// The sources must agree twice, and an old driver must be loaded again.
	if c.action == gpu.RecoveryUnsupported {
		s = c.follow(t, s, reads(healthy), reads(healthy), reads(healthy))
	} else {
		s = c.follow(t, s, reads(healthy))
	}
	if diff := c.differs(s, c.want); diff != "" {
		return "before it has ended: " + diff
	}
	if s = after(t, is(s), readsUnder(reload, healthy), readsUnder(reload, healthy)); len(s.Causes) > 0 {
		return fmt.Sprintf("it doesn't end: %v", s.Causes)
	}
	return c.differs(s, expected{"", true})
}

// follow returns the state after the steps, between which the plugin restarts if the
// case has restarts.
func (c truthCase) follow(t *testing.T, s health.State, steps ...step) health.State {
	all := []step{is(s)}
	for _, do := range steps {
		if c.restarts {
			all = append(all, restart)
		}
		all = append(all, do)
	}
	return after(t, all...)
}

// is begins with a state.
func is(s health.State) step {
	return func(*testing.T, health.State, time.Time) health.State { return s }
}

func (c truthCase) differs(s health.State, want expected) string {
	conditions := s.Conditions()
	var types []gpu.ConditionType
	for _, have := range conditions {
		types = append(types, have.Type)
		if have.Message == "" {
			return fmt.Sprintf("%s has no message", have.Type)
		}
	}
	var wanted []gpu.ConditionType
	if want.condition != "" {
		wanted = append(wanted, want.condition)
	}
	if !slices.Equal(wanted, types) {
		return fmt.Sprintf("conditions %v, want %v", types, wanted)
	}
	for server := range servers {
		if wanted, have := c.shop.wanted(c.kind, server, want), c.shop.get(c.kind, server, conditions); !maps.Equal(wanted, have) {
			return fmt.Sprintf("devices on a server with %s %v, want %v", server, have, wanted)
		}
	}
	return ""
}

// servers are the ways in which API servers can store the taints of devices.
var servers = map[string]offer.Server{
	"no taints":            {},
	"taints":               {MaxTainted: 64},
	"informational taints": {MaxTainted: 64, InformationalTaints: true},
}

// shop offers a node with eight GPUs, and remembers its offers.
type shop struct {
	node   gpu.Node
	offers map[string]devices
}

// devices counts the devices on offer by their GPU and taints.
type devices map[string]int

func newShop(t *testing.T) *shop {
	n, err := offertest.Node("h100-80gb", 8)
	if err != nil {
		t.Fatal(err)
	}
	return &shop{n, map[string]devices{}}
}

// get returns the offer if the sick GPU has the conditions.
func (s *shop) get(kind, server string, conditions []gpu.Condition) devices {
	key := kind + ", " + server
	for _, c := range conditions {
		key += ", " + string(c.Type)
	}
	if have, ok := s.offers[key]; ok {
		return have
	}
	n := s.node
	n.GPUs = slices.Clone(n.GPUs)
	n.GPUs[sick].Conditions = conditions
	with := servers[server]
	with.Counters, with.Multiple, with.Charged = true, true, true
	count := devices{}
	for _, g := range offer.Build(n, offertest.OnePlan(n, kinds[kind]), nil, with) {
		for _, d := range g.Devices {
			key := string(g.UUID)
			for _, t := range d.Taints {
				key += fmt.Sprintf(" %s=%s:%s", t.Key, t.Value, t.Effect)
			}
			count[key]++
		}
	}
	s.offers[key] = count
	return count
}

// wanted returns the expected offer: that of eight healthy GPUs, but for the sick one.
func (s *shop) wanted(kind, server string, want expected) devices {
	taints, can := "", servers[server]
	switch {
	case want.condition == "":
	case !want.usable && can.MaxTainted > 0:
		taints = " gpu.nvidia.com/unhealthy=" + string(want.condition) + ":NoSchedule"
	case want.usable && can.InformationalTaints:
		taints = " gpu.nvidia.com/unhealthy=" + string(want.condition) + ":None"
	}
	out, healthy := devices{}, s.get(kind, server, nil)
	for i, g := range s.node.GPUs {
		switch n := healthy[string(g.UUID)]; {
		case i != sick:
			out[string(g.UUID)] = n
		case want.usable || can.MaxTainted > 0:
			out[string(g.UUID)+taints] = n
		}
	}
	return out
}

// TestKinds: the truth table must not compare nothing with nothing.
func TestKinds(t *testing.T) {
	s := newShop(t)
	for kind, atLeast := range map[string]int{"whole": 1, "partition": 8, "share": 4, "replica": 4} {
		all := s.get(kind, "taints", nil)
		if len(all) != 8 {
			t.Errorf("%s: devices %v, want those of 8 GPUs without taints", kind, all)
		}
		for _, n := range all {
			if n < atLeast {
				t.Errorf("%s: %d devices of a GPU, want %d or more", kind, n, atLeast)
			}
		}
	}
}

func readMeanings(t *testing.T) map[uint64]meaning {
	f, err := os.Open("testdata/meaning.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	out := map[uint64]meaning{}
	var group meaning
	for lines := bufio.NewScanner(f); lines.Scan(); {
		word, note, _ := strings.Cut(lines.Text(), " ")
		code, err := strconv.ParseUint(word, 10, 64)
		switch _, again := out[code]; {
		case word == "" || word == "#":
		case err != nil:
			group = meaning(word)
			if _, ok := withoutAction[group]; !ok {
				t.Fatalf("testdata/meaning.txt: no group is called %q", word)
			}
		case again, note == "":
			t.Fatalf("testdata/meaning.txt: XID %d is there twice, or without a note", code)
		default:
			out[code] = group
		}
	}
	return out
}

// catalogued returns the codes of NVIDIA's catalog.
func catalogued(t *testing.T) []uint64 {
	f, err := os.Open("xids.csv")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lines := csv.NewReader(f)
	lines.Comment = '#'
	records, err := lines.ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	var codes []uint64
	for _, r := range records {
		code, err := strconv.ParseUint(r[0], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		codes = append(codes, code)
	}
	slices.SortFunc(codes, cmp.Compare)
	return codes
}
