package node

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/files/filestest"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// change is an operation of a plugin that has prepared the claims before.
type change struct {
	name   string
	before []*resourceapi.ResourceClaim
	do     func(*computer, *onDisk) error
	// claims that have to be prepared afterwards; those that also were before have
	// to be so at any time.
	after []*resourceapi.ResourceClaim
}

// kind is the devices of the claim in an operation; near are another claim's meanwhile.
type kind struct {
	name       string
	with, near []gpu.DeviceName
}

// kinds are those of devices; the first have all kinds of files.
func kinds() []kind {
	one, two := installed.Names()[0], installed.Names()[1]
	return []kind{
		{"partitions", []gpu.DeviceName{one + "-mig-1g10gb-1", two + "-mig-3g40gb-4"}, []gpu.DeviceName{one + "-mig-3g40gb-4"}},
		{"MPS share", []gpu.DeviceName{one + "-mps2-0"}, []gpu.DeviceName{one + "-mps2-1"}},
		{"whole GPU", []gpu.DeviceName{one}, []gpu.DeviceName{two}},
		{"MPS share of a partition", []gpu.DeviceName{one + "-mig-3g40gb-0-mps2-0"}, []gpu.DeviceName{one + "-mig-3g40gb-4"}},
		{"time slice", []gpu.DeviceName{two + "-ts2-0"}, []gpu.DeviceName{two + "-ts2-1"}},
	}
}

// changes are the operations with the kinds of devices.
func changes(kinds []kind) []change {
	var all []change
	for _, kind := range kinds {
		a, b := claimOf("a", kind.with...), claimOf("b", kind.near...)
		restart := func(c *computer, p *onDisk) error {
			if err := p.end(); err != nil {
				return err
			}
			again, err := c.start()
			return errors.Join(err, again.end())
		}
		for _, c := range []change{
			{"prepare", []*resourceapi.ResourceClaim{b}, func(_ *computer, p *onDisk) error { return p.prepare(a) }, []*resourceapi.ResourceClaim{a, b}},
			{"unprepare", []*resourceapi.ResourceClaim{a, b}, func(_ *computer, p *onDisk) error { return p.unprepare(a) }, []*resourceapi.ResourceClaim{b}},
			{"first prepare", nil, func(_ *computer, p *onDisk) error { return p.prepare(a) }, []*resourceapi.ResourceClaim{a}},
			{"last unprepare", []*resourceapi.ResourceClaim{a}, func(_ *computer, p *onDisk) error { return p.unprepare(a) }, nil},
			{"restart", []*resourceapi.ResourceClaim{a, b}, restart, []*resourceapi.ResourceClaim{a, b}},
		} {
			c.name = kind.name + ": " + c.name
			all = append(all, c)
		}
	}
	return all
}

// claims are all of a change.
func (c change) claims() []*resourceapi.ResourceClaim {
	all := slices.Concat(c.before, c.after)
	slices.SortFunc(all, func(a, b *resourceapi.ResourceClaim) int { return strings.Compare(a.Name, b.Name) })
	return slices.CompactFunc(all, func(a, b *resourceapi.ResourceClaim) bool { return a.Name == b.Name })
}

// remains is the disk after a power cut.
type remains struct {
	when string
	tree filestest.Tree
	// must says of claims whether they are prepared; of others it is open.
	must map[string]bool
}

// cuts does the change and returns the states of the disk after power cuts that follow
// each of its calls, each state once.
func (c *computer) cuts(t *testing.T, one change, losses []filestest.Loss) []remains {
	t.Helper()
	p, err := c.start()
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := p.end(); err != nil {
			t.Error(err)
		}
	}()
	for _, claim := range one.before {
		if err := p.prepare(claim); err != nil {
			t.Fatal(err)
		}
	}
	before, after := map[string]bool{}, map[string]bool{}
	for _, claim := range one.claims() {
		before[claim.Name], after[claim.Name] = slices.Contains(one.before, claim), slices.Contains(one.after, claim)
	}
	open := maps.Clone(before)
	maps.DeleteFunc(open, func(name string, _ bool) bool { return before[name] != after[name] })
	var all []remains
	seen := map[string]bool{}
	add := func(op filestest.Op, must map[string]bool, cut func(filestest.Loss) filestest.Tree) {
		for _, l := range losses {
			tree := cut(l)
			if id := fmt.Sprint(tree.ID(), must); !seen[id] {
				seen[id] = true
				all = append(all, remains{fmt.Sprintf("a power cut after %s that loses %s", op, l), tree, must})
			}
		}
	}
	add(filestest.Op{Call: "the start"}, before, c.disk.Cut)
	c.disk.Watch(func(op filestest.Op, cut func(filestest.Loss) filestest.Tree) { add(op, open, cut) })
	if err := one.do(c, p); err != nil {
		t.Fatal(err)
	}
	c.disk.Watch(nil)
	add(filestest.Op{Call: "the answer"}, after, c.disk.Cut)
	return all
}

// everything has the tests below do all that they can, in minutes.
var everything = flag.Bool("everything", false, "cut the power, and fail the disk, in all ways and with all kinds of devices")

// TestPowerLoss cuts the power after every call with which an operation of the plugin
// changes its files or syncs them. The answers must hold when the node is up again,
// nothing may be unreadable, and the kubelet's calls must succeed.
func TestPowerLoss(t *testing.T) {
	all, losses := changes(kinds()[:2]), filestest.Losses()[:3]
	if *everything {
		seed := rand.Uint64()
		t.Logf("seed %d", seed)
		all, losses = changes(kinds()), filestest.Losses()
		for n := range uint64(4) {
			losses = append(losses, filestest.RandomLoss(rand.New(rand.NewPCG(seed, n))))
		}
	}
	for _, one := range all {
		t.Run(one.name, func(t *testing.T) {
			c := newComputer(t)
			remains := c.cuts(t, one, losses)
			for _, r := range remains {
				c.checkRemains(t, one, r)
			}
			t.Logf("%d cases", len(remains)) // read by test/reliability
		})
	}
}

// checkRemains starts the computer again after a power cut.
func (c *computer) checkRemains(t *testing.T, one change, r remains) {
	t.Helper()
	failed := func(format string, args ...any) {
		t.Helper()
		t.Errorf("after "+r.when+": "+format, args...)
	}
	c.reboot(t)
	c.disk.Reset(r.tree)
	p, err := c.start()
	if err != nil {
		failed("start: %v", err)
		return
	}
	defer func() {
		if err := p.end(); err != nil {
			t.Error(err)
		}
	}()
	if paths := p.unread(); paths != nil {
		failed("unreadable: %v", paths)
	}
	if err := c.doctor(p.ctx); err != nil {
		failed("started: %v", err)
	}
	prepared := p.names()
	for name, want := range r.must {
		if prepared[name] != want {
			failed("claim %s is prepared: %t, was answered: %t", name, prepared[name], want)
		}
	}
	for _, claim := range one.claims() {
		if err := p.prepare(claim); err != nil { // as the kubelet does for pods that stay
			failed("prepare %s again: %v", claim.Name, err)
		}
	}
	if err := c.doctor(p.ctx); err != nil {
		failed("all prepared again: %v", err)
	}
	for _, claim := range one.claims() {
		if err := p.unprepare(claim); err != nil {
			failed("unprepare %s: %v", claim.Name, err)
		}
	}
	if err := p.leaveHost(); err != nil {
		failed("leave the host: %v", err)
	}
	if err := c.doctor(p.ctx); err != nil {
		failed("nothing prepared: %v", err)
	}
}
