//go:build integration

package crash_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
)

// operation is an operation of a plugin that is killed at each of its steps.
type operation struct {
	// other and claim are devices; claim is the subject of the operation.
	other, claim func(*node) []string
	// before is done by plugins that live, do by one that dies.
	before func(t *testing.T, n *node, p *plugin, c *resourceapi.ResourceClaim)
	// do fails where the plugin dies.
	do func(t *testing.T, n *node, p *plugin, c *resourceapi.ResourceClaim) error
	// gone: after the next start the kubelet wants the claim unprepared, and
	// nothing of it may be left before it is prepared again.
	gone bool
	// starting: the steps are those of the plugin's start.
	starting bool
	// only steps with this prefix are tried; those that come in between are the
	// same in other operations.
	only string
	// wants has steps that must be among those of the operation.
	wants []string
	// wipe: try each step with the CDI directory wiped before the next start,
	// too.
	wipe bool
	// mps: a supervisor runs on the node, and outlives the plugin.
	mps bool
	// config is the claim's configuration of sharing.
	config string
}

func first(n *node) []string  { return []string{n.whole(0)} }
func second(n *node) []string { return []string{n.whole(1)} }

func prepareIt(t *testing.T, _ *node, p *plugin, c *resourceapi.ResourceClaim) error {
	_, err := p.prepare(t, c)
	return err
}

func unprepareIt(t *testing.T, _ *node, p *plugin, c *resourceapi.ResourceClaim) error {
	return p.unprepare(t, c)
}

func prepared(t *testing.T, _ *node, p *plugin, c *resourceapi.ResourceClaim) { p.mustPrepare(t, c) }

func nothing(*testing.T, *node, *plugin, *resourceapi.ResourceClaim) {}

func doNothing(*testing.T, *node, *plugin, *resourceapi.ResourceClaim) error { return nil }

// TestWhole kills in what is done to whole GPUs.
func TestWhole(t *testing.T) {
	t.Parallel()
	testOperations(t, map[string]operation{
		"prepare": {
			other: first, claim: second, before: nothing, do: prepareIt, wipe: true,
			wants: []string{
				"journal.put.created", "journal.put.written", "journal.put.synced", "journal.put.renamed", "journal.put.durable",
				"prepare.locked", "prepare.recorded", "prepare.written",
			},
		},
		"unprepare": {
			other: first, claim: second, before: prepared, do: unprepareIt, wipe: true, gone: true,
			wants: []string{"unprepare.removed", "journal.delete.unlinked", "journal.delete.durable", "unprepare.forgotten"},
		},
		"recover": {
			other: first, claim: second, do: doNothing, starting: true, wipe: true,
			before: func(t *testing.T, n *node, p *plugin, c *resourceapi.ResourceClaim) {
				p.mustPrepare(t, c)
				n.wipeCDI(t)
			},
			wants: []string{"recover.written"},
		},
	})
}

// testOperations kills the plugin after each step of each operation, as kill -9
// does; starts it again and runs the doctor, then repeats the kubelet's
// unanswered calls, and continues until nothing is left.
func testOperations(t *testing.T, operations map[string]operation) {
	for name, op := range operations {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			steps := op.steps(t)
			for _, step := range steps {
				t.Run(step, func(t *testing.T) {
					t.Parallel()
					op.crash(t, step, false)
				})
				if op.wipe {
					t.Run(step+", CDI wiped", func(t *testing.T) {
						t.Parallel()
						op.crash(t, step, true)
					})
				}
			}
		})
	}
}

// begin makes a node where the operation is about to be done, and no plugin
// runs.
func (op operation) begin(t *testing.T) (n *node, other, c *resourceapi.ResourceClaim) {
	t.Helper()
	n = newNode(t)
	if op.mps {
		n.supervise(t)
	}
	other, c = n.newClaim(t, op.other(n)...), n.newConfigured(t, op.config, op.claim(n)...)
	p := n.serve(t)
	p.mustPrepare(t, other)
	op.before(t, n, p, c)
	p.kill()
	return n, other, c
}

// steps does the operation to the end and returns its steps.
func (op operation) steps(t *testing.T) []string {
	t.Helper()
	n, _, c := op.begin(t)
	p := n.serve(t)
	steps := p.ran(t)
	if !op.starting {
		starting := len(steps)
		if err := op.do(t, n, p, c); err != nil {
			t.Fatal(err)
		}
		steps = inForeground(p.ran(t)[starting:])
	}
	p.kill()
	op.mustHave(t, steps)
	return slices.DeleteFunc(steps, func(s string) bool { return !strings.HasPrefix(s, op.only) })
}

// inForeground leaves out the steps of the background, which run at a different time each
// time. The background also ensures a daemon when it is the first to see that a claim needs
// other limits: the operation's own call is the second then. And once a stop has begun, it
// asks for the daemon's end (sharing.stopped) only if the supervisor hasn't reported it yet.
func inForeground(steps []string) []string {
	ensured, begun := false, false
	return slices.DeleteFunc(steps, func(s string) bool {
		ensures, stops := strings.HasPrefix(s, "sharing.ensured"), strings.HasPrefix(s, "sharing.stopped")
		drop := ensures && ensured || stops && begun || strings.HasPrefix(s, "recover.")
		ensured, begun = ensured || ensures, begun || s == "sharing.stopBegun"
		return drop
	})
}

func (op operation) mustHave(t *testing.T, steps []string) {
	t.Helper()
	for _, want := range op.wants {
		if !slices.Contains(steps, want) {
			t.Errorf("the operation doesn't come to %s; its steps are %v", want, steps)
		}
	}
}

// crash kills at one step.
func (op operation) crash(t *testing.T, step string, wipe bool) {
	n, other, c := op.begin(t)
	before := n.controls(t, other)
	p := n.start(t, step)
	if !op.starting {
		n.register(t, p)
		if err := op.do(t, n, p, c); err == nil {
			t.Error("the plugin has answered before it died")
		}
	}
	p.waitDead(t)
	if err := n.hardware.ClearFaults(); err != nil {
		t.Fatal(err)
	}
	if wipe {
		n.wipeCDI(t)
	}

	p = n.serve(t)
	n.check(t, "after recovery")
	for _, passing := range n.passing {
		p.mustUnprepare(t, passing)
	}
	if op.gone {
		p.mustUnprepare(t, c)
		n.rests(t)
	}
	p.mustPrepare(t, other)
	p.mustPrepare(t, c)
	n.check(t, "after a prepare")
	p.mustUnprepare(t, c)
	p.mustPrepare(t, c)
	if diff := cmp.Diff(before, n.controls(t, other)); diff != "" {
		t.Errorf("the other claim's MPS daemon is another one (-before +after):\n%s", diff)
	}
	p.mustUnprepare(t, other)
	p.mustUnprepare(t, c)
	n.ask(t, nil)
	n.checkEmpty(t)
}
