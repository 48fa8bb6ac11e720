//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/sim/cluster"
	"github.com/tessera-dra/tessera/sim/cluster/platform"
	"github.com/tessera-dra/tessera/test/stack"
)

var platformName = flag.String("platform", "", "the platform whose story TestPlatform runs; localcluster platforms lists them")

// TestPlatform runs the story of a platform: its parts, one after the other, on a cluster
// that imitates it. The chart is installed as docs/user/platforms.md says.
func TestPlatform(t *testing.T) {
	if *platformName == "" {
		t.Skip("no -platform: make platforms runs this for each")
	}
	p, err := platform.Find(*platformName)
	if err != nil {
		t.Fatal(err)
	}
	image, err := stack.BuildImage(t.Context(), os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	name := *clusters + "-" + strings.ReplaceAll(p.Name, ".", "")
	if !*keep {
		t.Cleanup(func() {
			if err := cluster.Down(context.Background(), name, t.Output()); err != nil {
				t.Error(err)
			}
		})
	}
	s, err := stack.Up(t.Context(), stack.Options{Name: name, Platform: p.Name, Image: image, Out: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range p.Story() {
		passed := t.Run(part, func(t *testing.T) {
			testscript.RunT(inLane{t}, testscript.Params{
				Files:     []string{filepath.Join("testdata", "platform", part+".txtar")},
				Deadline:  time.Now().Add(storyTime),
				Setup:     func(env *testscript.Env) error { return setupPart(env, s, p) },
				Cmds:      partCommands(s, p),
				Condition: hasPart(p),
			})
		})
		if part == "install" && !passed {
			t.Fatal("the chart isn't installed: the other parts can't run")
		}
	}
}

// hasPart is have, with the condition part:NAME of a platform whose story has that part.
func hasPart(p *platform.Platform) func(string) (bool, error) {
	return func(condition string) (bool, error) {
		if part, found := strings.CutPrefix(condition, "part:"); found {
			return slices.Contains(p.Story(), part), nil
		}
		return have(condition)
	}
}

// setupPart gives a part of a platform's story a namespace of its own and the names of what
// differs between platforms.
func setupPart(env *testscript.Env, s *stack.Stack, p *platform.Platform) error {
	part := strings.TrimPrefix(filepath.Base(env.WorkDir), "script-")
	dataDir, cdiDir, err := nodeDirs(p)
	if err != nil {
		return err
	}
	node := s.Cluster.Nodes()[0]
	gpus, err := s.Cluster.Exec(context.Background(), node, s.SMI, "-L")
	offered := strings.Count("\n"+string(gpus), "\nGPU ") - p.Use.Withheld
	if p.Use.Cannot == "" && (err != nil || offered < 1) {
		return fmt.Errorf("count the GPUs of the node: %v, %q", err, gpus)
	}
	for name, value := range map[string]string{
		"NS": part, "WHOLE": wholeGPUs, "SYSTEM": stack.Namespace, "NODE": node, "GPUS": strconv.Itoa(offered), "SMI": s.SMI,
		"DATA": dataDir, "CDI": cdiDir, "KUBELET": p.KubeletRoot(),
	} {
		env.Setenv(name, value)
	}
	first := []byte(strconv.Itoa(p.Use.Withheld)) // the index of the first GPU that is offered
	err = rewriteManifests(env.WorkDir, func(text []byte) ([]byte, error) { return s.Convert(bytes.ReplaceAll(text, []byte("FIRST"), first)) })
	if err != nil {
		return err
	}
	return ownNamespace(env, s, part, func() {
		if _, err := s.Kubectl(context.Background(), "delete", "sharingpolicies", "--all", "--ignore-not-found"); err != nil && part != "uninstall" && part != platform.Refused {
			env.T().Log("the part leaves its policies behind:", err)
		}
	})
}

// nodeDirs returns node.dataDir and node.cdiDir of the chart as the platform's values have them.
func nodeDirs(p *platform.Platform) (dataDir, cdiDir string, err error) {
	var values struct {
		Node struct{ DataDir, CDIDir string }
	}
	files := []string{"../../deployments/helm/tessera/values.yaml"}
	if p.Use.Values != "" {
		files = append(files, filepath.Join("../../deployments/helm/tessera/platforms", p.Use.Values))
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return "", "", err
		}
		if err := yaml.Unmarshal(data, &values); err != nil {
			return "", "", fmt.Errorf("%s: %w", file, err)
		}
	}
	return values.Node.DataDir, values.Node.CDIDir, nil
}

// partCommands are the commands of stories, and these:
//
//	install             what docs/user/platforms.md says for the platform, up to helm install
//	upgrade [FLAG...]   helm upgrade with the same values and these
//	refused             install, where it can't work: what the user reads says why
func partCommands(s *stack.Stack, p *platform.Platform) map[string]func(*testscript.TestScript, bool, []string) {
	helm := func(verb string, flags ...string) string {
		return p.HelmCommand(verb, stack.ImageRepository, append([]string{"--wait", "--timeout", "3m"}, flags...)...)
	}
	cmds := commands(s)
	cmds["install"] = func(ts *testscript.TestScript, _ bool, _ []string) {
		out, err := s.Shell(context.Background(), p.Use.Before+"\n"+helm("install"))
		ts.Logf("%s", out)
		ts.Check(err)
	}
	cmds["upgrade"] = func(ts *testscript.TestScript, _ bool, args []string) {
		out, err := s.Shell(context.Background(), helm("upgrade", args...))
		ts.Logf("%s", out)
		ts.Check(err)
	}
	cmds["pod"] = func(ts *testscript.TestScript, neg bool, args []string) {
		made := podOf(ts, neg, args)
		adaptPod(made, p)
		createPod(ts, s, made)
	}
	cmds["sees"] = func(ts *testscript.TestScript, neg bool, args []string) {
		if len(args) == 2 && !runsAsRoot(ts, s, args[0]) {
			args = append(args, "strict")
		}
		sees(ts, s, neg, args)
	}
	cmds["refused"] = func(ts *testscript.TestScript, _ bool, _ []string) { refused(ts, s, p) }
	return cmds
}

// runsAsRoot reports whether a pod may be root, as the API server has admitted it: some platforms
// give each pod a user.
func runsAsRoot(ts *testscript.TestScript, s *stack.Stack, arg string) bool {
	namespace, name := address(ts, arg)
	made, err := s.Kube().CoreV1().Pods(namespace).Get(context.Background(), name, metav1.GetOptions{})
	ts.Check(err)
	return made.Spec.SecurityContext == nil || ptr.Deref(made.Spec.SecurityContext.RunAsUser, 0) == 0
}

// adaptPod adds what the platform asks of users' pods: tolerations, probes and requests, and the
// security context that its Pod Security wants.
func adaptPod(made *corev1.Pod, p *platform.Platform) {
	for _, t := range p.Node.Taints {
		made.Spec.Tolerations = append(made.Spec.Tolerations, corev1.Toleration{Key: t.Key, Operator: corev1.TolerationOpExists, Effect: t.Effect})
	}
	main := &made.Spec.Containers[0]
	probe := &corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"true"}}}}
	main.LivenessProbe, main.ReadinessProbe = probe, probe
	main.Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1m"), corev1.ResourceMemory: resource.MustParse("16Mi")}
	if s := p.Cluster.PodSecurity; s == nil || s.Enforce != "restricted" {
		return
	}
	made.Spec.SecurityContext = &corev1.PodSecurityContext{
		RunAsNonRoot: new(true), RunAsUser: ptr.To[int64](1000),
		SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
	}
	main.SecurityContext = &corev1.SecurityContext{
		AllowPrivilegeEscalation: new(false), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
	}
}

// refused installs the chart on a platform where Tessera can't work, and waits until what the
// user reads says why.
func refused(ts *testscript.TestScript, s *stack.Stack, p *platform.Platform) {
	ctx := context.Background()
	helm, _ := s.Shell(ctx, p.Use.Before+"\n"+p.HelmCommand("install", stack.ImageRepository)) // what it prints counts
	read := func(args ...string) string {
		out, err := s.Kubectl(ctx, args...)
		return fmt.Sprintf("kubectl %s:\n%s%v\n", strings.Join(args, " "), out, err)
	}
	why := regexp.MustCompile(p.Use.Message)
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Second) {
		seen := "helm install:\n" + helm +
			read("get", "gpuinventories", "-o", "yaml") +
			read("logs", "-n", stack.Namespace, "-l", "app.kubernetes.io/component=node", "--tail=100") +
			read("get", "events", "-n", stack.Namespace)
		if why.MatchString(seen) {
			ts.Logf("the user reads: %s", why.FindString(seen))
			return
		}
		if time.Now().After(deadline) {
			ts.Fatalf("nothing that the user reads matches %q:\n%s", p.Use.Message, seen)
		}
	}
}
