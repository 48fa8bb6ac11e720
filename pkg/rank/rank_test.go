package rank

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
)

// nodes reads nodes of words such as "a:8/8@96=6h!" : the name, free and all GPUs, free CPUs, the
// rank that it has (h: hard), ! if one claim has all GPUs, ~ if it is away. A pool's name and a
// slash may come before.
func nodes(t *testing.T, text string) []Node {
	t.Helper()
	var out []Node
	for word := range strings.FieldsSeq(text) {
		var n Node
		n.OneClaim, n.Away = strings.Contains(word, "!"), strings.Contains(word, "~")
		word = strings.Trim(word, "!~")
		name, rest, _ := strings.Cut(word, ":")
		if pool, of, ok := strings.Cut(name, "."); ok {
			n.Pool, name = pool, of
		}
		n.Name = name
		rest, has, _ := strings.Cut(rest, "=")
		if has != "" {
			n.Decided.Hard = strings.HasSuffix(has, "h")
			if _, err := fmt.Sscanf(has, "%d", &n.Decided.Taints); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := fmt.Sscanf(strings.ReplaceAll(rest, "@", " "), "%d/%d %d", &n.Free, &n.GPUs, &n.FreeCPU); err != nil {
			t.Fatalf("%s: %v", word, err)
		}
		out = append(out, n)
	}
	return out
}

func text(ranks map[string]Rank) string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(ranks)) {
		hard := map[bool]string{true: "h"}[ranks[name].Hard]
		out = append(out, fmt.Sprintf("%s=%d%s", name, ranks[name].Taints, hard))
	}
	return strings.Join(out, " ")
}

func TestNodes(t *testing.T) {
	for name, c := range map[string]struct {
		nodes string
		hard  int
		want  string
	}{
		"none":                       {"", 0, ""},
		"without GPUs":               {"a:0/0@96 b:0/0@96", 1, "a=0 b=0"},
		"one GPU a node":             {"a:1/1@8 b:0/1@8", 1, "a=0 b=0"},
		"steps, and the reserve":     {"a:8/8@96 b:8/8@95 c:7/8@90 d:6/8@90 e:5/8@90 f:3/8@90 g:2/8@90 h:0/8@90", 0, "a=6 b=4 c=2 d=2 e=1 f=1 g=0 h=0"},
		"smaller nodes have no rank": {"a:8/8@96 b:4/4@96 c:2/4@96 d:0/0@96", 0, "a=6 b=0 c=0 d=0"},
		"the most free CPU":          {"a:8/8@50 b:8/8@96 c:8/8@60", 0, "a=4 b=6 c=4"},
		"names decide between equal": {"b:8/8@96 a:8/8@96", 0, "a=6 b=4"},
		"members stay while unused":  {"a:8/8@96 b:8/8@10=6", 0, "a=4 b=6"},
		"a member that is used":      {"a:8/8@96 b:7/8@10=6", 0, "a=6 b=2"},
		"a member that one claim has stays, and doesn't count": {
			"a:8/8@96 b:0/8@10=6! c:8/8@95", 0, "a=6 b=6 c=4"},
		"one claim has a node that was none": {"a:8/8@96 b:0/8@10=0!", 0, "a=6 b=0"},
		"more members than wanted stay":      {"a:8/8@96=6 b:8/8@10=6 c:8/8@97", 0, "a=6 b=6 c=4"},
		"a tenth, rounded up": {
			"a:8/8@1 b:8/8@2 c:8/8@3 d:8/8@4 e:8/8@5 f:8/8@6 g:8/8@7 h:8/8@8 i:8/8@9 j:8/8@10 k:8/8@11", 0,
			"a=4 b=4 c=4 d=4 e=4 f=4 g=4 h=4 i=4 j=6 k=6"},
		"a pool each":                {"x.a:8/8@96 x.b:4/4@96 y.c:4/4@50 y.d:4/4@60", 0, "a=6 b=0 c=4 d=6"},
		"away":                       {"a:8/8@96=6~ b:8/8@90 c:16/16@1~", 0, "b=6"},
		"a sick GPU":                 {"a:7/8@96=6 b:8/8@10", 0, "a=2 b=6"},
		"hard":                       {"a:8/8@96 b:8/8@95 c:8/8@94", 2, "a=6h b=6h c=4"},
		"hard members stay":          {"a:8/8@96=6 b:8/8@95=6h c:8/8@94", 1, "a=6 b=6h c=4"},
		"hard, and one claim has it": {"a:8/8@96 b:0/8@5=6h! c:8/8@94", 1, "a=6h b=6h c=4"},
		"hard, and given back: no more than wanted": {"a:8/8@96=6h b:8/8@5=6h c:8/8@94", 1, "a=6h b=6 c=4"},
		"hard is switched off":                      {"a:8/8@96=6h b:8/8@5", 0, "a=6 b=4"},
		"hard, and nothing is unused":               {"a:7/8@96=6h b:3/8@5", 2, "a=2 b=1"},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, text(Decide(nodes(t, c.nodes), c.hard))); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestRanksStay: ranks that were given are the ranks of the same nodes again.
func TestRanksStay(t *testing.T) {
	all := nodes(t, "a:8/8@96 b:8/8@95 c:8/8@94 d:0/8@5! e:3/8@1 f:6/8@3 g:2/4@9")
	first := Decide(all, 1)
	for i := range all {
		all[i].Decided = first[all[i].Name]
		all[i].FreeCPU = int64(i) // now the others would be chosen
	}
	if diff := cmp.Diff(text(first), text(Decide(all, 1))); diff != "" {
		t.Errorf("(-first +second):\n%s", diff)
	}
}

func TestPace(t *testing.T) {
	start := time.Unix(1000, 0)
	p := Pace{Pause: 10 * time.Second}
	for _, c := range []struct {
		at    int
		has   Rank
		want  Rank
		due   bool
		after int
	}{
		{0, Rank{Taints: 4}, Rank{Taints: 2}, true, 0},
		{0, Rank{Taints: 2}, Rank{Taints: 2}, false, 0},
		{1, Rank{Taints: 2}, Rank{Taints: 4}, false, 10},
		{5, Rank{Taints: 2}, Rank{Taints: 6, Hard: true}, false, 6},
		{6, Rank{Taints: 2}, Rank{Taints: 2}, false, 0}, // another pod came
		{7, Rank{Taints: 2}, Rank{Taints: 4}, false, 10},
		{17, Rank{Taints: 2}, Rank{Taints: 4}, true, 0},
		{18, Rank{Taints: 6, Hard: true}, Rank{Taints: 6}, true, 0},
		{19, Rank{Taints: 6}, Rank{Taints: 6, Hard: true}, false, 10},
	} {
		due, after := p.Due("n", c.has, c.want, start.Add(time.Duration(c.at)*time.Second))
		if due != c.due || after != time.Duration(c.after)*time.Second {
			t.Errorf("at %d s, from %v to %v: %t, in %s; want %t, in %d s", c.at, c.has, c.want, due, after, c.due, c.after)
		}
	}
}

func TestTaints(t *testing.T) {
	theirs := []corev1.Taint{
		{Key: "gpu.tessera.dev/rank-1", Effect: corev1.TaintEffectNoSchedule, Value: "mine"},
		{Key: "nvidia.com/gpu", Effect: corev1.TaintEffectNoSchedule},
		{Key: "gpu.tessera.dev/rank-7", Effect: corev1.TaintEffectPreferNoSchedule},
		{Key: "gpu.tessera.dev/reserve", Effect: corev1.TaintEffectPreferNoSchedule},
	}
	taints, changed := Rank{}.Apply(theirs)
	if diff := cmp.Diff(theirs, taints); diff != "" || changed {
		t.Errorf("others' taints change (-want +got):\n%s", diff)
	}
	for _, r := range []Rank{{Taints: 6, Hard: true}, {Taints: 1}, {Taints: 4}, {Taints: 6}, {}} {
		var changed bool
		taints, changed = r.Apply(taints)
		if diff := cmp.Diff(r, Of(taints)); diff != "" || !changed {
			t.Errorf("(-want +got):\n%s", diff)
		}
		if diff := cmp.Diff(theirs, taints[:len(theirs)]); diff != "" {
			t.Errorf("others' taints change (-want +got):\n%s", diff)
		}
		if _, again := r.Apply(taints); again {
			t.Errorf("%+v: changed again", r)
		}
	}
	// Somebody changed one of them: all are put back.
	want, _ := Rank{Taints: 4, Hard: true}.Apply(nil)
	for what, taints := range map[string][]corev1.Taint{
		"the first is missing": want[1:],
		"the last is missing":  want[:4],
		"one is there twice":   append(slices.Clone(want), want[0]),
		"one is another":       slices.Concat(want[:3], []corev1.Taint{{Key: "gpu.tessera.dev/rank-6", Effect: corev1.TaintEffectPreferNoSchedule}}, want[4:]),
		"their order differs":  slices.Concat(want[1:], want[:1]),
	} {
		got, changed := Rank{Taints: 4, Hard: true}.Apply(taints)
		if diff := cmp.Diff(want, got); diff != "" || !changed {
			t.Errorf("%s: changed: %t (-want +got):\n%s", what, changed, diff)
		}
	}
}

// TestTaintsCostNothing: taints that are right are looked at without work, because that happens for
// all nodes at each claim.
func TestTaintsCostNothing(t *testing.T) {
	theirs := []corev1.Taint{{Key: "nvidia.com/gpu", Effect: corev1.TaintEffectNoSchedule}}
	for _, r := range []Rank{{}, {Taints: 4}, {Taints: 6, Hard: true}} {
		taints, _ := r.Apply(theirs)
		if n := testing.AllocsPerRun(10, func() {
			if _, changed := Of(taints).Apply(taints); changed {
				t.Error("taints that are right are changed")
			}
		}); n > 0 {
			t.Errorf("%+v: %g allocations", r, n)
		}
	}
}
