package prepare_test

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
)

// event is an event between a crash and the next start.
type event struct {
	boot  string // empty: the same
	apply func(*testing.T, *node)
}

func accidents() map[string]event {
	wipe := func(t *testing.T, n *node) {
		if err := os.RemoveAll(n.cdi); err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(n.cdi, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return map[string]event{
		"killed":             {"", func(*testing.T, *node) {}},
		"CDI wiped":          {"", wipe},
		"rebooted":           {"boot-3", func(t *testing.T, n *node) { wipe(t, n); n.reboot(t) }},
		"rebooted, no tmpfs": {"boot-3", func(t *testing.T, n *node) { n.reboot(t) }},
		"driver reloaded":    {"", func(t *testing.T, n *node) { n.reboot(t) }},
	}
}

// operation is done once, with a crash after each of its steps.
type operation struct {
	a, b   *resourceapi.ResourceClaim   // a is prepared and unprepared after each crash, beside b
	before []*resourceapi.ResourceClaim // prepared first
	do     func(*testing.T, *fixture)
	// settled says which claims may be prepared after recovery.
	settled [][]string
}

// operations are done with whole GPUs, with partitions beside others, with shares
// of the same as others have, and with ones that nobody else has.
func operations() map[string]operation {
	all := operationsWith("", newClaim("a", result("gpu", 0), result("gpu", 1)), newClaim("b", result("gpu", 2)), newClaim("old", result("gpu", 0)))
	maps.Copy(all, operationsWith("partitions: ",
		newClaim("a", part("parts", 0, "1g.10gb", 1), part("parts", 0, "1g.10gb", 3), part("part", 1, "3g.40gb", 4), adminPart("look", 0, "1g.10gb", 3)),
		newClaim("b", part("part", 0, "3g.40gb", 4), part("part", 1, "1g.10gb", 0)),
		newClaim("old", part("part", 0, "3g.40gb", 0))))
	maps.Copy(all, operationsWith("shares: ",
		configured(newClaim("a", share("s", 0, 4, 1), shareOf("p", 1, "3g.40gb", 4, 2, 0), replica("r", 2, 2, 1)), `{"strategy":"MPS"}`),
		newClaim("b", share("s", 0, 4, 2), shareOf("p", 1, "3g.40gb", 4, 2, 1), replica("r", 2, 2, 0)),
		newClaim("old", share("s", 0, 4, 1), shareOf("p", 1, "3g.40gb", 4, 2, 0))))
	maps.Copy(all, operationsWith("alone on what is shared: ",
		configured(newClaim("a", asked("s", gpu0, "s1", "10Gi", "50"), asked("t", gpu0, "s2", "10Gi", "50"), result("g", 1)), `{"strategy":"MPS"}`, "g"),
		configured(newClaim("b", result("g", 2)), `{"strategy":"TimeSlicing"}`),
		newClaim("old", shareOf("s", 0, "1g.10gb", 1, 2, 0), replica("r", 1, 2, 0))))
	return all
}

func operationsWith(name string, a, b, old *resourceapi.ResourceClaim) map[string]operation {
	ops := map[string]operation{
		"prepare": {
			before:  []*resourceapi.ResourceClaim{b},
			do:      func(t *testing.T, f *fixture) { mustPrepare(t, f, a) },
			settled: [][]string{{"b"}, {"a", "b"}},
		},
		"prepare again": {
			before:  []*resourceapi.ResourceClaim{a, b},
			do:      func(t *testing.T, f *fixture) { mustPrepare(t, f, a) },
			settled: [][]string{{"a", "b"}},
		},
		"unprepare": {
			before:  []*resourceapi.ResourceClaim{a, b},
			do:      func(t *testing.T, f *fixture) { mustUnprepare(t, f, a) },
			settled: [][]string{{"b"}, {"a", "b"}},
		},
		"prepare that fails": {
			before: []*resourceapi.ResourceClaim{b},
			do: func(t *testing.T, f *fixture) {
				end := f.node.failSpecs(t)
				if _, err := f.Prepare(testContext(t), a); err == nil {
					t.Error("prepared without a mark")
				}
				end()
			},
			settled: [][]string{{"b"}, {"a", "b"}},
		},
		"the next claim after a reboot": {
			before: []*resourceapi.ResourceClaim{old, b},
			do: func(t *testing.T, f *fixture) {
				f.journal.Close()
				f.node.reboot(t)
				f = start(t, f.node, "boot-2", f.node.step)
				mustPrepare(t, f, b)
				f.server.set("old", deleted)
				mustPrepare(t, f, a)
				f.journal.Close()
			},
			settled: [][]string{{"b", "old"}, {"b"}, {"a", "b"}},
		},
	}
	named := map[string]operation{}
	for what, op := range ops {
		op.a, op.b = a, b
		named[name+what] = op
	}
	return named
}

// TestCrash stops after every step of every operation, lets something happen,
// starts again, and asserts the invariants; then prepares and unprepares, in
// both orders, as a kubelet does that never got an answer.
func TestCrash(t *testing.T) {
	for name, op := range operations() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			after := slices.Sorted(maps.Keys(accidents()))
			for n, c := range crashes(t, op) {
				at, crashed := fmt.Sprintf("%02d %s", n, c.step), c.node
				for i, what := range after {
					e := accidents()[what]
					if !*everything && i != n%len(after) {
						continue // each after some of the steps
					}
					t.Run(at+"/"+what, func(t *testing.T) {
						t.Parallel()
						checkAfterCrash(t, op, crashed.crash(t), e)
					})
				}
			}
		})
	}
}

// everything has TestCrash let each event happen after each step.
var everything = flag.Bool("everything", false, "let each event happen after a crash at each step, which takes minutes")

// crash is the node as a step left it.
type crash struct {
	step string
	node *node
}

// crashes does the operation and returns the node as each step leaves it.
func crashes(t *testing.T, op operation) []crash {
	var crashed []crash
	var mu sync.Mutex
	node := newNode(t, 3)
	recording := false
	f := start(t, node, "boot-1", func(step string) {
		mu.Lock()
		defer mu.Unlock()
		if recording {
			crashed = append(crashed, crash{step, node.crash(t)})
		}
	})
	for _, c := range op.before {
		mustPrepare(t, f, c)
	}
	recording = true
	op.do(t, f)
	if len(crashed) < 3 {
		t.Fatalf("only %d steps", len(crashed))
	}
	return crashed
}

func checkAfterCrash(t *testing.T, op operation, node *node, e event) {
	if err := os.Rename(node.marks+aside, node.marks); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	e.apply(t, node)
	boot := e.boot
	if boot == "" {
		boot = node.bootID
	}
	f := start(t, node, boot, nil)
	if err := f.Recover(testContext(t)); err != nil {
		t.Errorf("recover: %v", err)
	}
	checkHealthy(t, node)
	names := f.names()
	settled := false
	for _, s := range op.settled {
		settled = settled || cmp.Equal(s, names)
	}
	if !settled {
		t.Errorf("prepared after recovery: %v, want one of %v", names, op.settled)
	}
	mustUnprepare(t, f, newClaim("old"))
	mustPrepare(t, f, op.a)
	mustPrepare(t, f, op.b) // as the kubelet does after a reboot
	checkHeld(t, f, "a", "b")
	mustUnprepare(t, f, op.a)
	checkHeld(t, f, "b")
	mustPrepare(t, f, op.a)
	mustUnprepare(t, f, op.a)
	mustUnprepare(t, f, newClaim("b"))
	checkHeld(t, f)
}

// TestManyAtOnce prepares and unprepares eight claims at once, again and
// again, on GPUs of their own.
func TestManyAtOnce(t *testing.T) {
	f := newFixture(t, 8)
	ctx := testContext(t)
	var wg sync.WaitGroup
	for n := range 8 {
		wg.Go(func() {
			for i := range 25 {
				c := newClaim(fmt.Sprintf("claim-%d-%d", n, i), result("gpu", n))
				if _, err := f.Prepare(ctx, c); err != nil {
					t.Errorf("prepare: %v", err)
				}
				if err := f.Unprepare(ctx, named(c)); err != nil {
					t.Errorf("unprepare: %v", err)
				}
			}
		})
	}
	wg.Wait()
	checkHeld(t, f)
}

// TestManyWantTheSame has claims of several GPUs fight for four, and their
// kubelet change its mind. It seeds itself and says how.
func TestManyWantTheSame(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	f := newFixture(t, 4)
	ctx := testContext(t)
	var wg sync.WaitGroup
	for n := range 8 {
		random := rand.New(rand.NewPCG(seed, uint64(n)))
		c := newClaim(fmt.Sprintf("claim-%d", n), result("gpu", n%4), result("gpu", (n+1)%4))
		f.server.set(c.Name, deleted)
		wg.Go(func() {
			for range 20 {
				var late sync.WaitGroup
				prepared := inBackground(ctx, f, c)
				if random.IntN(2) == 0 {
					late.Go(func() { _ = f.Unprepare(ctx, named(c)) })
				}
				<-prepared
				late.Wait()
				if err := f.Unprepare(ctx, named(c)); err != nil {
					t.Errorf("unprepare: %v", err)
				}
			}
		})
	}
	wg.Wait()
	checkHeld(t, f)
}
