package node

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// TestRaces plays histories of calls and faults to the plugin's parts, from the kubelet's
// calls down to the journal, the CDI directory and the simulated GPUs, and compares the
// outcome with a small model (races_model_test.go).
//
// A history is drawn before it is played: batches of operations, each with the time at
// which it starts within its batch, and how long it takes. Operations of a batch overlap.
// Between batches the kubelet may retry failed calls; then everything must be in order. In the end all claims are unprepared, and nothing may be left.
//
// Time is that of testing/synctest. Each step of the plugin and each call of the hardware
// takes a time that is drawn too, so that which of two goroutines comes first is decided
// by the clock: the same history runs the same way again. This is not exact. Goroutines
// that become runnable in the same nanosecond, such as two that wait for one event, run in
// the order that Go's scheduler chooses. rapid prints the seed, writes a file with the
// shortest history that it found to fail, and reports if a failure does not come back.
//
// Not included are the kubelet's gRPC connections (its calls begin where the
// plugin's gRPC server hands them on), the watch of the driver, and the kernel's reports
// about containers.
//
//	go test -race -run TestRaces ./pkg/node -args -everything     # 10,000 operations
//	go test -race -run TestRaces ./pkg/node -rapid.seed=1         # the same histories again
//	go test -race -run TestRaces ./pkg/node -rapid.failfile=FILE  # one history
func TestRaces(t *testing.T) {
	// In a synctest bubble, Go 1.26's race detector crashes if two threads run timers at the
	// same time (golang/go#78156). One thread is enough here: the clock decides the order.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	c := newDisklessComputer(t)
	want := 200
	if *everything {
		want = 10_000
	}
	const checks = "100000" // until there are enough operations
	setUnlessGiven(t, "rapid.checks", checks)
	setUnlessGiven(t, "rapid.shrinktime", "3m")
	setUnlessGiven(t, "rapid.seed", strconv.FormatUint(rand.Uint64()>>1, 10))
	t.Logf("-rapid.seed=%s", flag.Lookup("rapid.seed").Value)
	histories, operations, failed, outcomes := 0, 0, false, map[string]int{}
	rapid.Check(t, func(rt *rapid.T) {
		if operations >= want && !failed {
			return
		}
		h := drawnHistories().Draw(rt, "history")
		rapid.SyncTest(rt, func(rt *rapid.T) {
			broken, trace := play(c, h, outcomes)
			histories++
			operations += h.operations()
			if broken != "" {
				failed = true
				rt.Logf("%s", strings.Join(trace, "\n"))
				rt.Fatalf("%s", broken)
			}
		})
	})
	if operations < want && flag.Lookup("rapid.checks").Value.String() == checks {
		t.Errorf("there was time for %d of %d operations only", operations, want)
	}
	t.Logf("%d operations in %d histories; the kubelet's calls: %v", operations, histories, outcomes)
}

// setUnlessGiven sets a flag that the command line doesn't have.
func setUnlessGiven(t *testing.T, name, value string) {
	t.Helper()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == name })
	if given {
		return
	}
	before := flag.Lookup(name).Value.String()
	if err := flag.Set(name, value); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = flag.Set(name, before) })
}

// history is a sequence of events on a node.
type history struct {
	// Pace is the seed of the times that steps and calls of the hardware take.
	Pace    uint64
	Batches []batch
}

func (h history) operations() int {
	n := 0
	for _, b := range h.Batches {
		n += len(b.Ops)
	}
	return n
}

// GoString is how rapid prints it.
func (h history) GoString() string {
	var b strings.Builder
	fmt.Fprintf(&b, "pace %d", h.Pace)
	for i, one := range h.Batches {
		fmt.Fprintf(&b, "\nbatch %d", i)
		if one.Settle {
			b.WriteString(", then the kubelet retries until all is settled")
		}
		for _, o := range one.Ops {
			fmt.Fprintf(&b, "\n  %s", o)
		}
	}
	return b.String()
}

// batch are operations that overlap.
type batch struct {
	Ops []op
	// Settle has the kubelet retry failed calls, and checks everything.
	Settle bool
}

// kindOfOp is the kind of an operation.
type kindOfOp string

const (
	opPrepare    kindOfOp = "prepare"
	opUnprepare  kindOfOp = "unprepare"
	opDeletePods kindOfOp = "delete the pods of"
	opStart      kindOfOp = "start a container of"
	opRestart    kindOfOp = "restart the plugin"
	opKill       kindOfOp = "kill the plugin"
	opFail       kindOfOp = "hardware fails"
	opSlow       kindOfOp = "hardware is slow"
	opAway       kindOfOp = "the MPS supervisor is away"
	opDies       kindOfOp = "MPS daemons die"
	opPolicy     kindOfOp = "policy"
	opServer     kindOfOp = "the API server is away"
	opReboot     kindOfOp = "the node reboots"
	// opSandbox: see computer.restartSandbox.
	opSandbox kindOfOp = "the node's sandbox restarts"
)

// op is one operation. Fields that its kind doesn't need are ignored.
type op struct {
	Kind  kindOfOp
	Claim int
	// With is another claim of the same pod, in the same call; Claim where there is none.
	With int
	// Shape is the allocation of a claim that has none, or the first to be considered
	// unless it is Forced.
	Shape  int
	Forced bool
	// At is when it starts.
	At time.Duration
	// For is after which time the kubelet cancels its call, a container of an unprepared
	// claim ends, the plugin or the supervisor is back, or a call of the hardware goes on.
	For time.Duration
	// GPU, Call, Code and Count are of a fault; Count also chooses a policy.
	GPU   int
	Call  string
	Code  nvmlsim.Return
	Count int
}

func (o op) String() string { return fmt.Sprintf("at %s %s", o.At, o.short()) }

func (o op) short() string {
	text := string(o.Kind)
	switch o.Kind {
	case opPrepare:
		text += fmt.Sprintf(" %s (%s)", o.names(), shapes()[o.Shape].name)
		if o.Forced {
			text += ", forced"
		}
		if o.For > 0 {
			text += fmt.Sprintf(", cancelled after %s", o.For)
		}
	case opUnprepare:
		text += " " + o.names()
		if o.For > 0 {
			text += fmt.Sprintf(", its container ends %s later", o.For)
		}
	case opDeletePods, opStart:
		text += fmt.Sprintf(" c%d", o.Claim)
	case opFail:
		text += fmt.Sprintf(": %s of GPU %d answers %v, %d times", o.Call, o.GPU, o.Code, o.Count)
	case opSlow:
		text += fmt.Sprintf(": %s of GPU %d takes %s, %d times", o.Call, o.GPU, o.For, o.Count)
	case opRestart, opKill, opAway, opDies, opServer, opReboot, opSandbox:
		text += fmt.Sprintf(" for %s", o.For)
	case opPolicy:
		text += fmt.Sprintf(" %d", o.Count)
	}
	return text
}

// names of the claims.
func (o op) names() string {
	if o.With != o.Claim {
		return fmt.Sprintf("c%d and c%d", o.Claim, o.With)
	}
	return fmt.Sprintf("c%d", o.Claim)
}

// claims returns the numbers of the claims.
func (o op) claims() []int {
	if o.With != o.Claim {
		return []int{o.Claim, o.With}
	}
	return []int{o.Claim}
}

// claimCount is how many claims there are.
const claimCount = 6

// drawnHistories draws a history.
func drawnHistories() *rapid.Generator[history] {
	batches := rapid.Custom(func(t *rapid.T) batch {
		// Within a tenth of a second nearly all overlap.
		spread := rapid.SampledFrom([]int{100, 500, 2000, 8000}).Draw(t, "spread")
		return batch{Ops: rapid.SliceOfN(drawnOps(spread), 1, 8).Draw(t, "ops"), Settle: rapid.SampledFrom([]bool{true, true, false}).Draw(t, "settle")}
	})
	return rapid.Custom(func(t *rapid.T) history {
		return history{Batches: rapid.SliceOfN(batches, 1, 15).Draw(t, "batches"), Pace: rapid.Uint64().Draw(t, "pace")}
	})
}

// drawnOps draws an operation that starts within that many milliseconds.
func drawnOps(spread int) *rapid.Generator[op] {
	// Histories are shortened towards the first.
	kinds := weighted([]kindOfOp{opPrepare, opUnprepare, opStart, opDeletePods, opPolicy, opSlow, opFail, opDies, opAway, opServer, opRestart, opKill, opReboot, opSandbox},
		[]int{20, 14, 6, 2, 2, 2, 4, 2, 2, 1, 2, 2, 1, 1})
	return rapid.Custom(func(t *rapid.T) op {
		o := op{Kind: rapid.SampledFrom(kinds).Draw(t, "kind"), At: millis(0, spread).Draw(t, "at")}
		switch o.Kind {
		case opPrepare:
			drawClaims(t, &o)
			o.Shape = rapid.IntRange(0, len(shapes())-1).Draw(t, "shape")
			o.Forced, o.For = rapid.IntRange(0, 3).Draw(t, "forced") == 1, oneIn(t, 5, millis(1, 20_000))
		case opUnprepare:
			drawClaims(t, &o)
			o.For = oneIn(t, 4, millis(1, 60_000))
		case opDeletePods, opStart:
			o.Claim = drawClaim(t)
		case opFail:
			drawFault(t, &o, failingCalls())
			o.Code = rapid.SampledFrom([]nvmlsim.Return{nvmlsim.Unknown, nvmlsim.InUse, nvmlsim.InsufficientResources, nvmlsim.Timeout}).Draw(t, "code")
		case opSlow:
			drawFault(t, &o, slowCalls())
			o.For = millis(1, 10_000).Draw(t, "for")
		case opRestart, opKill, opAway, opDies, opServer, opReboot, opSandbox:
			o.GPU, o.For = rapid.IntRange(0, 1).Draw(t, "gpu"), millis(1, 15_000).Draw(t, "for")
		case opPolicy:
			o.Count = rapid.IntRange(0, 7).Draw(t, "policy")
		}
		return o
	})
}

func drawClaim(t *rapid.T) int { return rapid.IntRange(0, claimCount-1).Draw(t, "claim") }

// drawClaims draws one claim, or two of a pod.
func drawClaims(t *rapid.T, o *op) {
	o.Claim = drawClaim(t)
	if o.With = o.Claim; rapid.IntRange(0, 5).Draw(t, "two") == 1 {
		o.With = drawClaim(t)
	}
}

// drawFault draws where a fault is, and how often.
func drawFault(t *rapid.T, o *op, calls []string) {
	o.Call = rapid.SampledFrom(calls).Draw(t, "call")
	o.GPU = rapid.IntRange(0, 1).Draw(t, "gpu")
	o.Count = rapid.IntRange(1, 4).Draw(t, "count")
}

// slowCalls are those that change a GPU.
func slowCalls() []string {
	return []string{
		"DeviceSetMigMode", "DeviceCreateGpuInstanceWithPlacement", "GpuInstanceCreateComputeInstance", "ComputeInstanceDestroy",
		"GpuInstanceDestroy", "DeviceSetComputeMode",
	}
}

func failingCalls() []string {
	return append(slowCalls(), "DeviceGetMigMode", "DeviceGetMinorNumber", "DeviceGetUUID", "DeviceGetComputeMode", "ComputePolicy", "*")
}

func millis(from, to int) *rapid.Generator[time.Duration] {
	return rapid.Map(rapid.IntRange(from, to), func(n int) time.Duration { return time.Duration(n) * time.Millisecond })
}

// oneIn draws a value one in so many times, otherwise none.
func oneIn(t *rapid.T, n int, values *rapid.Generator[time.Duration]) time.Duration {
	if rapid.IntRange(0, n-1).Draw(t, "none but 1") != 1 {
		return 0
	}
	return values.Draw(t, "for")
}

// weighted repeats values by their weights.
func weighted[T any](values []T, weights []int) []T {
	var all []T
	for i, v := range values {
		for range weights[i] {
			all = append(all, v)
		}
	}
	return all
}
