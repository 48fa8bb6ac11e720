package browser_test

import (
	"flag"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/kubectl/feed/feedtest"
	"github.com/tessera-dra/tessera/pkg/kubectl/page"
	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

var pictures = flag.String("pictures", "", "directory to write the pictures of docs/user/operate.md to")

// picture writes a picture, if they are wanted.
func (p *tab) picture(name string) {
	p.t.Helper()
	if *pictures == "" {
		return
	}
	p.until(`document.fonts.status === "loaded"`)
	png, err := chromedp.Run(p.ctx, chromedp.CaptureScreenshot())
	if err == nil {
		err = os.WriteFile(filepath.Join(*pictures, name), png, 0o644)
	}
	if err != nil {
		p.t.Fatal(err)
	}
}

// gpu is a GPU as it is drawn: places are rounded percents of its bar.
type gpu struct {
	State string
	Slots int
	Uses  []use
}

// use is a part of a GPU as it is drawn.
type use struct {
	Kind, Name string
	From, Size int
}

// drawnGPUs are the bars of the page, by node and index, measured in pixels.
const drawnGPUs = `Object.fromEntries([...document.querySelectorAll("#map .gpu")].map((g) => {
	const bar = g.querySelector(".bar"), all = bar.getBoundingClientRect(), of = (x) => Math.round(100 * x / (all.width - 2));
	return [g.closest(".node").dataset.node + "/" + g.querySelector(".index").innerText, {
		State: bar.dataset.state, Slots: Number(bar.dataset.slots ?? bar.dataset.slices ?? 0),
		Uses: [...bar.querySelectorAll(".seg")].map((s) => {
			const r = s.getBoundingClientRect();
			return {Kind: [...s.classList].filter((c) => c.startsWith("k-") || c === "foreign").join(" ").replace("k-", ""), Name: s.querySelector("b").textContent,
				From: of(r.left - all.left - 1), Size: of(r.width)};
		}),
	}];
}))`

// wanted are the same, from the model.
func wanted(c *feedtest.Cluster) map[string]gpu {
	out := make(map[string]gpu)
	for _, n := range view.Build(c.Objects()).Nodes {
		for _, g := range view.Page(n, "").GPUs {
			d := gpu{State: string(g.State), Slots: g.MemorySlices, Uses: []use{}}
			for _, x := range g.Instances {
				d.Uses = append(d.Uses, use{Kind: "foreign", Name: x.Profile, From: percent(x.Placement.Start, g.MemorySlices), Size: percent(x.Placement.Size, g.MemorySlices)})
			}
			for _, s := range g.Segments {
				u := g.Uses[s.Uses[0]]
				name := "(" + u.Claim.Name + ")"
				if len(u.Pods) > 0 {
					name = u.Pods[0].Name
				}
				d.Uses = append(d.Uses, use{Kind: u.Type, Name: name, From: int(100*s.Start + .5), Size: int(100*s.Size + .5)})
			}
			out[fmt.Sprintf("%s/%d", n.Name, g.Index)] = d
		}
	}
	return out
}

func percent(n, of int) int { return int(100*float64(n)/float64(of) + .5) }

// near compares what is drawn with the model, to one percent.
func near(a, b use) bool {
	abs := func(n int) int { return max(n, -n) }
	return a.Kind == b.Kind && a.Name == b.Name && abs(a.From-b.From) <= 1 && abs(a.Size-b.Size) <= 1
}

func (p *tab) compare(c *feedtest.Cluster) {
	p.t.Helper()
	if diff := cmp.Diff(wanted(c), eval[map[string]gpu](p, drawnGPUs), cmp.Comparer(near)); diff != "" {
		p.t.Errorf("the page differs from the model (-model +page):\n%s", diff)
	}
}

// counts are the numbers of GPUs at the top, by state.
func (p *tab) counts() map[string]int {
	p.t.Helper()
	return eval[map[string]int](p, `Object.fromEntries([...document.querySelectorAll(".total[data-state]")].map((x) => [x.dataset.state, Number(x.dataset.count)]).filter(([, n]) => n))`)
}

func states(c *feedtest.Cluster) map[string]int {
	out := make(map[string]int)
	for _, n := range view.Build(c.Objects()).Nodes {
		for _, g := range view.Page(n, "").GPUs {
			out[string(g.State)]++
		}
	}
	return out
}

func made(t *testing.T, state func() (*feedtest.Cluster, error)) *feedtest.Cluster {
	t.Helper()
	c, err := state()
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestEmpty(t *testing.T) {
	p := open(t, serve(t, feedtest.New()))
	p.drawn()
	if got := p.words("#map"); !strings.Contains(got, "No GPUs can be seen.") || !strings.Contains(got, "kubectl get gpuinventories") {
		t.Errorf("an empty cluster: %s", got)
	}
}

func TestIdle(t *testing.T) {
	c := made(t, feedtest.Idle)
	p := open(t, serve(t, c))
	p.drawn()
	p.compare(c)
	if diff := cmp.Diff(states(c), p.counts()); diff != "" {
		t.Errorf("counts (-model +page):\n%s", diff)
	}
	if got := p.words("#attention"); !strings.Contains(got, "No pod waits") {
		t.Errorf("attention: %s", got)
	}
}

// TestMixed: everything that can be on a page, live, and by mouse and keys.
func TestMixed(t *testing.T) {
	c := made(t, feedtest.Mixed)
	p := open(t, serve(t, c))
	p.drawn()
	p.compare(c)
	if diff := cmp.Diff(states(c), p.counts()); diff != "" {
		t.Errorf("counts (-model +page):\n%s", diff)
	}
	if got := eval[[]string](p, `[...document.querySelectorAll(".pool")].map((x) => x.dataset.pool)`); !slices.Equal(got, []string{"inference", "training"}) {
		t.Errorf("pools %q", got)
	}
	p.until(`document.querySelector("#attention").innerText.includes("16 devices")`)
	p.run("hover", func(t *testing.T) {
		p.mouse(`[data-node="train-0"] .seg.k-mig`, false)
		p.until(`!document.querySelector("#tip").hidden`)
		if got := p.words("#tip"); !strings.Contains(got, "tracker-77b4") || !strings.Contains(got, "vision/tracker-77b4-gpu") {
			t.Errorf("the tooltip: %s", got)
		}
		eval[chromedp.Void](p, `document.documentElement.dataset.theme = "dark"`)
		p.picture("web-mixed-dark.png")
	})
	p.run("click", func(t *testing.T) {
		p.mouse(`[data-node="train-1"] .gpu[data-state="blocked"]`, true)
		p.until(`document.querySelector("#inspector").innerText.includes("XID 95")`)
		p.press(kb.Escape)
		p.until(`document.querySelector("#inspector").hidden`)
	})
	p.run("search", func(t *testing.T) {
		p.search("llama-70b-1")
		p.until(`document.querySelectorAll("#map .gpu").length === 1`)
		p.press(kb.Escape)
		p.until(`document.querySelectorAll("#map .gpu").length === 24`)
		p.mouse(`.total[data-state="free"]`, true)
		p.until(fmt.Sprintf(`document.querySelectorAll("#map .gpu").length === %d`, states(c)["free"]))
		p.mouse(`.total[data-state="free"]`, true)
		p.until(`document.querySelectorAll("#map .gpu").length === 24`)
	})
	p.run("keys", func(t *testing.T) {
		eval[chromedp.Void](p, `document.querySelector('#map [tabindex="0"]').focus()`)
		first := eval[string](p, `document.activeElement.dataset.key`)
		p.press(kb.ArrowRight)
		if now := eval[string](p, `document.activeElement.dataset.key`); now == first || !strings.HasPrefix(now, "infer-0/") {
			t.Errorf("the right arrow key leads from %s to %s", first, now)
		}
		p.press(kb.Enter)
		p.until(`!document.querySelector("#inspector").hidden`)
		p.press(kb.Escape)
	})
	p.run("markup", func(*testing.T) {
		c.Wait("lab", "markup", "gpu", markup, 0)
		p.until(fmt.Sprintf(`document.querySelector("#attention").innerText.includes(%q)`, markup))
	})
	p.run("live", func(t *testing.T) {
		claims := c.Objects().Claims
		i := slices.IndexFunc(claims, func(o resourceapi.ResourceClaim) bool { return o.Name == "eval-suite-gpu" })
		c.Claims.Delete(&claims[i])
		p.until(`!document.querySelector('[data-node="train-1"]').innerText.includes("eval-suite")`)
		p.compare(c)
		claims[i].ResourceVersion = ""
		c.Claims.Add(claims[i].DeepCopy())
		p.until(`document.querySelector('[data-node="train-1"]').innerText.includes("eval-suite")`)
		p.compare(c)
	})
}

// TestRights: the page names the missing rights, and draws the rest.
func TestRights(t *testing.T) {
	c := made(t, feedtest.Mixed)
	c.Deny("list resourceclaims", "list gpuinventories", "watch nodes")
	p := open(t, serve(t, c))
	p.drawn()
	got := eval[map[string]string](p, `Object.fromEntries([...document.querySelectorAll(".note")].map((n) => [n.dataset.resource, n.dataset.verb]))`)
	if diff := cmp.Diff(map[string]string{"resourceclaims": "list", "gpuinventories": "list", "nodes": "watch"}, got); diff != "" {
		t.Errorf("notes (-want +got):\n%s", diff)
	}
	if n := eval[int](p, `document.querySelectorAll("#map .gpu").length`); n != 24 {
		t.Errorf("%d GPUs are drawn, want 24", n)
	}
	p.until(`document.querySelector("#live").dataset.live === "polling"`)
}

// TestTheme: the page is dark where the system is, until the user chooses.
func TestTheme(t *testing.T) {
	p := open(t, serve(t, feedtest.New()))
	p.drawn()
	background := func() string { return eval[string](p, `getComputedStyle(document.body).backgroundColor`) }
	scheme := func(value string) {
		features := []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: value}}
		if _, err := chromedp.Call(p.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: features}); err != nil {
			t.Fatal(err)
		}
	}
	scheme("light")
	light := background()
	scheme("dark")
	dark := background()
	if light == dark {
		t.Errorf("both are %s", light)
	}
	p.mouse("#theme", true)
	if got := background(); got != light {
		t.Errorf("the switch to light: %s, want %s", got, light)
	}
}

// TestKeysGoOn: a step into a pool or a node leads the keyboard to the first GPU there, from
// which arrow keys go on, and a step back stays at the GPU.
func TestKeysGoOn(t *testing.T) {
	c := made(t, feedtest.Mixed)
	p := open(t, serve(t, c))
	p.drawn()
	for _, opens := range []string{"pool training", "node train-1"} {
		p.run(opens, func(*testing.T) {
			p.focus(fmt.Sprintf("[data-key=%q]", opens))
			p.press(kb.Enter)
			p.until(`document.querySelector(".crumbs") !== null`)
			p.until(`document.activeElement.matches("#map .gpu")`)
			gpu := eval[string](p, `document.activeElement.dataset.key`)
			p.press(kb.Escape)
			p.until(`document.querySelector(".crumbs") === null`)
			p.until(isFocused(gpu))
		})
	}
	p.run("live", func(*testing.T) {
		gpu := p.focus(`[data-node="train-1"] .gpu`)
		claims := c.Objects().Claims
		i := slices.IndexFunc(claims, func(o resourceapi.ResourceClaim) bool { return o.Name == "eval-suite-gpu" })
		c.Claims.Delete(&claims[i])
		p.until(`!document.querySelector('[data-node="train-1"]').innerText.includes("eval-suite")`)
		p.until(isFocused(gpu))
	})
	for key, name := range map[string]string{kb.Enter: "enter", kb.Escape: "escape"} {
		p.run("details left by "+name, func(*testing.T) {
			gpu := p.focus(`[data-node="train-1"] .gpu`)
			p.press(kb.Enter)
			p.until(`!document.querySelector("#inspector").hidden`)
			p.picture("web-keyboard.png")
			eval[chromedp.Void](p, `document.querySelector('#inspector [data-key="close"]').focus()`)
			p.press(key)
			p.until(`document.querySelector("#inspector").hidden`)
			p.until(isFocused(gpu))
		})
	}
	p.run("details left by mouse", func(*testing.T) {
		p.mouse(`[data-node="train-1"] .gpu`, true)
		p.until(`!document.querySelector("#inspector").hidden`)
		p.mouse(`#inspector [data-key="close"]`, true)
		p.until(`document.querySelector("#inspector").hidden`)
		p.until(`document.activeElement === document.body`)
	})
	p.run("mouse", func(*testing.T) {
		p.mouse(`[data-key="pool training"]`, true)
		p.until(`document.querySelector(".crumbs") !== null`)
		p.until(`document.activeElement === document.body`)
	})
}

// TestDetailsReplaceTip: the GPU whose details are open has no tooltip, which would hide the next
// row. Other GPUs have one, and under the mouse so has this one when its details are closed.
func TestDetailsReplaceTip(t *testing.T) {
	const hidden, opened = `document.querySelector("#tip").hidden`, `!document.querySelector("#inspector").hidden`
	p := open(t, serve(t, made(t, feedtest.Mixed)))
	p.drawn()
	p.run("keys", func(*testing.T) {
		gpu := p.focus(`[data-node="infer-0"] .gpu`)
		p.until("!" + hidden)
		p.press(kb.Enter)
		p.until(opened)
		p.until(hidden)
		p.press(kb.ArrowDown)
		p.until("!" + hidden)
		p.press(kb.ArrowUp)
		p.until(isFocused(gpu))
		p.until(hidden)
		p.press(kb.Escape)
		p.until("!" + opened)
	})
	p.run("mouse", func(*testing.T) {
		const first, second = `[data-node="infer-0"] li:nth-child(1) .index`, `[data-node="infer-0"] li:nth-child(2) .index`
		p.mouse(first, true)
		p.until(opened)
		p.mouse(second, false)
		p.until("!" + hidden)
		p.mouse(first, false)
		p.until(hidden)
		p.mouse(first, true)
		p.until("!" + opened)
		p.mouse(first, false)
		p.until("!" + hidden)
	})
}

// TestKeysGoOnAmongTiles: where nodes are cells, the step back leads to the node that was opened.
func TestKeysGoOnAmongTiles(t *testing.T) {
	p := open(t, serve(t, made(t, feedtest.Many)))
	p.drawn()
	p.focus(`[data-key="dev-003"]`)
	p.press(kb.ArrowRight)
	p.until(isFocused("dev-004"))
	p.press(kb.Enter)
	p.until(`document.activeElement.matches("#map .gpu")`)
	p.press(kb.Escape)
	p.until(isFocused("dev-004"))
}

// focus gives the focus to an element of the map as the keyboard does, and returns its key.
func (p *tab) focus(selector string) string {
	p.t.Helper()
	p.press(kb.Tab) // so that the browser knows that keys are in use
	return eval[string](p, fmt.Sprintf(`(() => {
		document.querySelector('#map %s').focus();
		return document.activeElement.dataset.key ?? "";
	})()`, selector))
}

func isFocused(key string) string {
	return fmt.Sprintf("document.activeElement.dataset.key === %q", key)
}

// TestPhone: on a narrow screen nothing is cut off, the list of problems comes first, and the
// GPU that was touched is described where the user looks.
func TestPhone(t *testing.T) {
	p := open(t, serve(t, made(t, feedtest.Mixed)))
	if err := chromedp.Do(p.ctx, chromedp.EmulateViewport(390, 844)); err != nil {
		t.Fatal(err)
	}
	p.drawn()
	p.until(`document.documentElement.scrollWidth <= innerWidth`)
	p.until(`document.querySelector("#attention").getBoundingClientRect().bottom < document.querySelector("#map").getBoundingClientRect().top`)
	p.mouse(`[data-node="train-1"] .gpu`, true)
	p.until(`!document.querySelector("#inspector").hidden`)
	p.until(`(({top, bottom}) => top > 0 && bottom <= innerHeight)(document.querySelector("#inspector").getBoundingClientRect())`)
	p.until(`document.querySelector('[aria-pressed="true"].gpu').getBoundingClientRect().bottom < document.querySelector("#inspector").getBoundingClientRect().top`)
	p.picture("web-phone.png")
}

// TestMany: 5,000 GPUs as cells, in pools, down to one of them.
func TestMany(t *testing.T) {
	c := made(t, feedtest.Many)
	address := serve(t, c)
	open(t, address).drawn() // until the cluster has been read
	p := open(t, address)
	p.drawn()
	p.logTimes("a browser that was just started")
	for range 5 {
		p.again(address)
		p.drawn()
		p.logTimes("a running one")
	}
	if diff := cmp.Diff(states(c), p.counts()); diff != "" {
		t.Errorf("counts (-model +page):\n%s", diff)
	}
	if n := eval[int](p, `document.querySelectorAll("#map .tile").length`); n != 625 {
		t.Errorf("%d nodes are drawn, want 625", n)
	}
	p.mouse("header", false)
	p.picture("web-5000.png")
	p.mouse(`[data-key="pool development"]`, true)
	p.until(`document.querySelectorAll("#map .gpu").length === 200`)
	p.mouse(`[data-key="node dev-003"]`, true)
	p.until(`document.querySelectorAll("#map .gpu").length === 8`)
	p.press(kb.Escape)
	p.until(`document.querySelectorAll("#map .gpu").length === 200`)
	p.press(kb.Escape)
	p.until(`document.querySelectorAll("#map .tile").length === 625`)
	p.search("pretrain-3-train-200")
	p.until(`document.querySelectorAll("#map .gpu").length === 1`)
}

// logTimes logs how long the page took.
func (p *tab) logTimes(browser string) {
	p.t.Helper()
	at := func(mark string) float64 {
		return eval[float64](p, fmt.Sprintf(`performance.getEntriesByName(%q)[0].startTime`, mark))
	}
	p.t.Logf("%s: 5,000 GPUs are drawn %.0f ms after the request for the page, everything about them is there after %.0f ms", browser, at("outline"), at("everything"))
}

// TestOutline: the picture of the outline stays when everything has come.
func TestOutline(t *testing.T) {
	c := made(t, feedtest.Many)
	held := make(chan struct{})
	var hold atomic.Bool
	address := serveBy(t, c, func(s *page.Server) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if hold.Load() && strings.HasSuffix(r.URL.Path, "/events") {
				select {
				case <-held:
				case <-r.Context().Done():
				}
			}
			s.ServeHTTP(w, r)
		})
	})
	p := open(t, address)
	p.drawn() // so that the cluster has been read
	hold.Store(true)
	p.again(address)
	p.painted("outline")
	parts := func() map[string]string {
		return eval[map[string]string](p, `Object.fromEntries(["map", "totals", "attention", "policies"].map((id) => [id, document.getElementById(id).innerHTML]))`)
	}
	before := parts()
	if diff := cmp.Diff(states(c), p.counts()); diff != "" {
		t.Errorf("counts (-model +page):\n%s", diff)
	}
	if eval[bool](p, `performance.getEntriesByName("everything").length > 0`) {
		t.Error("everything has come, although it was held back")
	}
	p.mouse(`.tile[data-key="dev-003"]`, true)
	p.until(`document.querySelector("#map").innerText.includes("Reading the cluster")`)
	p.press(kb.Escape)
	close(held)
	p.drawn()
	if diff := cmp.Diff(before, parts()); diff != "" {
		t.Errorf("drawn from the outline and from everything (-outline +everything):\n%s", diff)
	}
}
