package test

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/sim/cluster/platform"
)

// platformFiles returns the chart's values files for platforms.
func platformFiles(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(chart + "/platforms/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("the chart has no values files for platforms: %v", err)
	}
	return files
}

// TestPlatformValues checks that each values file for a platform passes the schema, changes
// every value that it names, and says why.
func TestPlatformValues(t *testing.T) {
	defaults := readValues(t, chart+"/values.yaml")
	for _, file := range platformFiles(t) {
		if _, all, err := helm(t, "lint", "--strict", chart, "--values", file, "--set=image.repository=registry.example.com/tessera"); err != nil {
			t.Errorf("helm lint with %s: %v\n%s", file, err, all)
		}
		for _, value := range unchanged("", readValues(t, file), defaults) {
			t.Errorf("%s: %s is the chart's default, or not a value of the chart: leave it out", file, value)
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(string(text), "\n")
		if !strings.HasPrefix(lines[0], "# ") {
			t.Errorf("%s: the first line doesn't say what the file is for", file)
		}
		for i, line := range lines {
			if regexp.MustCompile(`^  [a-zA-Z]+:`).MatchString(line) && !strings.HasPrefix(lines[i-1], "  # ") {
				t.Errorf("%s:%d: no comment says why the value differs: %s", file, i+1, line)
			}
		}
	}
}

func readValues(t *testing.T, file string) map[string]any {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var values map[string]any
	if err := yaml.UnmarshalStrict(text, &values); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return values
}

// unchanged returns the values that are as the defaults. What is below a default that is an
// object of Kubernetes, such as an affinity, has no defaults.
func unchanged(path string, values, defaults map[string]any) []string {
	var same []string
	for key, value := range values {
		was, known := defaults[key]
		inner, isMap := value.(map[string]any)
		before, wasMap := was.(map[string]any)
		switch at := path + "." + key; {
		case !known && path == "":
			same = append(same, key)
		case isMap && wasMap:
			same = append(same, unchanged(at, inner, before)...)
		case reflect.DeepEqual(value, was):
			same = append(same, strings.TrimPrefix(at, "."))
		}
	}
	slices.Sort(same)
	return same
}

// TestPlatformValuesArePacked checks that the packed chart has the values files.
func TestPlatformValuesArePacked(t *testing.T) {
	dir := t.TempDir()
	if _, all, err := helm(t, "package", chart, "--destination", dir); err != nil {
		t.Fatalf("helm package: %v\n%s", err, all)
	}
	archives, err := filepath.Glob(dir + "/*.tgz")
	if err != nil || len(archives) != 1 {
		t.Fatalf("archives %q: %v", archives, err)
	}
	packed := filesOf(t, archives[0])
	for _, file := range platformFiles(t) {
		if want := "tessera/platforms/" + filepath.Base(file); !slices.Contains(packed, want) {
			t.Errorf("the packed chart has no %s, only %q", want, packed)
		}
	}
}

// filesOf lists the files in a compressed tar archive.
func filesOf(t *testing.T, archive string) []string {
	t.Helper()
	file, err := os.Open(archive)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	unzipped, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for r := tar.NewReader(unzipped); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return names
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, header.Name)
	}
}

// TestRunsOnPlatforms checks that with a platform's values the plugin and the supervisor run on
// its nodes: labels and taints let them.
func TestRunsOnPlatforms(t *testing.T) {
	for _, name := range platform.Names() {
		p, err := platform.Find(name)
		if err != nil {
			t.Fatal(err)
		}
		var args []string
		if p.Use.Values != "" {
			args = append(args, "--values="+chart+"/platforms/"+p.Use.Values)
		}
		out, all, err := template(t, args...)
		if err != nil {
			t.Fatalf("%s: helm template: %v\n%s", name, err, all)
		}
		nodeLabels := map[string]string{corev1.LabelOSStable: "linux"}
		maps.Copy(nodeLabels, p.Node.Labels)
		for _, set := range daemonSets(t, out) {
			pod := set.Spec.Template.Spec
			if !runsOn(t, pod.Affinity, nodeLabels) {
				t.Errorf("%s: %s isn't for nodes with the labels %v", name, set.Name, nodeLabels)
			}
			for key, value := range pod.NodeSelector {
				if nodeLabels[key] != value {
					t.Errorf("%s: %s is for nodes with %s=%s only", name, set.Name, key, value)
				}
			}
			for _, taint := range p.Node.Taints {
				if !slices.ContainsFunc(pod.Tolerations, func(c corev1.Toleration) bool { return tolerates(c, taint) }) {
					t.Errorf("%s: %s doesn't tolerate the taint %s", name, set.Name, taint.ToString())
				}
			}
		}
	}
}

func tolerates(c corev1.Toleration, taint corev1.Taint) bool {
	return c.Key == taint.Key && (c.Effect == "" || c.Effect == taint.Effect) &&
		(c.Operator == corev1.TolerationOpExists || c.Value == taint.Value)
}

// TestCriticalPods checks that a ResourceQuota admits the critical priority classes that the
// chart's pods have, and no others.
func TestCriticalPods(t *testing.T) {
	const node, system = "system-node-critical", "system-cluster-critical"
	for set, want := range map[string][]string{
		"node.logVerbosity=2":                                                                {system, node},
		"node.priorityClassName=mine,mps.priorityClassName=":                                 {system},
		"node.priorityClassName=,mps.enabled=false":                                          {system},
		"controller.priorityClassName=mine":                                                  {node},
		"node.priorityClassName=mine,mps.priorityClassName=,controller.priorityClassName=no": nil,
	} {
		out, all, err := template(t, "--set", set)
		if err != nil {
			t.Fatalf("helm template: %v\n%s", err, all)
		}
		var got []string
		for doc := range strings.SplitSeq(out, "\n---\n") {
			var quota corev1.ResourceQuota
			if strings.Contains(doc, "\nkind: ResourceQuota\n") {
				if err := yaml.UnmarshalStrict([]byte(doc), &quota); err != nil {
					t.Fatal(err)
				}
				got = append(got, quota.Spec.ScopeSelector.MatchExpressions[0].Values...)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("--set %s: the quota admits %q, want %q", set, got, want)
		}
	}
}
