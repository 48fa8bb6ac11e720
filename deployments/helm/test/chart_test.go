// Package test renders the chart with the real Helm and compares the result
// with golden files. After a wanted change: go test ./deployments/helm/test
// -update, then read the diff.
package test

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/test/cluster"
)

const chart = "../tessera"

var update = flag.Bool("update", false, "write the golden files")

// helm runs Helm and returns its standard output, and everything it printed.
func helm(t *testing.T, args ...string) (out, all string, err error) {
	t.Helper()
	program, err := cluster.Tool(t.Context(), "helm", os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	var stdout, stderr strings.Builder
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Env = append(os.Environ(), "HOME="+t.TempDir(), "KUBECONFIG=/dev/null")
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err = cmd.Run()
	return stdout.String(), stdout.String() + stderr.String(), err
}

func template(t *testing.T, args ...string) (out, all string, err error) {
	t.Helper()
	return helm(t, append([]string{"template", "tessera", chart, "--namespace", "tessera"}, args...)...)
}

func TestLint(t *testing.T) {
	values, err := filepath.Glob("testdata/*.values.yaml")
	if err != nil || len(values) == 0 {
		t.Fatalf("no value files: %v", err)
	}
	for _, file := range values {
		if _, all, err := helm(t, "lint", "--strict", chart, "--values", file); err != nil {
			t.Errorf("helm lint with %s: %v\n%s", file, err, all)
		}
	}
}

// CRDs are left out here: they are generated, and TestCRDs looks at them.
func TestGolden(t *testing.T) {
	for name, args := range map[string][]string{
		"default":         {"--kube-version=1.37.1"},
		"kubernetes-1.32": {"--kube-version=1.32.13"},
		"simulator":       {"--kube-version=1.37.1"},
		"everything":      {"--kube-version=1.35.4"},
	} {
		t.Run(name, func(t *testing.T) {
			args := append(args, "--set=crds.install=false")
			if values := "testdata/" + name + ".values.yaml"; exists(values) {
				args = append(args, "--values="+values)
			}
			got, all, err := template(t, args...)
			if err != nil {
				t.Fatalf("helm template: %v\n%s", err, all)
			}
			golden := "testdata/" + name + ".golden.yaml"
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("%s (-want +got; -update writes it):\n%s", golden, diff)
			}
		})
	}
}

func exists(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}

func TestCRDs(t *testing.T) {
	files, err := filepath.Glob(chart + "/files/crds/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("the chart has no CRDs: %v", err)
	}
	const kind, keep = "kind: CustomResourceDefinition\n", "helm.sh/resource-policy: keep\n"
	for name, c := range map[string]struct {
		args       []string
		crds, kept int
	}{
		"part of the release": {crds: len(files)},
		"kept":                {args: []string{"--set=crds.keep=true"}, crds: len(files), kept: len(files)},
		"left out":            {args: []string{"--set=crds.install=false"}},
	} {
		t.Run(name, func(t *testing.T) {
			out, all, err := template(t, c.args...)
			if err != nil {
				t.Fatalf("helm template: %v\n%s", err, all)
			}
			if crds, kept := strings.Count(out, kind), strings.Count(out, keep); crds != c.crds || kept != c.kept {
				t.Errorf("%d CRDs, %d kept, want %d and %d", crds, kept, c.crds, c.kept)
			}
		})
	}
}

// Without the supervisor nothing of the chart may see the host's processes.
func TestWithoutMPS(t *testing.T) {
	const hostPID = "hostPID: true\n"
	for set, want := range map[string]int{"mps.enabled=true": 1, "mps.enabled=false": 0} {
		out, all, err := template(t, "--set", set)
		if err != nil {
			t.Fatalf("helm template: %v\n%s", err, all)
		}
		if got := strings.Count(out, hostPID); got != want {
			t.Errorf("%s: %d pods see the host's processes, want %d", set, got, want)
		}
		if got := strings.Contains(out, "name: tessera-mps\n"); got != (want == 1) {
			t.Errorf("%s: supervisor rendered: %t", set, got)
		}
	}
}

// Bad values are refused with words that name the value.
func TestRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		set  string
		want []string
	}{
		"unknown value":                {"nodes.driverRoot=/x", []string{"additional properties 'nodes' not allowed"}},
		"unknown part":                 {"node.kubeletDir=/x", []string{"/node", "'kubeletDir' not allowed"}},
		"wrong type":                   {"controller.replicas=two", []string{"/controller/replicas", "want integer"}},
		"relative path":                {"node.dataDir=var/lib", []string{"/node/dataDir"}},
		"root as directory":            {"node.cdiDir=/", []string{"/node/cdiDir"}},
		"pull policy":                  {"image.pullPolicy=Sometimes", []string{"/image/pullPolicy", "'IfNotPresent'"}},
		"class without CEL":            {"deviceClasses.extra.h100.cel=true", []string{"/deviceClasses/extra/h100", "missing property 'expression'"}},
		"class of the chart":           {`deviceClasses.extra.gpu\.nvidia\.com.expression=x`, []string{"invalid propertyName 'gpu.nvidia.com'"}},
		"the other class of the chart": {`deviceClasses.extra.mig\.nvidia\.com.expression=x`, []string{"invalid propertyName 'mig.nvidia.com'"}},
		"a sharing class of the chart": {`deviceClasses.extra.timeslice\.gpu\.nvidia\.com.expression=x`, []string{"invalid propertyName 'timeslice.gpu.nvidia.com'"}},
		"compute mode":                 {"node.mpsComputeMode=default", []string{"/node/mpsComputeMode", "'exclusive-process', 'unchanged'"}},
		"part of the supervisor":       {"mps.nodeSelector.pool=gpu", []string{"/mps", "'nodeSelector' not allowed"}},
		"class name":                   {"deviceClasses.extra.H100.expression=x", []string{"invalid propertyName 'H100'"}},
		"no machine":                   {"simulator.enabled=true,simulator.machine=", []string{"/simulator/machine"}},
		"two drivers":                  {"simulator.enabled=true,node.driverRoot=/run/nvidia/driver", []string{"simulator.enabled", "node.driverRoot (/run/nvidia/driver)"}},
		"extended resource":            {"deviceClasses.extendedResourceName=gpu", []string{"/deviceClasses/extendedResourceName"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, all, err := template(t, "--set", c.set)
			if err == nil {
				t.Fatalf("helm template --set %s was taken", c.set)
			}
			for _, want := range c.want {
				if !strings.Contains(all, want) {
					t.Errorf("no %q in:\n%s", want, all)
				}
			}
		})
	}
}

func TestOldKubernetes(t *testing.T) {
	_, all, err := template(t, "--kube-version=1.31.14")
	if err == nil || !strings.Contains(all, "requires kubeVersion: >=1.32.0-0") {
		t.Errorf("Kubernetes 1.31: error %v\n%s", err, all)
	}
}
