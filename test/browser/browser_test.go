package browser_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"github.com/tessera-dra/tessera/pkg/kubectl/feed"
	"github.com/tessera-dra/tessera/pkg/kubectl/feed/feedtest"
	"github.com/tessera-dra/tessera/pkg/kubectl/page"
	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

// width and height of the window, and of the pictures.
const width, height = 1440, 1000

// patience is how long a test waits for the page to show something.
const patience = time.Minute

// life is how long a browser may be open: a call that it doesn't answer ends then, with an error.
const life = 4 * time.Minute

const markup = "<img src=x onerror=alert(1)>"

// serve serves the page of a cluster until the test ends, and returns its address.
func serve(t *testing.T, c *feedtest.Cluster) string {
	t.Helper()
	return serveBy(t, c, func(s *page.Server) http.Handler { return s })
}

// serveBy does the same with a handler around the page's.
func serveBy(t *testing.T, c *feedtest.Cluster, by func(*page.Server) http.Handler) string {
	t.Helper()
	source, err := feed.NewSource(c.Resources(), feed.SourceOptions{Cluster: "gpu-prod", Namespace: "vision", PoolLabels: view.PoolLabels()})
	if err != nil {
		t.Fatal(err)
	}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	handler, err := page.NewServer(listener.Addr(), source, why)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	server := &http.Server{Handler: by(handler), ReadHeaderTimeout: patience}
	var group sync.WaitGroup
	group.Go(func() { source.Run(ctx) })
	group.Go(func() { _ = server.Serve(listener) })
	t.Cleanup(func() { cancel(); _ = server.Close(); group.Wait() })
	return handler.URL()
}

// why is the answer to why a pod waits. Markup must stay text.
func why(_ context.Context, _, pod string) (any, error) {
	switch pod {
	case "llama-405b-0":
		return map[string]string{
			"text":   "No node has 16 devices that match: train-0 and train-1 have 8 each.",
			"change": "Ask for at most 8 GPUs in one pod, or add a larger node.",
		}, nil
	case "pose-55c":
		return map[string]string{
			"text":   "Other claims have what it needs: eight GPUs with NVLink are free on no node.",
			"change": "It fits on train-1 after the end of claims research/eval-suite-gpu, lab/notebook-alan-gpu and speech/asr-6c9d7-gpu.",
		}, nil
	default:
		return map[string]string{"text": markup}, nil
	}
}

// tab is a tab of the browser.
type tab struct {
	t   *testing.T
	ctx context.Context

	mu        sync.Mutex
	complains []string
	requests  []string
}

// open opens an address in a browser of its own. At the end of the test, the page must
// have written no error to the console, and have sent requests to its own server only.
func open(t *testing.T, address string) *tab {
	t.Helper()
	options := slices.Concat(chromedp.DefaultExecAllocatorOptions[:], []chromedp.ExecAllocatorOption{chromedp.NoSandbox, chromedp.WindowSize(width, height)})
	limited, end := context.WithTimeout(t.Context(), life)
	t.Cleanup(end)
	allocator, stop := chromedp.NewExecAllocator(limited, options...)
	t.Cleanup(stop)
	ctx, closeTab := chromedp.NewContext(allocator)
	t.Cleanup(closeTab)
	p := &tab{t: t, ctx: ctx}
	if err := chromedp.Listen(ctx, p.listen); err != nil {
		t.Fatal(err)
	}
	_, err := chromedp.Call(ctx, network.Enable, network.EnableParams{})
	if err == nil {
		_, err = chromedp.Call(ctx, log.Enable, cdp.Empty{})
	}
	if err == nil {
		err = chromedp.Do(ctx, chromedp.EmulateViewport(width, height), chromedp.Navigate(address))
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.blameless(address) })
	return p
}

func (p *tab) listen(event any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch e := event.(type) {
	case *runtime.EventExceptionThrown:
		raw, _ := json.Marshal(e)
		p.complains = append(p.complains, string(raw))
	case *runtime.EventConsoleAPICalled:
		raw, _ := json.Marshal(e)
		p.complains = append(p.complains, string(raw))
	case *log.EventEntryAdded:
		raw, _ := json.Marshal(e)
		p.complains = append(p.complains, string(raw))
	case *network.EventRequestWillBeSent:
		p.requests = append(p.requests, e.Request.URL)
	}
}

// blameless checks the console and the requests.
func (p *tab) blameless(address string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.complains {
		p.t.Errorf("the console says: %s", c)
	}
	home, err := url.Parse(address)
	if err != nil {
		p.t.Fatal(err)
	}
	for _, r := range p.requests {
		if u, err := url.Parse(r); err != nil || u.Host != home.Host {
			p.t.Errorf("the page asks for %s", r)
		}
	}
	if len(p.requests) < 5 {
		p.t.Errorf("saw only these requests: %q", p.requests)
	}
}

// eval evaluates JavaScript.
func eval[T any](p *tab, script string) T {
	p.t.Helper()
	out, err := chromedp.Run(p.ctx, chromedp.Evaluate[T](script))
	if err != nil {
		p.t.Fatalf("%s: %v", script, err)
	}
	return out
}

// until waits for an expression to become true.
func (p *tab) until(script string) {
	p.t.Helper()
	end := time.Now().Add(patience)
	for !eval[bool](p, script) {
		if time.Now().After(end) {
			p.t.Fatalf("never became true: %s\nthe page: %s", script, eval[string](p, "document.body.innerText"))
		}
		pause := time.NewTimer(50 * time.Millisecond)
		<-pause.C
	}
}

// drawn waits until everything is.
func (p *tab) drawn() { p.t.Helper(); p.painted("everything") }

// painted waits until the page has marked that a part of it is.
func (p *tab) painted(mark string) {
	p.t.Helper()
	p.until(fmt.Sprintf(`performance.getEntriesByName(%q).length > 0`, mark))
}

// again opens the address once more, in the same tab.
func (p *tab) again(address string) {
	p.t.Helper()
	if err := chromedp.Do(p.ctx, chromedp.Navigate(address)); err != nil {
		p.t.Fatal(err)
	}
}

// press presses keys, as kb names them.
func (p *tab) press(keys string) {
	p.t.Helper()
	if err := chromedp.Do(p.ctx, chromedp.KeyEvent(keys)); err != nil {
		p.t.Fatal(err)
	}
}

// search types into the search.
func (p *tab) search(text string) {
	p.t.Helper()
	p.press("/")
	p.until(`document.activeElement.id === "query"`)
	eval[chromedp.Void](p, `document.activeElement.select()`) // the driver types the key that a browser swallows
	p.press(text)
}

// run runs a subtest.
func (p *tab) run(name string, f func(t *testing.T)) {
	all := p.t
	all.Run(name, func(t *testing.T) {
		p.t = t
		defer func() { p.t = all }()
		f(t)
	})
}

// mouse moves the mouse to the middle of an element, and clicks there if asked to.
func (p *tab) mouse(selector string, click bool) {
	p.t.Helper()
	p.until(fmt.Sprintf("document.querySelector(%q) !== null", selector))
	at, err := chromedp.Run(p.ctx, chromedp.Evaluate[[]float64](fmt.Sprintf(`new Promise((done) => {
		const e = document.querySelector(%q);
		e.scrollIntoView({block: "nearest"});
		requestAnimationFrame(() => requestAnimationFrame(() => { // after the event of the scroll
			const r = e.getBoundingClientRect();
			done([r.x + r.width / 2, r.y + r.height / 2]);
		}));
	})`, selector), chromedp.EvalAwaitPromise))
	if err != nil {
		p.t.Fatal(err)
	}
	step := chromedp.MouseEvent("mouseMoved", at[0], at[1])
	if click {
		step = chromedp.MouseClickXY(at[0], at[1])
	}
	if err := chromedp.Do(p.ctx, step); err != nil {
		p.t.Fatal(err)
	}
}

// words are the text of an element, in one line.
func (p *tab) words(selector string) string {
	p.t.Helper()
	return strings.Join(strings.Fields(eval[string](p, fmt.Sprintf("document.querySelector(%q)?.innerText ?? ''", selector))), " ")
}
