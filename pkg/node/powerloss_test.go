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
	// fresh: no plugin was on the node before.
	fresh bool
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
		type claims = []*resourceapi.ResourceClaim
		a, b := claimOf("a", kind.with...), claimOf("b", kind.near...)
		prepare := func(_ *computer, p *onDisk) error { return p.prepare(a) }
		unprepare := func(_ *computer, p *onDisk) error { return p.unprepare(a) }
		restart := func(c *computer, p *onDisk) error {
			if err := p.end(); err != nil {
				return err
			}
			again, err := c.start()
			return errors.Join(err, again.end())
		}
		for _, c := range []change{
			{name: "prepare", before: claims{b}, do: prepare, after: claims{a, b}},
			{name: "unprepare", before: claims{a, b}, do: unprepare, after: claims{b}},
			{name: "first prepare", do: prepare, after: claims{a}},
			{name: "last unprepare", before: claims{a}, do: unprepare},
			{name: "restart", before: claims{a, b}, do: restart, after: claims{a, b}},
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
	c.reboot(t)
	c.disk.Reset(r.tree)
	if err := c.checkStart(one.claims(), r.must); err != nil {
		t.Errorf("after %s: %v", r.when, err)
	}
}

// checkStart starts the plugin after a fault that is over, and ends all claims. must says of
// claims whether they are prepared; of others it is open.
func (c *computer) checkStart(claims []*resourceapi.ResourceClaim, must map[string]bool) (err error) {
	p, err := c.start()
	if err != nil {
		return fmt.Errorf("start: %w", err)
	}
	defer func() { err = errors.Join(err, p.end()) }()
	var errs []error
	check := func(what string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", what, err))
		}
	}
	if paths := p.unread(); paths != nil {
		errs = append(errs, fmt.Errorf("unreadable: %v", paths))
	}
	check("started", c.doctor(p.ctx))
	prepared := p.names()
	for name, want := range must {
		if prepared[name] != want {
			errs = append(errs, fmt.Errorf("claim %s is prepared: %t, was answered: %t", name, prepared[name], want))
		}
	}
	for _, claim := range claims {
		if prepared[claim.Name] {
			check("double allocation", p.refuses(claim))
		}
	}
	for _, claim := range claims { // as the kubelet does for pods that stay
		check("prepare "+claim.Name+" again", p.prepare(claim))
	}
	check("all prepared again", c.doctor(p.ctx))
	for _, claim := range claims {
		check("unprepare "+claim.Name, p.unprepare(claim))
	}
	check("leave the host", p.leaveHost())
	check("nothing prepared", c.doctor(p.ctx))
	check("files", c.checkFiles())
	return errors.Join(errs...)
}
