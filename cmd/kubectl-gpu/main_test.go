package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/cli-runtime/pkg/genericclioptions"
)

// run runs the command, and returns its output and its error's text at the end.
func run(t *testing.T, s *server, on screen, in string, args ...string) string {
	t.Helper()
	return s.execute(t, func(streams genericclioptions.IOStreams) *cobra.Command { return command(streams, on) }, in, args...)
}

// TestOutput compares the output of commands with testdata.
func TestOutput(t *testing.T) {
	const misspelt = `{apiVersion: resource.k8s.io/v1beta1, kind: ResourceClaim, metadata: {name: c}, spec: {devices: {requests: [{name: r, deviceClasName: gpu.nvidia.com}]}}}`
	const old = `{apiVersion: resource.k8s.io/v1beta1, kind: ResourceClaim, metadata: {name: c}, spec: {devices: {requests: [{name: r, deviceClassName: gpu.nvidia.com}]}}}`
	for name, tc := range map[string]struct {
		screen screen
		in     string
		change func(*server)
		args   []string
	}{
		"map-80":        {screen: screen{width: 80}, args: []string{"map"}},
		"map-120":       {screen: screen{width: 120}, args: []string{"map"}},
		"map-namespace": {screen: screen{width: 80}, args: []string{"map", "-n", "team"}},
		"map-no-tessera": {screen: screen{width: 80}, args: []string{"map"}, change: func(s *server) {
			s.items = map[string][]any{resources + "resourceslices": {}, resources + "resourceclaims": {}}
		}},
		"map-no-dra": {screen: screen{width: 80}, args: []string{"map"}, change: func(s *server) { s.items = nil }},
		"why-no-pod": {args: []string{"why"}},
		"map-no-claims": {screen: screen{width: 80}, args: []string{"map"}, change: func(s *server) {
			s.forbidden = []string{resources + "resourceclaims", resources + "namespaces/default/resourceclaims"}
		}},
		"map-forbidden": {screen: screen{width: 80}, args: []string{"map", "-n", "team"}, change: func(s *server) {
			s.forbidden = []string{resources + "resourceclaims", resources + "devicetaintrules", own + "gpuinventories"}
			s.items[resources+"namespaces/team/resourceclaims"] = s.items[resources+"resourceclaims"][:1]
		}},
		"map-taint-rule":      {screen: screen{width: 80}, args: []string{"map"}, change: taint},
		"map-taint-rule-1.34": {screen: screen{width: 80}, args: []string{"map"}, change: oldTaint},
		"fits-taint-rule":     {args: []string{"fits", "3g.40gb"}, change: taint},
		"slots":               {args: []string{"slots"}},
		"slots-namespace":     {args: []string{"slots", "-n", "team", "-o", "json"}},
		"get":                 {args: []string{"get"}},
		"fits":                {args: []string{"fits", "3g.40gb"}},
		"fits-memory":         {args: []string{"fits", "--memory", "20Gi"}},
		"fits-file":           {in: old, args: []string{"fits", "-f", "-"}},
		"fits-misspelt":       {in: misspelt, args: []string{"fits", "-f", "-"}},
		"fits-forbidden":      {args: []string{"fits", "3g.40gb"}, change: func(s *server) { s.forbidden = []string{resources + "deviceclasses"} }},
		"doctor":              {args: []string{"doctor"}, change: ill},
		"doctor-healthy":      {args: []string{"doctor"}, change: healthy},
		"doctor-forbidden": {args: []string{"doctor"}, change: func(s *server) {
			healthy(s)
			s.forbidden = []string{"/api/v1/pods", own + "sharingpolicies"}
		}},
		"doctor-no-tessera": {args: []string{"doctor"}, change: func(s *server) {
			s.items = map[string][]any{resources + "resourceslices": {}, resources + "resourceclaims": {}, "/api/v1/pods": {}, "/apis/apps/v1/daemonsets": {}}
		}},
		"doctor-pod-security":     {args: []string{"doctor"}, change: refused},
		"policy":                  {args: []string{"policy"}, change: shared},
		"policy-one":              {args: []string{"policy", "shares"}, change: shared},
		"policy-none":             {args: []string{"policy", "shares"}},
		"policy-forbidden":        {args: []string{"policy"}, change: func(s *server) { shared(s); s.forbidden = []string{own + "sharingpolicies"} }},
		"policy-dry-run":          {in: shares, args: []string{"policy", "--dry-run", "-f", "-"}},
		"policy-dry-run-lost":     {in: shares, args: []string{"policy", "--dry-run", "-f", "-"}, change: shared},
		"policy-dry-run-misspelt": {in: strings.Replace(shares, "shares: 4", "share: 4", 1), args: []string{"policy", "--dry-run", "-f", "-"}},
		"policy-dry-run-selector": {in: strings.Replace(shares, "index < 2", "indx(2)", 1), args: []string{"policy", "--dry-run", "-f", "-"}},
		"policy-dry-run-forbidden": {in: shares, args: []string{"policy", "--dry-run", "-f", "-"}, change: func(s *server) {
			s.forbidden = []string{"POST " + own + "sharingpolicies", "POST " + resources + "resourceslices"}
		}},
		"policy-dry-run-claims": {in: shares, args: []string{"policy", "--dry-run", "-f", "-"}, change: func(s *server) {
			s.forbidden = []string{resources + "resourceclaims", resources + "namespaces/default/resourceclaims"}
		}},
		"template-no-node":   {args: []string{"template", "nodes"}},
		"template-two":       {args: []string{"template", "node", "-f", "-"}},
		"template-misspelt":  {in: strings.Replace(machine, "gpus", "gpu", 1), args: []string{"template", "-f", "-"}},
		"template-computer":  {args: []string{"template", "--machine", "gb10", "--driver-version", "580.95.05"}},
		"template-thor":      {args: []string{"template", "--machine", "thor,l4", "--driver-version", "580.95.05"}},
		"template-forbidden": {args: []string{"template", "node"}, change: func(s *server) { s.forbidden = []string{own + "sharingpolicies"} }},
		"top":                {args: []string{"top"}, change: busy},
		"top-namespace":      {args: []string{"top", "-n", "team"}, change: busy},
		"top-json":           {args: []string{"top", "-o", "json", "-n", "lab"}, change: busy},
		"top-forbidden":      {args: []string{"top"}, change: func(s *server) { busy(s); s.forbidden = []string{metricsPath} }},
		"top-authenticated": {args: []string{"top"}, change: func(s *server) {
			busy(s)
			s.metrics = nil
			plugin := s.items["/api/v1/pods"][0].(corev1.Pod)
			plugin.Spec.Containers[0].Args = []string{"--metrics-authentication"}
		}},
		"top-silent": {args: []string{"top"}, change: func(s *server) { busy(s); s.metrics = nil }},
		"top-no-tessera": {args: []string{"top"}, change: func(s *server) {
			s.items = map[string][]any{resources + "resourceslices": {}, resources + "resourceclaims": {}, "/api/v1/pods": {}}
		}},
		"drain-foreign-rule": {args: []string{"drain", "node/1", "--yes"}, change: func(s *server) {
			mine := drainRule("drain-node-gpu-00000002", "gpu-00000002")
			mine.Labels = nil
			s.items[resources+"devicetaintrules"] = []any{mine}
		}},
		"drain-again": {args: []string{"drain", "node", "--yes"}, change: func(s *server) {
			mine := drainRule("drain-node", "")
			mine.Spec.Taint.Effect = resourceapi.DeviceTaintEffectNoExecute
			s.items[resources+"devicetaintrules"] = []any{mine}
		}},
		"drain-dry-run-1.34": {args: []string{"drain", "node", "--dry-run"}, change: func(s *server) {
			s.minor = "34"
			s.items["/apis/resource.k8s.io/v1alpha3/devicetaintrules"] = []any{}
		}},
		"drain-dry-run-json-1.34": {args: []string{"drain", "node", "--dry-run", "-o", "json"}, change: func(s *server) {
			s.minor = "34"
			s.items["/apis/resource.k8s.io/v1alpha3/devicetaintrules"] = []any{}
		}},
		"drain-dry-run":   {args: []string{"drain", "node/1", "--dry-run"}, change: taint},
		"drain-node":      {args: []string{"drain", "node", "--dry-run"}, change: taint},
		"drain-no-rules":  {args: []string{"drain", "node/1", "--dry-run"}},
		"drain-no-gpu":    {args: []string{"drain", "node/7", "--dry-run"}, change: taint},
		"drain-pipe":      {args: []string{"drain", "node/1"}, change: taint},
		"drain-forbidden": {args: []string{"drain", "node/1", "--yes"}, change: func(s *server) { taint(s); s.forbidden = []string{"POST " + resources + "devicetaintrules"} }},
	} {
		t.Run(name, func(t *testing.T) {
			s := cluster(t)
			if tc.change != nil {
				tc.change(s)
			}
			compare(t, name, run(t, s, tc.screen, tc.in, tc.args...))
		})
	}
}

// TestColours: a terminal gets the same text with colours, and nothing else does.
func TestColours(t *testing.T) {
	plain := run(t, cluster(t), screen{width: 80}, "", "map")
	coloured := run(t, cluster(t), screen{width: 80, colour: true}, "", "map")
	if strings.Contains(plain, "\x1b") || !strings.Contains(coloured, "\x1b[31m") {
		t.Errorf("plain %q, coloured %q", plain, coloured)
	}
	for _, c := range []string{bold, red, green, "\x1b[0m"} {
		coloured = strings.ReplaceAll(coloured, c, "")
	}
	if coloured != plain {
		t.Error(cmp.Diff(plain, coloured))
	}
	file, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	if s := screenOf(file); s.colour {
		t.Error("a file has colours")
	}
}

// TestPages: lists are read page by page.
func TestPages(t *testing.T) {
	s := cluster(t)
	run(t, s, screen{width: 80}, "", "map")
	if n := s.pages.Load(); n < 2 {
		t.Errorf("%d further pages were asked for, want those of slices and claims", n)
	}
}

// TestTemplateLabels checks that a template has a note if policies may select the new node
// by labels that aren't known, as when the node of the inventory is gone.
func TestTemplateLabels(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*server)
		args   []string
		noted  bool
	}{
		"node gone":             {func(s *server) { shared(s); s.items["/api/v1/nodes"] = []any{} }, nil, true},
		"node gone, labels":     {func(s *server) { shared(s); s.items["/api/v1/nodes"] = []any{} }, []string{"--labels", "pool=shared"}, false},
		"no policy with labels": {func(s *server) { s.items["/api/v1/nodes"] = []any{} }, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := cluster(t)
			tc.change(s)
			out := run(t, s, screen{}, "", append([]string{"template", "node"}, tc.args...)...)
			if !strings.Contains(out, "kind: ResourceSlice") || strings.Contains(out, "note: No labels of the new node are known") != tc.noted {
				t.Error(out)
			}
		})
	}
}

// TestCalledAs: texts name the program as the user calls it.
func TestCalledAs(t *testing.T) {
	for program, want := range map[string]string{
		"/usr/local/bin/kubectl-gpu": "kubectl gpu", "/home/me/.krew/bin/kubectl-tessera": "kubectl tessera",
		"kubectl-tessera.exe": "kubectl tessera", "bin/kubectl-my_gpus": "kubectl my-gpus", "/tmp/gpu": "kubectl gpu",
	} {
		if got := calledAs(program); got != want {
			t.Errorf("%s: %s, want %s", program, got, want)
		}
	}
	var plain, out bytes.Buffer
	for w, as := range map[*bytes.Buffer]string{&plain: "kubectl gpu", &out: "kubectl tessera"} {
		cmd := command(genericclioptions.IOStreams{In: strings.NewReader(""), Out: naming{w, as}, ErrOut: naming{w, as}}, screen{})
		cmd.SetArgs([]string{"drain", "--help"})
		if err := cmd.Execute(); err != nil {
			t.Fatal(err)
		}
	}
	if got := out.String(); got != strings.ReplaceAll(plain.String(), "kubectl gpu", "kubectl tessera") || !strings.Contains(got, "\n  kubectl tessera drain NODE") {
		t.Error(got)
	}
}
