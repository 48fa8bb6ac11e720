// Package test renders the chart with the real Helm and compares the result
// with golden files. After a wanted change: go test ./deployments/helm/test
// -update, then read the diff.
package test

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/sim/cluster"
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

// template renders the chart with the one value that has no default.
func template(t *testing.T, args ...string) (out, all string, err error) {
	t.Helper()
	return templateAsIs(t, append([]string{"--set=image.repository=registry.example.com/tessera"}, args...)...)
}

func templateAsIs(t *testing.T, args ...string) (out, all string, err error) {
	t.Helper()
	return templateOf(t, chart, args...)
}

func templateOf(t *testing.T, chart string, args ...string) (out, all string, err error) {
	t.Helper()
	return helm(t, append([]string{"template", "tessera", chart, "--namespace", "tessera"}, args...)...)
}

// templateWithHooks renders what Helm installs into a cluster, hooks included.
func templateWithHooks(t *testing.T, args ...string) (out, all string, err error) {
	t.Helper()
	dir := changedChart(t, "_hooks.tpl", `{{- define "tessera.runsHooks" -}}true{{- end -}}`)
	return templateOf(t, dir, append([]string{"--set=image.repository=registry.example.com/tessera"}, args...)...)
}

// changedChart returns a copy of the chart with another file among its templates.
func changedChart(t *testing.T, file, content string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "tessera")
	if err := os.CopyFS(dir, os.DirFS(chart)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "templates", file), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
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
		"default":    {"--kube-version=1.37.1"},
		"simulator":  {"--kube-version=1.37.1"},
		"everything": {"--kube-version=1.35.4"},
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
		"kept by default":     {crds: len(files), kept: len(files)},
		"part of the release": {args: []string{"--set=crds.keep=false"}, crds: len(files)},
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

// There is no default repository: anyone could register its name, and that
// image would run privileged on nodes of users who forgot to set one.
func TestImage(t *testing.T) {
	_, all, err := templateAsIs(t)
	if want := "image.repository is not set: there are no published images, so build one"; err == nil || !strings.Contains(all, want) {
		t.Errorf("without a repository: error %v, want %q in:\n%s", err, want, all)
	}
	digest := "sha256:" + strings.Repeat("0123456789abcdef", 4)
	for name, c := range map[string]struct {
		set  []string
		want string
	}{
		"the chart's version": {want: "registry.example.com/tessera:0.1.0"},
		"a tag":               {[]string{"--set=image.tag=v1"}, "registry.example.com/tessera:v1"},
		"a digest":            {[]string{"--set=image.digest=" + digest}, "registry.example.com/tessera@" + digest},
		"a tag and a digest":  {[]string{"--set=image.tag=v1", "--set=image.digest=" + digest}, "registry.example.com/tessera@" + digest},
	} {
		t.Run(name, func(t *testing.T) {
			out, all, err := template(t, append(c.set, "--set=simulator.enabled=true")...)
			if err != nil {
				t.Fatalf("helm template: %v\n%s", err, all)
			}
			images := regexp.MustCompile(`(?m)^ +image: (.*)$`).FindAllStringSubmatch(out, -1)
			if len(images) != 4 {
				t.Errorf("%d containers, want one for each part", len(images))
			}
			for _, image := range images {
				if image[1] != c.want {
					t.Errorf("image %s, want %s", image[1], c.want)
				}
			}
		})
	}
}

// With metrics off nothing listens for them, and probes go on.
func TestMetricsOff(t *testing.T) {
	out, all, err := template(t, "--set=metrics.enabled=false,metrics.service.enabled=true",
		"--set=monitoring.podMonitor.enabled=true,monitoring.rules.enabled=true,monitoring.dashboards.enabled=true")
	if err != nil {
		t.Fatalf("helm template: %v\n%s", err, all)
	}
	for text, want := range map[string]int{
		"- --metrics-address=0\n": 1, "- --metrics-address=\n": 2, "name: metrics": 0, "kind: Service\n": 0,
		"kind: PodMonitor": 0, "kind: PrometheusRule": 0, "grafana_dashboard": 0,
		"path: /healthz, port: health": 4, "path: /readyz, port: health": 3,
	} {
		if got := strings.Count(out, text); got != want {
			t.Errorf("%q: %d times, want %d", text, got, want)
		}
	}
}

// TestRenderedChartHasNoHooks checks that whoever applies a rendered chart without Helm creates
// no Job, which would run at once, and no rights for it, which would stay.
func TestRenderedChartHasNoHooks(t *testing.T) {
	const hooks = "helm.sh/hook: "
	args := []string{"--values=testdata/everything.values.yaml", "--set=controller.nodeLabels.enabled=true"}
	for _, how := range []string{"--is-upgrade=false", "--is-upgrade"} {
		out, all, err := template(t, append(args, how)...)
		if err != nil {
			t.Fatalf("helm template: %v\n%s", err, all)
		}
		if n := strings.Count(out, hooks); n > 0 || strings.Contains(out, "kind: Job\n") {
			t.Errorf("with %s the rendered chart has %d hooks", how, n)
		}
	}
	out, all, err := templateWithHooks(t, args...)
	if n := strings.Count(out, hooks); err != nil || n != 8 {
		t.Errorf("Helm installs the two Jobs and their rights as %d hooks, want 8: %v\n%s", n, err, all)
	}
}

// TestOrderOfHooks checks that helm uninstall removes taints before labels: Helm runs hooks by
// weight, then by name, and none after one that fails. A label that stays does no harm, while a
// taint keeps pods off. The rights of both come first.
func TestOrderOfHooks(t *testing.T) {
	out, all, err := templateWithHooks(t, "--set=controller.nodeLabels.enabled=true,packing.ranks=true")
	if err != nil {
		t.Fatalf("helm template: %v\n%s", err, all)
	}
	weights := map[string]int{}
	for doc := range strings.SplitSeq(out, "\n---\n") {
		var object metav1.PartialObjectMetadata
		if err := yaml.Unmarshal([]byte(doc), &object); err != nil {
			t.Fatal(err)
		}
		if object.Annotations["helm.sh/hook"] == "" {
			continue
		}
		weight, err := strconv.Atoi(object.Annotations["helm.sh/hook-weight"])
		if err != nil {
			t.Errorf("%s %s: its weight: %v", object.Kind, object.Name, err)
		}
		what := "rights"
		if object.Kind == "Job" {
			what = object.Name
		}
		if before, seen := weights[what]; seen && before != weight {
			t.Errorf("%s %s has the weight %d, others %d", object.Kind, object.Name, weight, before)
		}
		weights[what] = weight
	}
	rights, taints, labels := weights["rights"], weights["tessera-remove-node-taints"], weights["tessera-remove-node-labels"]
	if len(weights) != 3 || rights >= taints || taints >= labels {
		t.Errorf("weights %v, want the rights' below the Job's of taints, and that below the Job's of labels", weights)
	}
}

// An upgrade of the cluster must leave the release upgradable and removable: its
// manifest has no beta API, and is the same for all versions of Kubernetes but for the
// plugin's update strategy (TestPluginsUpdateStrategy).
func TestEveryKubernetes(t *testing.T) {
	values := "--values=testdata/everything.values.yaml"
	newest, all, err := template(t, "--kube-version=1.37.1", values)
	if err != nil {
		t.Fatalf("helm template: %v\n%s", err, all)
	}
	for _, m := range regexp.MustCompile(`(?m)^apiVersion: (.*)$`).FindAllStringSubmatch(newest, -1) {
		if ga := regexp.MustCompile(`^([a-z0-9.]+/)?v[0-9]+$`); !ga.MatchString(m[1]) {
			t.Errorf("an object of %s in the manifest: want GA versions only", m[1])
		}
	}
	for _, version := range []string{"1.31.4", "1.32.13", "1.33.13", "1.34.4", "1.35.4", "1.36.3"} {
		out, all, err := template(t, "--kube-version="+version, values)
		if err != nil {
			t.Fatalf("helm template for %s: %v\n%s", version, err, all)
		}
		if diff := cmp.Diff(newest, out); diff != "" {
			t.Errorf("the manifest for %s isn't the one for 1.37:\n%s", version, diff)
		}
	}
}

// TestPluginsUpdateStrategy checks that plugins are replaced one beside the other where the
// kubelet knows two of them, and one after the other elsewhere.
func TestPluginsUpdateStrategy(t *testing.T) {
	const beside, after = "rollingUpdate: {maxSurge: 5, maxUnavailable: 0}", "maxUnavailable: 5\n"
	for version, want := range map[string]string{
		"1.31.4": after, "1.32.13": after, "1.33.0": beside, "1.34.1-gke.2000": beside, "1.37.1": beside,
	} {
		out, all, err := template(t, "--kube-version="+version, "--show-only=templates/node/daemonset.yaml",
			"--set=node.updateStrategy.rollingUpdate.maxUnavailable=5")
		if err != nil {
			t.Fatalf("helm template for %s: %v\n%s", version, err, all)
		}
		if !strings.Contains(out, want) {
			t.Errorf("the manifest for %s has no %q:\n%s", version, want, out)
		}
	}
	for version, want := range map[string]string{"1.32.13": "updateStrategy:\n    type: RollingUpdate\n", "1.37.1": "rollingUpdate: {maxSurge: 1, maxUnavailable: 0}"} {
		out, all, err := template(t, "--kube-version="+version, "--show-only=templates/node/daemonset.yaml", "--set=node.updateStrategy.rollingUpdate=null")
		if err != nil || !strings.Contains(out, want) {
			t.Errorf("without rollingUpdate, the manifest for %s has no %q: %v\n%s", version, want, err, all)
		}
	}
}

// TestLeftOut checks what NOTES.txt says that a version of Kubernetes leaves out.
func TestLeftOut(t *testing.T) {
	// Helm prints notes of installs only.
	dir := changedChart(t, "left-out.yaml", `text: {{ include "tessera.leftOut" . | quote }}`)
	const partitions, sizes, names = "MIG partitions on demand", "MPS shares by size", "nvidia.com/gpu in resources.limits"
	for version, c := range map[string]struct {
		set  string
		want []string
	}{
		"1.31.4":  {want: []string{partitions + " (Kubernetes 1.33,", sizes + " (Kubernetes 1.36)", names + " (Kubernetes 1.34,"}},
		"1.32.13": {set: "deviceClasses.extendedResourceName=", want: []string{partitions + " (Kubernetes 1.33,", sizes + " (Kubernetes 1.36)"}},
		"1.33.13": {want: []string{partitions + ", unless the feature gate", sizes + " (Kubernetes 1.36)", names + " (Kubernetes 1.34,"}},
		"1.34.4":  {want: []string{partitions + ", unless the feature gate", sizes + " (Kubernetes 1.36)", names + ", unless the feature gate DRAExtendedResource is on"}},
		"1.35.4":  {want: []string{partitions + ", unless the feature gate", sizes + " (Kubernetes 1.36)", names + ", unless the feature gate DRAExtendedResource is on"}},
		"1.36.3":  {},
		"1.37.1":  {},
	} {
		t.Run(version, func(t *testing.T) {
			out, all, err := templateOf(t, dir, "--kube-version="+version, "--show-only=templates/left-out.yaml",
				"--set=image.repository=registry.example.com/tessera", "--set="+c.set)
			if err != nil {
				t.Fatalf("helm template: %v\n%s", err, all)
			}
			for _, want := range c.want {
				if !strings.Contains(out, "- "+want) {
					t.Errorf("no %q in:\n%s", want, out)
				}
			}
			if lines := strings.Count(out, `\n- `); lines != len(c.want) {
				t.Errorf("%d parts are left out, want %d:\n%s", lines, len(c.want), out)
			}
		})
	}
}

// TestWithoutMPS checks that only the plugin, which reports the processes' use of GPUs, and
// the supervisor may see the host's processes.
func TestWithoutMPS(t *testing.T) {
	const hostPID = "hostPID: true\n"
	for set, want := range map[string]int{"mps.enabled=true": 2, "mps.enabled=false": 1} {
		out, all, err := template(t, "--set", set)
		if err != nil {
			t.Fatalf("helm template: %v\n%s", err, all)
		}
		if got := strings.Count(out, hostPID); got != want {
			t.Errorf("%s: %d pods see the host's processes, want %d", set, got, want)
		}
		if got := strings.Contains(out, "name: tessera-mps\n"); got != (want == 2) {
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
		"digest":                       {"image.digest=latest", []string{"/image/digest", "sha256:"}},
		"a second plugin on a node":    {"node.updateStrategy.rollingUpdate.maxSurge=1", []string{"/node/updateStrategy/rollingUpdate", "'maxSurge' not allowed"}},
		"an upgrade of nothing":        {"node.updateStrategy.rollingUpdate.maxUnavailable=0", []string{"/node/updateStrategy/rollingUpdate/maxUnavailable"}},
		"a label of the chart's":       {`node.podLabels.app\.kubernetes\.io/component=mine`, []string{"invalid propertyName 'app.kubernetes.io/component'"}},
		"a label of a PodMonitor":      {`monitoring.podMonitor.labels.app\.kubernetes\.io/name=mine`, []string{"invalid propertyName 'app.kubernetes.io/name'"}},
		"an annotation of the chart's": {`mps.podAnnotations.kubectl\.kubernetes\.io/default-container=mine`, []string{"invalid propertyName 'kubectl.kubernetes.io/default-container'"}},
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

// TestMissingValues checks that values which a release from before them doesn't have, as with
// helm upgrade --reuse-values, are as their defaults.
func TestMissingValues(t *testing.T) {
	for name, c := range map[string]struct{ missing, as string }{
		"packing":             {"packing=null", "packing.ranks=false"},
		"packing but ranks":   {"packing.ranks=true,packing.poolLabel=null,packing.reserve=null", "packing.ranks=true"},
		"packing but reserve": {"packing.ranks=null,packing.poolLabel=null,packing.reserve.hard=1", "packing.reserve.hard=1"},
		"hard":                {"packing.ranks=true,packing.reserve.hard=null", "packing.ranks=true"},
		"node.deviceMetadata": {"node.deviceMetadata=null", "node.deviceMetadata=true"},
	} {
		t.Run(name, func(t *testing.T) {
			want, all, err := templateWithHooks(t, "--set", c.as)
			if err != nil {
				t.Fatalf("helm template --set %s: %v\n%s", c.as, err, all)
			}
			got, all, err := templateWithHooks(t, "--set", c.missing)
			if err != nil {
				t.Fatalf("helm template --set %s: %v\n%s", c.missing, err, all)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("--set %s isn't as --set %s:\n%s", c.missing, c.as, diff)
			}
		})
	}
}

func TestOldKubernetes(t *testing.T) {
	_, all, err := template(t, "--kube-version=1.30.14")
	if err == nil || !strings.Contains(all, "requires kubeVersion: >=1.31.0-0") {
		t.Errorf("Kubernetes 1.30: error %v\n%s", err, all)
	}
}
