package platform

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// TestProfiles checks every profile, the chart's values file that it names, and that each
// values file is installed by a profile.
func TestProfiles(t *testing.T) {
	const values = "../../../deployments/helm/tessera/platforms"
	used := map[string]bool{}
	nodes := map[string]string{}
	for _, name := range Names() {
		p, err := Find(name)
		if err != nil {
			t.Error(err)
			continue
		}
		if p.Name != name {
			t.Errorf("%s: its name is %q", name, p.Name)
		}
		if other := nodes[p.Node.NameFormat]; other != "" && p.Node.NameFormat != "" {
			t.Errorf("nodes of %s and %s have the same names, %q", other, name, p.Node.NameFormat)
		}
		nodes[p.Node.NameFormat] = name
		if p.Use.Values == "" {
			continue
		}
		used[p.Use.Values] = true
		if _, err := os.Stat(filepath.Join(values, p.Use.Values)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	files, err := filepath.Glob(values + "/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if !used[filepath.Base(file)] {
			t.Errorf("no profile installs with %s", file)
		}
	}
}

// TestObjects checks that the objects of each profile are YAML with a kind and a name, and that
// every admission policy has a binding.
func TestObjects(t *testing.T) {
	for _, name := range Names() {
		p, err := Find(name)
		if err != nil {
			t.Fatal(err)
		}
		var policies, bound []string
		for text := range strings.SplitSeq(p.Cluster.Objects, "\n---\n") {
			if strings.TrimSpace(text) == "" {
				continue
			}
			var object struct {
				APIVersion, Kind string
				Metadata         struct{ Name string }
				Spec             struct{ PolicyName string }
			}
			if err := yaml.Unmarshal([]byte(text), &object); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if object.APIVersion == "" || object.Kind == "" || object.Metadata.Name == "" {
				t.Errorf("%s: an object without apiVersion, kind or name:\n%s", name, text)
			}
			if kind, isBinding := strings.CutSuffix(object.Kind, "Binding"); isBinding {
				bound = append(bound, kind+" "+object.Spec.PolicyName)
			} else if strings.HasSuffix(kind, "AdmissionPolicy") {
				policies = append(policies, kind+" "+object.Metadata.Name)
			}
		}
		if slices.Sort(policies); !slices.Equal(policies, slices.Sorted(slices.Values(bound))) {
			t.Errorf("%s: policies %q, of which these are bound: %q", name, policies, bound)
		}
	}
}

// TestUnknownPlatform checks that an unknown name is answered with the known ones.
func TestUnknownPlatform(t *testing.T) {
	_, err := Find("gke")
	if err == nil || !strings.Contains(err.Error(), `no platform "gke"`) || !strings.Contains(err.Error(), "gke-cos") {
		t.Errorf("Find of an unknown platform: %v", err)
	}
}

// TestValidate checks that a wrong field is named.
func TestValidate(t *testing.T) {
	const valid = "title: x\nsources: [y]\n"
	for fields, want := range map[string]string{
		"node: {driver: {}}":                   "",
		"node: {driver: {hardware: 2xabacus}}": `node\.driver\.hardware`,
		"node: {driver: {hardware: 1xt4}, mounts: [{path: var, options: [noexec]}]}":  `node\.mounts\[0\]\.path: "var"`,
		"node: {driver: {hardware: 1xt4}, mounts: [{path: /var}]}":                    `node\.mounts\[0\] changes nothing`,
		"node: {driver: {hardware: 1xt4}, mounts: [{path: /var, type: nfs}]}":         `"nfs" is none of tmpfs, disk, overlay`,
		"node: {driver: {hardware: 1xt4}, mounts: [{path: /var, options: [sync]}]}":   `"sync" is none of ro, noexec`,
		"node: {driver: {hardware: 1xt4}, nameFormat: Node-%d}":                       `node\.nameFormat: .*lower case`,
		"node: {driver: {hardware: 1xt4}, nameFormat: node}":                          `"node" needs one %d`,
		"node: {driver: {hardware: 1xt4}, labels: {a: 'b c'}}":                        `node\.labels\[a\]`,
		"node: {driver: {hardware: 1xt4}, taints: [{key: a}]}":                        `node\.taints\[0\]\.effect: ""`,
		"node: {driver: {hardware: 1xt4}, links: {/a: b}}":                            `node\.links\[/a\]: "b"`,
		"node: {driver: {hardware: 1xt4}, runtime: {name: '3'}}":                      `"3" is none of containerd, containerd-1\.7, cri-o`,
		"node: {driver: {hardware: 1xt4, libraries: /lib}}":                           `node\.driver\.libraries: "/lib"`,
		"node: {driver: {hardware: 1xt4, ownTree: true}}":                             `node\.driver\.ownTree`,
		"cluster: {podSecurity: {enforce: strict}}\nnode: {driver: {hardware: 1xt4}}": `"strict" is none of privileged, baseline, restricted`,
		"node: {driver: {hardware: 1xt4}}\nuse: {cannot: never}":                      `cannot and message go together`,
		"node: {driver: {hardware: 1xt4}}\nuse: {cannot: never, message: '('}":        `use\.message`,
		"node: {driver: {hardware: 1xt4}}\nuse: {lacks: {mps: why}}":                  `"mps" is none of install, whole, share`,
		"node: {driver: {hardware: 1xt4}}\nuse: {values: ../x.yaml}":                  `use\.values`,
		"node: {driver: {hardware: 1xt4}}\nuse: {before: \"a \\\\\\nb\"}":             `one command a line`,
	} {
		var p Platform
		if err := yaml.UnmarshalStrict([]byte(valid+fields), &p); err != nil {
			t.Fatalf("%s: %v", fields, err)
		}
		err := p.validate()
		if want == "" && err == nil {
			continue
		}
		if want == "" || err == nil || !regexp.MustCompile(want).MatchString(err.Error()) {
			t.Errorf("%s: error %v, want %q", fields, err, want)
		}
	}
}
