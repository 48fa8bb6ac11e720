package slots

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/cli-runtime/pkg/genericclioptions"

	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/feed"
	"github.com/tessera-dra/tessera/pkg/kubectl/feed/feedtest"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

// TestSlotsWatch: after the slots that are there, a line for each claim that goes, comes,
// or has other pods, and none for other nodes; the end of the context ends it without an
// error.
func TestSlotsWatch(t *testing.T) {
	c, err := feedtest.Mixed()
	if err != nil {
		t.Fatal(err)
	}
	source, err := feed.NewSource(feed.Resources{Slices: c.Resources().Slices, Claims: c.Resources().Claims, Inventories: c.Resources().Inventories}, feed.SourceOptions{})
	if err != nil {
		t.Fatal(err)
	}
	lines, out := io.Pipe()
	defer lines.Close()
	o := &cluster.Options{IOStreams: genericclioptions.IOStreams{Out: out, ErrOut: io.Discard}, Flags: genericclioptions.NewConfigFlags(true), Output: "json"}
	ctx, stop := context.WithCancel(t.Context())
	ran, ended := make(chan struct{}), make(chan error, 1)
	go func() { defer close(ran); source.Run(ctx) }()
	go func() { ended <- follow(ctx, o, source, []string{"train-1"}) }()
	read := bufio.NewScanner(lines)
	next := func() slotEvent {
		t.Helper()
		var e slotEvent
		late := time.AfterFunc(time.Minute, func() { panic("no further line comes") })
		defer late.Stop()
		if !read.Scan() {
			t.Fatal("it ends early", read.Err())
		}
		if err := json.Unmarshal(read.Bytes(), &e); err != nil {
			t.Fatal(err)
		}
		return e
	}
	i := slices.IndexFunc(view.Build(c.Objects()).Nodes, func(n view.Node) bool { return n.Name == "train-1" })
	there := view.Page(view.Build(c.Objects()).Nodes[i], "")
	for _, want := range there.Slots() {
		if e := next(); e.Event != slotListed || !cmp.Equal(want, e.Slot, cmpopts.EquateEmpty()) {
			t.Errorf("%s: %s", e.Event, cmp.Diff(want, e.Slot))
		}
	}
	claims := make(map[string]*resourceapi.ResourceClaim)
	for _, claim := range c.Objects().Claims {
		claims[claim.Name] = &claim
	}
	expect := func(event, claim, of string) {
		t.Helper()
		if e := next(); e.Event != event || e.Slot.Use.Claim.Name != claim || terminal.Pods(*e.Slot.Use, false) != of {
			t.Errorf("%s of %s with pods %q, want %s of %s with %q", e.Event, e.Slot.Use.Claim.Name, terminal.Pods(*e.Slot.Use, false), event, claim, of)
		}
	}
	asr := claims["asr-6c9d7-gpu"]
	c.Claims.Delete(claims["llama-70b-0-gpu"].DeepCopy()) // of another node
	c.Claims.Delete(asr.DeepCopy())
	expect(slotDeleted, asr.Name, "asr-6c9d7")
	c.Claims.Add(asr.DeepCopy())
	expect(slotAdded, asr.Name, "asr-6c9d7")
	changed := asr.DeepCopy()
	changed.Status.ReservedFor = nil
	c.Claims.Modify(changed)
	expect(slotModified, asr.Name, "")
	stop()
	<-ran
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestSlotRows: the columns are as wide as the first rows need.
func TestSlotRows(t *testing.T) {
	var out bytes.Buffer
	w := slotWatch{Options: &cluster.Options{IOStreams: genericclioptions.IOStreams{Out: &out, ErrOut: io.Discard}, Flags: genericclioptions.NewConfigFlags(true)}, known: make(map[string][]view.Slot)}
	u := view.Use{Type: "gpu", Claim: view.Claim{Namespace: "team", Name: "train-gpu"}, Pods: []view.Pod{{Name: "train-0"}}}
	node := func(name string, uses ...view.Use) view.PageNode {
		return view.Page(view.Node{Name: name, GPUs: []view.GPU{{Offered: true, MemorySlices: 8, MemoryBytes: 80 << 30, Fits: []view.Fit{{Type: "gpu", Count: 1}}, Uses: uses}}}, "")
	}
	for _, update := range []feed.Update{
		{Nodes: []view.PageNode{node("a-long-name"), node("b", u)}, All: true},
		{Nodes: []view.PageNode{node("a-long-name", u)}}, {Gone: []string{"b"}},
	} {
		if err := w.update(update); err != nil {
			t.Fatal(err)
		}
	}
	want := strings.TrimPrefix(`
EVENT     NODE         GPU  SLOTS  KIND  MEMORY  NAMESPACE  CLAIM      PODS
LISTED    a-long-name  0    0-7    free  80Gi    -          -          -
LISTED    b            0    0-7    gpu   -       team       train-gpu  train-0
ADDED     a-long-name  0    0-7    gpu   -       team       train-gpu  train-0
DELETED   b            0    0-7    gpu   -       team       train-gpu  train-0
`, "\n")
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
