//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tessera-dra/tessera/sim/cluster"
	"github.com/tessera-dra/tessera/test/stack"
)

// commands are what stories are written with, besides testscript's own:
//
//	kubectl ARGS...                 in the story's namespace
//	helm ARGS...                    the chart is $CHART, its release tessera in tessera-system
//	node NODE CMD...                inside a node's namespaces, as root
//	smi NODE ARGS...                nvidia-smi of the node's driver, on the node
//	nvmlsim NODE COMMAND [ARGS...]  do something to the node's simulated hardware
//	crash NODE PROCESS              kill -9 every process of that name on the node, or on all
//	component stop|start|restart MACHINE COMPONENT  of Kubernetes; see faults.go
//	power off|on MACHINE            as a power cut does, but for the boot ID
//	userspace stop|start NODE       all processes and mounts, under the same kernel; see faults.go
//	etcd DURATION                   each sync of a file of etcd takes that much longer
//	certificates renew|announce|replace  of the API server; see faults.go
//	until TIMEOUT REGEXP CMD...     repeat one of the above until its output matches
//	never DURATION REGEXP CMD...    fail if its output matches within the duration
//	sees POD CONTAINER [strict]     exactly what its claims were allocated, nothing else; see sees.go
//	distinct TIMEOUT LABEL COUNT    so many pods run, each with a MIG device of its own; see distinct.go
//	pod NAME [OPTIONS]              create a pod that sleeps; see pod.go
//	nudge POD                       have the kubelet look at a pod at once; prints its phase
//	cuda POD [ARGS...]              run a CUDA program in a pod; see cuda.go
//	linger NODE [POD]               a process outlives a pod's container; see linger.go
//	unstarted NODE POD              its runtime forgets a container that it never started; see linger.go
//	metadata POD                    print what its container can read about its devices; see metadata.go
//	daemons NODE                    print what there is of MPS on a node; see cuda.go
//	metrics NODE                    print the plugin's metrics
//	deviceplugin NODE [RESOURCE COUNT]  run a device plugin on a node, or end it; see deviceplugin.go
//	[GATE] COMMAND, [!GATE] COMMAND where the feature gate of DRA is on, or off
//	[kubernetes:1.36] COMMAND       from that version on; [kubelet:1.36] from that of the kubelets
//	nics NODE COUNT                 run another driver with network cards; see exampledriver.go
//	paired POD                      its devices, of all drivers, are behind one PCIe root
//	gpu ARGS...                     kubectl gpu in the story's namespace
//	namespace NAME...               make namespaces besides the story's; they go with it
//	doctor NODE                     the plugin's doctor finds nothing wrong, and nothing left over
func commands(s *stack.Stack) map[string]func(*testscript.TestScript, bool, []string) {
	runner := func(name string) func(*testscript.TestScript, bool, []string) {
		return func(ts *testscript.TestScript, neg bool, args []string) {
			run(ts, s, neg, append([]string{name}, args...))
		}
	}
	return map[string]func(*testscript.TestScript, bool, []string){
		"kubectl":      runner("kubectl"),
		"helm":         runner("helm"),
		"node":         runner("node"),
		"smi":          runner("smi"),
		"nvmlsim":      runner("nvmlsim"),
		"crash":        runner("crash"),
		"nudge":        runner("nudge"),
		"cuda":         runner("cuda"),
		"daemons":      runner("daemons"),
		"metrics":      runner("metrics"),
		"until":        func(ts *testscript.TestScript, neg bool, args []string) { until(ts, s, neg, args) },
		"pod":          func(ts *testscript.TestScript, neg bool, args []string) { pod(ts, s, neg, args) },
		"sees":         func(ts *testscript.TestScript, neg bool, args []string) { sees(ts, s, neg, args) },
		"nics":         func(ts *testscript.TestScript, neg bool, args []string) { nics(ts, s, neg, args) },
		"paired":       func(ts *testscript.TestScript, neg bool, args []string) { paired(ts, s, neg, args) },
		"gpu":          func(ts *testscript.TestScript, neg bool, args []string) { kubectlGPU(ts, s, neg, args) },
		"metadata":     func(ts *testscript.TestScript, neg bool, args []string) { metadata(ts, s, neg, args) },
		"linger":       func(ts *testscript.TestScript, neg bool, args []string) { linger(ts, s, neg, args) },
		"unstarted":    func(ts *testscript.TestScript, neg bool, args []string) { unstarted(ts, s, neg, args) },
		"distinct":     func(ts *testscript.TestScript, neg bool, args []string) { distinct(ts, s, neg, args) },
		"never":        func(ts *testscript.TestScript, neg bool, args []string) { never(ts, s, neg, args) },
		"deviceplugin": func(ts *testscript.TestScript, neg bool, args []string) { devicePlugin(ts, s, neg, args) },
		"component":    func(ts *testscript.TestScript, neg bool, args []string) { component(ts, s, neg, args) },
		"power":        func(ts *testscript.TestScript, neg bool, args []string) { power(ts, s, neg, args) },
		"userspace":    func(ts *testscript.TestScript, neg bool, args []string) { userspace(ts, s, neg, args) },
		"etcd":         func(ts *testscript.TestScript, neg bool, args []string) { etcd(ts, s, neg, args) },
		"certificates": func(ts *testscript.TestScript, neg bool, args []string) { certificates(ts, s, neg, args) },
		"doctor":       func(ts *testscript.TestScript, neg bool, args []string) { examine(ts, s, neg, args) },
		"namespace":    func(ts *testscript.TestScript, neg bool, args []string) { namespace(ts, s, neg, args) },
	}
}

// do runs one command and returns what it wrote.
func do(ts *testscript.TestScript, s *stack.Stack, args []string) (string, string, error) {
	if len(args) < 2 {
		ts.Fatalf("%s: needs arguments", args[0])
	}
	ctx := context.Background()
	var out, errs bytes.Buffer
	var err error
	switch args[0] {
	case "kubectl":
		command := []string{"-n", ts.Getenv("NS")}
		for _, arg := range args[1:] {
			command = append(command, s.Path(arg))
		}
		cmd := s.Command(ctx, "kubectl", command...)
		cmd.Dir, cmd.Stdout, cmd.Stderr = ts.Getenv("WORK"), &out, &errs
		err = cmd.Run()
	case "helm":
		cmd := s.Command(ctx, "helm", args[1:]...)
		cmd.Dir, cmd.Stdout, cmd.Stderr = ts.Getenv("WORK"), &out, &errs
		err = cmd.Run()
	case "node":
		err = s.Cluster.Run(ctx, args[1], cluster.Stdio{Out: &out, Err: &errs}, args[2:]...)
	case "smi":
		smi := append([]string{s.SMI}, args[2:]...)
		err = s.Cluster.Run(ctx, args[1], cluster.Stdio{Out: &out, Err: &errs}, smi...)
	case "nvmlsim":
		err = s.Cluster.Run(ctx, args[1], cluster.Stdio{Out: &out, Err: &errs}, s.SimulatorCommand(args[2:]...)...)
	case "nudge":
		out.WriteString(nudge(ctx, ts, s, args[1]))
	case "cuda":
		namespace, name := address(ts, args[1])
		cmd := s.Command(ctx, "kubectl", append([]string{"-n", namespace, "exec", name, "--"}, inContainer(args[2:])...)...)
		cmd.Stdout, cmd.Stderr = &out, &errs
		err = cmd.Run()
	case "daemons":
		err = s.Cluster.Run(ctx, args[1], cluster.Stdio{Out: &out, Err: &errs}, "sh", "-c", listDaemons)
	case "metrics":
		var metrics string
		metrics, err = pluginMetrics(ctx, s, args[1])
		out.WriteString(metrics)
	case "crash":
		var killed string
		killed, err = s.Crash(ctx, args[1], args[2])
		out.WriteString(killed)
	default:
		ts.Fatalf("%s: not a command that can run here", args[0])
	}
	return out.String(), errs.String(), err
}

// nudge changes a pod, so that the kubelet syncs it. Otherwise the kubelet
// repeats a failed prepare only with its periodic sync, after 10 to 15 seconds.
func nudge(ctx context.Context, ts *testscript.TestScript, s *stack.Stack, name string) string {
	time.Sleep(time.Second)
	patch := fmt.Appendf(nil, `{"metadata": {"annotations": {"e2e/nudged": "%d"}}}`, time.Now().Unix())
	p, err := s.Kube().CoreV1().Pods(ts.Getenv("NS")).Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{})
	ts.Check(err)
	return string(p.Status.Phase)
}

func run(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	out, errs, err := do(ts, s, args)
	fmt.Fprint(ts.Stdout(), out)
	fmt.Fprint(ts.Stderr(), errs)
	if (err != nil) != neg {
		ts.Fatalf("%s: %v", strings.Join(args, " "), err)
	}
}

// attempt returns all a command prints, and its failure as text, without empty lines at its
// ends and before the failure, where ^$ would match.
func attempt(ts *testscript.TestScript, s *stack.Stack, args []string) string {
	out, errs, err := do(ts, s, args)
	printed := strings.TrimSuffix(out+errs, "\n")
	switch {
	case err == nil:
		return printed
	case printed == "":
		return err.Error()
	default:
		return printed + "\n" + err.Error()
	}
}

func timed(ts *testscript.TestScript, args []string) (time.Duration, *regexp.Regexp, []string) {
	if len(args) < 3 {
		ts.Fatalf("want a duration, a regular expression and a command")
	}
	d, err := time.ParseDuration(args[0])
	ts.Check(err)
	re, err := regexp.Compile("(?m)" + args[1])
	ts.Check(err)
	return d, re, args[2:]
}

// pause is how long a command that is repeated waits before the next time.
const pause = 100 * time.Millisecond

// until repeats a command until its output matches, with growing pauses of up to a
// second for kubectl and cuda: each kubectl takes a twentieth of a second of CPU,
// which stories in other lanes need too. A state that lasts less than two seconds
// may be missed.
func until(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	limit, re, args := timed(ts, args)
	deadline := time.Now().Add(limit)
	for wait := pause; ; {
		out := attempt(ts, s, args)
		if re.MatchString(out) != neg {
			fmt.Fprint(ts.Stdout(), out)
			return
		}
		if time.Now().After(deadline) {
			ts.Fatalf("%s: after %v still:\n%s", strings.Join(args, " "), limit, out)
		}
		time.Sleep(wait)
		if args[0] == "kubectl" || args[0] == "cuda" {
			wait = min(wait*5/4, time.Second)
		}
	}
}

func never(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	if neg {
		ts.Fatalf("never cannot be negated")
	}
	limit, re, args := timed(ts, args)
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); time.Sleep(pause) {
		if out := attempt(ts, s, args); re.MatchString(out) {
			ts.Fatalf("%s: printed what it never should:\n%s", strings.Join(args, " "), out)
		}
	}
}
