package test

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/pkg/control/classes"
)

// TestWithoutDRA checks which flags a refused install names. (TestRefusedWithoutDRA
// asks a real server.)
func TestWithoutDRA(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "tessera")
	if err := os.CopyFS(dir, os.DirFS(chart)); err != nil {
		t.Fatal(err)
	}
	// Without a server Helm claims all versions of the API, so that the chart is made to
	// look for another one.
	file := filepath.Join(dir, "templates/_kubernetes.tpl")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, bytes.ReplaceAll(text, []byte(`Has "resource.k8s.io`), []byte(`Has "none.example.com`)), 0o600); err != nil {
		t.Fatal(err)
	}
	const gates = "--feature-gates=DynamicResourceAllocation=true on kube-apiserver, kube-controller-manager, kube-scheduler and every kubelet"
	for version, want := range map[string][]string{
		"1.31.4":  {gates, "--runtime-config=resource.k8s.io/v1alpha3=true on kube-apiserver", "managed for you"},
		"1.32.13": {gates, "--runtime-config=resource.k8s.io/v1beta1=true on kube-apiserver", "managed for you"},
		"1.33.13": {gates, "--runtime-config=resource.k8s.io/v1beta1=true,resource.k8s.io/v1beta2=true on kube-apiserver", "managed for you"},
		"1.34.4":  {"on by default in this version: remove DynamicResourceAllocation=false"},
		"1.37.1":  {"on by default in this version: remove DynamicResourceAllocation=false"},
	} {
		_, all, err := helm(t, "template", "tessera", dir, "--kube-version="+version, "--set=image.repository=registry.example.com/tessera")
		for _, text := range append(want, "Dynamic Resource Allocation is off: this cluster (Kubernetes v"+version+")") {
			if err == nil {
				t.Fatalf("Kubernetes %s: the chart was rendered", version)
			}
			if !strings.Contains(all, text) {
				t.Errorf("Kubernetes %s: no %q in:\n%s", version, text, all)
			}
		}
	}
}

// The controller must be able to read what the chart writes for it.
func TestDeviceClasses(t *testing.T) {
	ours := []string{"gpu.nvidia.com", "mig.nvidia.com", "mps.gpu.nvidia.com", "timeslice.gpu.nvidia.com"}
	for name, c := range map[string]struct {
		args []string
		want []string
		// resources are the extended resource names, in the same order.
		resources []string
	}{
		"default":     {nil, ours, []string{"nvidia.com/gpu", "", "", ""}},
		"none":        {[]string{"--set=deviceClasses.install=false"}, nil, nil},
		"no resource": {[]string{"--set=deviceClasses.extendedResourceName="}, ours, []string{"", "", "", ""}},
		"extra": {
			[]string{"--values=testdata/everything.values.yaml"},
			append(slices.Clone(ours), "mig-1g.10gb.gpu.example.com", "slow.gpu.example.com"),
			[]string{"nvidia.com/gpu", "", "", "", "nvidia.com/mig-1g.10gb", ""},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var names, resources []string
			for _, class := range renderedClasses(t, c.args...).Classes {
				names = append(names, class.Name)
				resources = append(resources, ptr.Deref(class.Spec.ExtendedResourceName, ""))
				for _, s := range class.Spec.Selectors {
					result := cel.GetCompiler(cel.Features{}).CompileCELExpression(s.CEL.Expression, cel.Options{})
					if result.Error != nil {
						t.Errorf("%s: %v", class.Name, result.Error)
					}
				}
			}
			if !slices.Equal(names, c.want) || !slices.Equal(resources, c.resources) {
				t.Errorf("classes %q with the resources %q, want %q and %q", names, resources, c.want, c.resources)
			}
		})
	}
}

// renderedClasses reads the chart's file of DeviceClasses as the controller does.
func renderedClasses(t *testing.T, args ...string) *classes.Wanted {
	t.Helper()
	out, all, err := template(t, append(args, "--show-only=templates/controller/deviceclasses.yaml")...)
	if err != nil {
		t.Fatalf("helm template: %v\n%s", err, all)
	}
	config := &corev1.ConfigMap{}
	if err := yaml.UnmarshalStrict([]byte(out), config); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "device-classes.yaml")
	if err := os.WriteFile(file, []byte(config.Data["device-classes.yaml"]), 0o600); err != nil {
		t.Fatal(err)
	}
	wanted, err := classes.Read(file)
	if err != nil {
		t.Fatal(err)
	}
	return wanted
}
