package page_test

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/cookiejar"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/pkg/kubectl/feed"
	"github.com/tessera-dra/tessera/pkg/kubectl/feed/feedtest"
	"github.com/tessera-dra/tessera/pkg/kubectl/page"
	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

var seed = flag.Uint64("seed", rand.Uint64(), "seed of the random changes; printed with a failure")

func source(t *testing.T, c *feedtest.Cluster) *feed.Source {
	t.Helper()
	s, err := feed.NewSource(c.Resources(), feed.SourceOptions{Cluster: "test", Namespace: "vision", PoolLabels: view.PoolLabels()})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// serve serves a cluster until the test ends.
func serve(t *testing.T, c *feedtest.Cluster) *page.Server {
	t.Helper()
	s := source(t, c)
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	handler, err := page.NewServer(listener.Addr(), s, func(_ context.Context, namespace, pod string) (any, error) {
		return map[string]string{"text": "because of " + namespace + "/" + pod}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	server := &http.Server{Handler: handler}
	ended := make(chan struct{})
	go func() { s.Run(ctx); close(ended) }()
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { cancel(); _ = server.Close(); <-ended })
	return handler
}

// browser is a client with cookies, which ends with the test.
func browser(t *testing.T) *http.Client {
	t.Helper()
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Jar: jar, Transport: transport}
}

func get(t *testing.T, client *http.Client, url string) *http.Response {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	reply, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = reply.Body.Close() })
	return reply
}

// screen is the content of a page that follows the events.
type screen struct {
	Cluster feed.Cluster
	Nodes   map[string]view.PageNode
	all     bool
	events  *bufio.Scanner
}

// open opens the page, and follows its events.
func open(t *testing.T, s *page.Server) *screen {
	t.Helper()
	client := browser(t)
	at := get(t, client, s.URL()).Request.URL
	events := bufio.NewScanner(get(t, client, at.JoinPath("events").String()).Body)
	events.Buffer(nil, 64<<20)
	return &screen{Nodes: make(map[string]view.PageNode), events: events}
}

// until reads events until ok returns true, and fails the test if it doesn't within a
// minute.
func (s *screen) until(t *testing.T, want string, ok func() bool) {
	t.Helper()
	late := time.AfterFunc(time.Minute, func() { panic("no event leads to: " + want) })
	defer late.Stop()
	for !ok() {
		event, data := "", ""
		for s.events.Scan() && s.events.Text() != "" {
			switch name, value, _ := strings.Cut(s.events.Text(), ": "); name {
			case "event":
				event = value
			case "data":
				data = value
			}
		}
		if err := s.events.Err(); err != nil || event == "" {
			t.Fatalf("the events ended before %s: %v", want, err)
		}
		s.apply(t, event, []byte(data))
	}
}

func (s *screen) apply(t *testing.T, event string, data []byte) {
	t.Helper()
	var err error
	switch event {
	case "cluster":
		s.Cluster = feed.Cluster{}
		err = json.Unmarshal(data, &s.Cluster)
	case "nodes":
		var nodes []view.PageNode
		err = json.Unmarshal(data, &nodes)
		for _, n := range nodes {
			s.Nodes[n.Name] = n
		}
	case "gone":
		var names []string
		err = json.Unmarshal(data, &names)
		for _, name := range names {
			delete(s.Nodes, name)
		}
	case "all":
		s.all = true
	default:
		t.Errorf("unknown event %s", event)
	}
	if err != nil {
		t.Fatalf("event %s: %v", event, err)
	}
}

// want is the page of the whole model, built at once.
func want(t *testing.T, c *feedtest.Cluster) map[string]view.PageNode {
	t.Helper()
	out := make(map[string]view.PageNode)
	for _, n := range view.Build(c.Objects()).Nodes {
		pool, _, _ := strings.Cut(n.Name, "-")
		raw, err := json.Marshal(view.Page(n, map[string]string{"train": "training", "infer": "inference"}[pool]))
		if err != nil {
			t.Fatal(err)
		}
		var p view.PageNode
		if err := json.Unmarshal(raw, &p); err != nil {
			t.Fatal(err)
		}
		out[n.Name] = p
	}
	return out
}

// TestFollows: after any changes, the events lead to the same page as building all of
// it again.
func TestFollows(t *testing.T) {
	t.Logf("-seed %d", *seed)
	random := rand.New(rand.NewPCG(*seed, 0))
	c, err := feedtest.Mixed()
	if err != nil {
		t.Fatal(err)
	}
	s := serve(t, c)
	page := open(t, s)
	equal := func() bool { return cmp.Equal(want(t, c), page.Nodes) }
	page.until(t, "the whole page", func() bool { return page.all && equal() })
	claims := c.Objects().Claims
	pool := "train-0"
	rule := &resourceapi.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: "rule"}}
	rule.Spec.DeviceSelector = &resourceapi.DeviceTaintSelector{Pool: &pool}
	rule.Spec.Taint = resourceapi.DeviceTaint{Key: "example.com/board", Value: "loose", Effect: resourceapi.DeviceTaintEffectNoSchedule}
	gone := make(map[int]bool)
	for range 12 {
		for range 1 + random.IntN(4) {
			switch i := random.IntN(len(claims)); {
			case i == 0 && len(c.TaintRules.Items) == 0:
				c.TaintRules.Add(rule.DeepCopy())
			case i == 0:
				c.TaintRules.Delete(rule.DeepCopy())
			case gone[i]:
				c.Claims.Add(claims[i].DeepCopy())
				gone[i] = false
			default:
				c.Claims.Delete(claims[i].DeepCopy())
				gone[i] = true
			}
		}
		page.until(t, "the changed page", equal)
	}
	for _, o := range c.Objects().Slices {
		if *o.Spec.NodeName == pool {
			c.Slices.Delete(&o)
		}
	}
	page.until(t, "a node without slices", equal)
	for i := range claims {
		if !gone[i] {
			c.Claims.Delete(&claims[i])
		}
	}
	for _, o := range c.Objects().Inventories {
		if o.Name == pool {
			c.Inventories.Delete(&o)
		}
	}
	page.until(t, "a page without the node", func() bool { _, there := page.Nodes[pool]; return !there && equal() })
}

// TestPodGroup: the page shows a PodGroup as such, and not the few of its pods that are
// pending.
func TestPodGroup(t *testing.T) {
	c, err := feedtest.Mixed()
	if err != nil {
		t.Fatal(err)
	}
	claims := c.Objects().Claims
	i := slices.IndexFunc(claims, func(c resourceapi.ResourceClaim) bool { return len(c.Status.ReservedFor) > 0 })
	claim := claims[i].DeepCopy()
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "gang", UID: "g"}}
	c.Claims.Delete(claims[i].DeepCopy())
	c.Claims.Add(claim)
	member := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: claim.Namespace, Name: "gang-7", UID: "m"}}
	member.Spec.NodeName = claim.Status.Allocation.Devices.Results[0].Pool
	member.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: new("gang")}
	member.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &claim.Name}}
	c.Pods.Add(member)
	page := open(t, serve(t, c))
	var use view.Use
	page.until(t, "the claim", func() bool {
		for _, g := range page.Nodes[member.Spec.NodeName].GPUs {
			for _, u := range g.Uses {
				if u.Claim.Name == claim.Name && u.Claim.Namespace == claim.Namespace {
					use = u
				}
			}
		}
		return page.all
	})
	if !slices.Equal(use.PodGroups, []string{"gang"}) || len(use.Pods) > 0 {
		t.Errorf("%+v", use)
	}
}

// TestSendsWhatChanged: a change of one node is sent alone, also to who comes back.
func TestSendsWhatChanged(t *testing.T) {
	c, err := feedtest.Mixed()
	if err != nil {
		t.Fatal(err)
	}
	page := open(t, serve(t, c))
	page.until(t, "the whole page", func() bool { return page.all })
	whole := len(page.Nodes)
	page.Nodes = make(map[string]view.PageNode)
	claims := c.Objects().Claims
	i := slices.IndexFunc(claims, func(o resourceapi.ResourceClaim) bool { return o.Name == "asr-6c9d7-gpu" })
	c.Claims.Delete(&claims[i])
	page.until(t, "the changed node", func() bool { return len(page.Nodes) > 0 })
	if _, ok := page.Nodes["train-1"]; !ok || len(page.Nodes) != 1 {
		t.Errorf("%d of %d nodes were sent again for a claim on train-1", len(page.Nodes), whole)
	}
}

// TestRights: the page says which right is missing, and shows the rest.
func TestRights(t *testing.T) {
	for name, tc := range map[string]struct {
		denied []string
		// notes are the resource and the verb of each.
		notes [][2]string
		check func(t *testing.T, p *screen)
	}{
		"all": {},
		"inventories": {denied: []string{"list gpuinventories"}, notes: [][2]string{{"gpuinventories", "list"}}, check: func(t *testing.T, p *screen) {
			if n := len(p.Nodes["train-0"].GPUs); n != 8 {
				t.Errorf("%d GPUs of train-0, want 8", n)
			}
		}},
		"claims of other namespaces": {denied: []string{"list resourceclaims"}, notes: [][2]string{{"resourceclaims", "list"}}, check: func(t *testing.T, p *screen) {
			for _, g := range p.Nodes["train-0"].GPUs {
				if g.Fits != nil || g.State != view.StateUnknown {
					t.Errorf("GPU %d: state %s, fits %v, although some claims aren't known", g.Index, g.State, g.Fits)
				}
			}
		}},
		"all claims": {denied: []string{"list resourceclaims", "list resourceclaims in"}, notes: [][2]string{{"resourceclaims", "list"}}},
		"watch":      {denied: []string{"watch resourceslices"}, notes: [][2]string{{"resourceslices", "watch"}}},
		"nodes": {denied: []string{"list nodes"}, notes: [][2]string{{"nodes", "list"}}, check: func(t *testing.T, p *screen) {
			if pool := p.Nodes["train-0"].Pool; pool != "NVIDIA H100 80GB HBM3" {
				t.Errorf("pool %q, want the model", pool)
			}
		}},
		"pods": {denied: []string{"list pods", "list pods in"}, notes: [][2]string{{"pods", "list"}}},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := feedtest.Mixed()
			if err != nil {
				t.Fatal(err)
			}
			c.Deny(tc.denied...)
			page := open(t, serve(t, c))
			notes := func() [][2]string {
				var out [][2]string
				for _, n := range page.Cluster.Notes {
					out = append(out, [2]string{n.Resource, n.Verb})
				}
				return out
			}
			page.until(t, "the page with its notes", func() bool { return page.all && cmp.Equal(notes(), tc.notes) })
			if tc.check != nil {
				tc.check(t, page)
			}
			if name == "all" && len(page.Cluster.Waiting) != 2 {
				t.Errorf("%d pods wait, want 2: %v", len(page.Cluster.Waiting), page.Cluster.Waiting)
			}
		})
	}
}

// TestIgnored: the page names objects that are ignored as long as they are there, always
// in the same order.
func TestIgnored(t *testing.T) {
	c, err := feedtest.Mixed()
	if err != nil {
		t.Fatal(err)
	}
	page := open(t, serve(t, c))
	page.until(t, "the page", func() bool { return page.all })
	var rules []*resourceapi.DeviceTaintRule
	var sentences []string
	for i := range 8 {
		rules = append(rules, &resourceapi.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("ignored-%d", i)}})
		sentences = append(sentences, fmt.Sprintf("Rule ignored-%d is ignored.", i))
		c.TaintRules.Add(rules[i])
	}
	page.until(t, "the note with the rules in order", func() bool {
		return cmp.Equal(page.Cluster.Notes, []feed.Note{{Resource: "devicetaintrules", Text: strings.Join(sentences, " ")}})
	})
	for _, r := range rules {
		c.TaintRules.Delete(r.DeepCopy())
	}
	page.until(t, "no note", func() bool { return len(page.Cluster.Notes) == 0 })
}

// TestRightsCome: objects that become readable are shown.
func TestRightsCome(t *testing.T) {
	c, err := feedtest.Mixed()
	if err != nil {
		t.Fatal(err)
	}
	c.Deny("list resourceclaims", "list resourceclaims in")
	page := open(t, serve(t, c))
	page.until(t, "the page", func() bool { return page.all })
	c.Allow("list resourceclaims")
	page.until(t, "the claims", func() bool { return len(page.Cluster.Notes) == 0 && cmp.Equal(want(t, c), page.Nodes) })
}
